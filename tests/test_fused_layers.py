"""Batch norms and pooling with their ReLU are those of torch, on a GPU or through Triton's interpreter."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

import kernel_cases  # noqa: F401 - makes the interpreter quicker

pytest.importorskip("triton", reason="the kernels are written in Triton")
from iterand import prune_
from iterand.engine import fusion, normalization
from iterand.engine import pooling as kernel_images
from iterand.engine.fusion import fuse_
from iterand.engine.normalization import FusedNorm, normalize, statistics
from iterand.engine.pooling import FusedPool, is_two_by_two, pool
from iterand.lab.networks.convolutional import conv6, vgg11
from iterand.lab.networks.resnet import ResidualBlock, imagenet_resnet, resnet20
from iterand.masking import skeleton

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TYPES = [torch.float32, *([torch.bfloat16] if ON_GPU else [])]  # the interpreter cuts off where hardware rounds


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    if not ON_GPU:
        monkeypatch.setattr(normalization, "_TILE", 256)
        monkeypatch.setattr(normalization, "_SUMMED", 256)
        monkeypatch.setattr(normalization, "_PROGRAMS", 6)


def images_of(channels, side, kind=torch.float32, batch=4, mean=3.0):
    generator = torch.Generator().manual_seed(channels)
    images = torch.randn(batch, channels, side, side, generator=generator) * 2 + mean
    return images.to(DEVICE, kind).to(memory_format=torch.channels_last).requires_grad_()


def pair(channels, affine, rectified):
    """An ordinary norm, and the same norm computed by the kernels."""
    torch.manual_seed(channels)
    plain = nn.BatchNorm2d(channels, affine=affine, device=DEVICE)
    if affine:
        nn.init.normal_(plain.weight)
        nn.init.normal_(plain.bias)
    fused = copy.deepcopy(plain)
    fused.__class__ = FusedNorm
    fused.rectified = rectified
    return plain, fused


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rectified", [True, False])
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize(("channels", "side", "affine"), [(16, 5, False), (20, 4, True), (100, 3, True), (1, 3, True)])
@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_norm_and_its_gradients(channels, side, affine, adds, rectified, training, kind):
    plain, fused = pair(channels, affine, rectified)
    plain.double().train(training)
    fused.train(training)
    images = images_of(channels, side, kind)
    added = images_of(channels, side, kind, mean=0.0) if adds else None
    result = fused(images, added)
    wanted = plain(images.double()) + (0 if added is None else added.double())
    wanted = wanted.relu() if rectified else wanted
    close = {"rtol": 2e-2, "atol": 2e-2} if kind == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    assert result.dtype == kind
    assert result.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(result.double(), wanted, **close)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(fused.get_buffer(name).to(buffer.dtype), buffer, rtol=1e-5, atol=1e-6)
    given = torch.randn_like(result)
    leaves = [images, *([] if added is None else [added])]
    found = torch.autograd.grad(result, [*leaves, *fused.parameters()], given)
    right = torch.autograd.grad(wanted, [*leaves, *plain.parameters()], given.double())
    for gradient, other in zip(found, right):
        scale = max(1e-3, other.abs().max().item())
        torch.testing.assert_close(gradient.double() / scale, other.double() / scale, **close)


def test_values_far_from_zero_keep_their_variance():
    plain, fused = pair(8, False, False)
    images = images_of(8, 6, mean=3000.0)
    torch.testing.assert_close(fused(images).double(), plain.double()(images.double()), rtol=1e-3, atol=1e-3)


def test_one_bad_pixel_spoils_its_channel_only():
    _, fused = pair(8, False, True)
    images = images_of(8, 4).detach()
    images[1, 3, 2, 2] = torch.nan
    bad = fused(images).isnan().any(dim=(0, 2, 3))
    assert bad.tolist() == [channel == 3 for channel in range(8)]
    for buffer in (fused.running_mean, fused.running_var):
        assert buffer.isnan().tolist() == bad.tolist()


def test_a_channel_without_variance():
    _, fused = pair(4, False, False)
    images = torch.full((2, 4, 3, 3), 5.1, device=DEVICE).to(memory_format=torch.channels_last)
    assert not fused(images).any()


@pytest.mark.parametrize("frozen", ["weight", "bias", "images", "added"])
def test_gradients_where_one_of_them_is_not_wanted(frozen):
    plain, fused = pair(6, True, True)
    inputs = {"images": images_of(6, 4), "added": images_of(6, 4, mean=0.0)}
    if frozen in inputs:
        inputs[frozen].requires_grad_(False)
    else:  # a frozen weight and a trained bias are what shifted norms have
        for norm in (plain, fused):
            getattr(norm, frozen).requires_grad_(False)
    result, wanted = fused(*inputs.values()), (plain(inputs["images"]) + inputs["added"]).relu()
    given = torch.randn_like(result)
    found, right = (
        torch.autograd.grad(one, [leaf for leaf in (*inputs.values(), *norm.parameters()) if leaf.requires_grad], given)
        for one, norm in ((result, fused), (wanted, plain))
    )
    assert len(found) == len(right) == 3
    for gradient, other in zip(found, right):
        torch.testing.assert_close(gradient, other, rtol=1e-3, atol=1e-4)


def test_what_is_added_may_be_the_images_themselves():
    plain, fused = pair(6, False, True)
    images = images_of(6, 4)
    result, wanted = fused(images, images), (plain(images) + images).relu()
    given = torch.randn_like(result)
    found, right = (torch.autograd.grad(one, images, given)[0] for one in (result, wanted))
    torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-4)


def test_images_that_are_too_many_are_left_to_torch(monkeypatch):
    plain, fused = pair(6, True, True)
    images, added = images_of(6, 4), images_of(6, 4)
    monkeypatch.setattr(kernel_images, "_MAX_ELEMENTS", 10)
    assert torch.equal(fused(images, added), (plain(images) + added).relu())
    layer = nn.MaxPool2d(2)
    layer.__class__, layer.rectified = FusedPool, True
    assert torch.equal(layer(images), nn.functional.max_pool2d(images.relu(), 2))


def test_images_of_another_norm_are_refused():
    _, fused = pair(4, False, False)
    with pytest.raises(ValueError, match="have 5 channels, their norm 4"):
        fused(torch.ones(2, 5, 3, 3, device=DEVICE))


def test_one_value_a_channel_is_refused():
    _, fused = pair(4, False, False)
    with pytest.raises(ValueError, match="one value a channel"):
        fused(torch.ones(1, 4, 1, 1, device=DEVICE))


def test_memory_in_another_order_is_refused():
    found = torch.ones(2, 4, device=DEVICE)
    with pytest.raises(ValueError, match="do not lie channels last"):
        normalize(torch.ones(2, 4, 3, 3, device=DEVICE), found, None, None, None, False, True)


def test_as_torch_registers_it():
    images, found = images_of(4, 3), torch.rand(2, 4, device=DEVICE) + 0.5
    added, weight = images_of(4, 3), torch.ones(4, device=DEVICE, requires_grad=True)
    torch.library.opcheck(normalize, (images, found, weight, None, added, True, False))
    averages = torch.zeros(4, device=DEVICE), torch.ones(4, device=DEVICE)
    count = torch.zeros((), dtype=torch.int64, device=DEVICE)
    torch.library.opcheck(statistics, (images.detach(), *averages, count, 0.1, 1e-5))


@pytest.mark.parametrize("rectified", [True, False])
@pytest.mark.parametrize(("channels", "side"), [(16, 6), (5, 4), (100, 2), (3, 5)])
@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_pooling_and_its_gradient(channels, side, rectified, kind):
    layer = nn.MaxPool2d(2)
    layer.__class__, layer.rectified = FusedPool, rectified
    images = images_of(channels, side, kind, mean=-1.0)
    with torch.no_grad():
        images.round_()  # so that some are equal
    result, wanted = layer(images), nn.functional.max_pool2d(images.relu() if rectified else images, 2)
    assert torch.equal(result, wanted)
    given = torch.randn_like(result)
    found, right = (torch.autograd.grad(one, images, given)[0] for one in (result, wanted))
    assert torch.equal(found, right)


def test_what_is_not_a_number_is_the_largest():
    images = images_of(4, 4).detach()
    images[0, 1, 2, 3] = torch.nan
    result, _ = pool(images, True)
    assert result.isnan().nonzero().tolist() == [[0, 1, 1, 1]]


def test_only_pooling_two_by_two_is_taken():
    kinds = {
        nn.MaxPool2d(2): True,
        nn.MaxPool2d((2, 2), 2): True,
        nn.MaxPool2d(3): False,
        nn.MaxPool2d(2, stride=1): False,
        nn.MaxPool2d(2, padding=1): False,
        nn.MaxPool2d(2, dilation=2): False,
        nn.MaxPool2d(2, ceil_mode=True): False,
        nn.MaxPool2d(2, return_indices=True): False,
        nn.AvgPool2d(2): False,
    }
    assert [is_two_by_two(layer) for layer in kinds] == list(kinds.values())


def test_pooling_as_torch_registers_it():
    torch.library.opcheck(pool, (images_of(4, 4), True))


def test_biases_that_are_frozen_at_zero_are_left_out():
    network = conv6(width_factor=0.1)
    prune_(network, 0.5, exclude="convolutions.2.*")
    bare = skeleton(network)
    bare.convolutions[2][0].bias.requires_grad_(False)  # not zero, and not by prune_
    fuse_(bare, ResidualBlock)
    without = [module.bias is None for module in bare.modules() if isinstance(module, nn.Conv2d)]
    assert without == [True, True, True, True, False, False]


NETWORKS = {
    # 8 channels: with fewer, oneDNN's strided 1x1 convolutions corrupt memory on AVX2 (uxlfoundation/oneDNN#6035)
    "resnet20": lambda: resnet20(width_factor=0.5),
    "conv6": lambda: conv6(width_factor=0.25),
    "vgg11": lambda: vgg11(width_factor=0.25),
    "bottlenecks": lambda: imagenet_resnet((((8, 8, 16), 2), ((16, 16, 32), 1)), classes=10),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_whole_network(name, monkeypatch):
    monkeypatch.setattr(fusion, "narrow_", lambda network: None)  # these are in bfloat16
    if not ON_GPU:
        for size in ("_TILE", "_SUMMED"):  # the interpreter takes its time for every program
            monkeypatch.setattr(normalization, size, 1 << 18)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    network = NETWORKS[name]().to(DEVICE, memory_format=torch.channels_last)
    fused = copy.deepcopy(network)
    fuse_(fused, ResidualBlock)
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    assert sum(type(module) is FusedNorm for module in fused.modules()) == len(norms)
    pools = [module for module in fused.modules() if isinstance(module, nn.MaxPool2d)]
    assert all(isinstance(module, FusedPool) == (name != "bottlenecks") for module in pools)
    left = sum(isinstance(module, nn.ReLU) for module in fused.modules())
    assert left == (5 if name == "conv6" else 0)
    assert list(fused.state_dict()) == list(network.state_dict())
    images = torch.randn(4, 3, 32, 32, device=DEVICE).to(memory_format=torch.channels_last)
    tensors = dict(fused.named_parameters()) | dict(fused.named_buffers())
    outputs, wanted = functional_call(fused, tensors, (images,)), network.double()(images.double())
    torch.testing.assert_close(outputs.double(), wanted, rtol=1e-2, atol=1e-3)
    found = torch.autograd.grad(outputs.square().sum(), list(fused.parameters()))
    right = torch.autograd.grad(wanted.square().sum(), list(network.parameters()))
    for gradient, other in zip(found, right):
        assert torch.nn.functional.cosine_similarity(gradient.double().flatten(), other.flatten(), dim=0) > 0.999
    network.eval()
    fused.eval()
    torch.testing.assert_close(fused(images).double(), network(images.double()), rtol=1e-2, atol=1e-3)
