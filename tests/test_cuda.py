"""The same bits on the GPU as on the CPU: random words, weights, cuts, masks and rounds of randomization."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import iterand
from iterand import distributions, philox
from iterand.backend import reference
from iterand.ticket import draws
from iterand.ticket.read import parse
from iterand.ticket.save import ticket_bytes

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: torch.cuda.is_available() is False"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature"),
]

RANKINGS = pytest.mark.parametrize(
    "options", [{}, {"ranking": "global"}, {"ranking": "global", "floor": 0.05}], ids=["layer", "global", "floor"]
)


def same(gpu: Tensor, cpu: Tensor) -> bool:
    """Equal to the bit: a zero is not a minus zero."""
    assert gpu.is_cuda
    if gpu.is_floating_point() and not torch.equal(gpu.cpu().signbit(), cpu.signbit()):
        return False
    return torch.equal(gpu.cpu(), cpu)


def test_random_words():
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(-(1 << 63), (1 << 63) - 1, (100_000,), generator=generator)
    draw = torch.randint(0, (1 << 31) - 1, (100_000,), generator=generator, dtype=torch.int32)
    key = philox.key(7, "layer.weight")
    for a, b in zip(philox.philox(index.cuda(), draw.cuda(), key, 1), philox.philox(index, draw, key, 1)):
        assert same(a, b)


@pytest.mark.parametrize("name", distributions.distribution_names())
@pytest.mark.parametrize("fan_in", [1, 9, 27, 4608, 1_000_003])
def test_distributions(name, fan_in):
    count = philox.CHUNK + 12_345
    arguments = (distributions.get_distribution(name), count, fan_in, philox.key(3, name))
    for draw in (0, 1, 1000):
        on_gpu = distributions.sample(*arguments, draw=draw, device="cuda")
        assert same(on_gpu, distributions.sample(*arguments, draw=draw))


# --- The cut --------------------------------------------------------------------------------------------------------


def awkward(kind: str, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    integers = torch.randint(-3, 4, (count,), generator=generator).float()
    tiny = torch.tensor(1e-45)
    return {
        "normal": torch.randn(count, generator=generator),
        "ties": integers,
        "constant": torch.full((count,), 0.25),
        "zeros": torch.where(integers > 0, 0.0, -0.0),
        "signed zeros among others": torch.where(integers.abs() < 3, 0.0 * integers, integers),
        "denormal": integers * tiny,
        "infinite": torch.where(integers.abs() < 2, integers, integers * math.inf),
        "all infinite": torch.full((count,), math.inf),
    }[kind]


KINDS = [
    "normal",
    "ties",
    "constant",
    "zeros",
    "signed zeros among others",
    "denormal",
    "infinite",
    "all infinite",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 31, 1000, 4097, 100_000, 3_000_001])
def test_cut(kind, count):
    """Sizes on both sides of where torch changes its way to sort."""
    scores = awkward(kind, count)
    on_gpu = scores.cuda()
    for kept in sorted({0, 1, count // 3, count // 2, count - 1, count}):
        cpu, gpu = reference.cut(scores, torch.tensor(kept)), reference.cut(on_gpu, torch.tensor(kept).cuda())
        mask = reference.keeps(on_gpu, gpu)
        assert int(mask.sum()) == kept
        assert same(mask, reference.keeps(scores, cpu))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("floors", [[0, 0, 0], [1, 7, 500]])
def test_cut_of_layers_ranked_together(kind, floors):
    layers = [awkward(kind, count) for count in (9, 70, 5000)]
    names = ["a", "b", "c"]
    for kept in (sum(floors), 600, 2500, 5079):
        cpu = reference.cut_together(layers, torch.tensor(kept), floors, names)
        on_gpu = [layer.cuda() for layer in layers]
        gpu = reference.cut_together(on_gpu, torch.tensor(kept).cuda(), floors, names)
        masks = [reference.keeps(layer, cut) for layer, cut in zip(on_gpu, gpu)]
        assert sum(int(mask.sum()) for mask in masks) == kept
        assert all(same(mask, reference.keeps(layer, cut)) for mask, layer, cut in zip(masks, layers, cpu))


def test_calculate_mask():
    scores = torch.randn(1000)
    for rank_by in ("score", "magnitude"):
        on_gpu = iterand.calculate_mask(scores.cuda(), 0.7, rank_by=rank_by)
        assert same(on_gpu, iterand.calculate_mask(scores, 0.7, rank_by=rank_by))
    scores[5] = math.nan
    with pytest.raises(ValueError, match="contain NaN"):
        iterand.calculate_mask(scores.cuda(), 0.7)


def test_a_hundred_million_scores():
    count = 100_000_000
    scores = torch.empty(count, device="cuda").uniform_(-1, 1)
    cut = reference.cut(scores, torch.tensor(count // 10, device="cuda"))
    assert int(reference.keeps(scores, cut).count_nonzero()) == count // 10


# --- Models ---------------------------------------------------------------------------------------------------------


def assert_same_state(gpu: nn.Module, cpu: nn.Module) -> None:
    for a, b in zip(iterand.masked_layers(gpu).values(), iterand.masked_layers(cpu).values(), strict=True):
        assert same(a.weight, b.weight)
        assert same(a.score, b.score)
        assert same(a.draw, b.draw)
        assert same(a.mask, b.mask)
        assert same(a.parametrization.weight(), b.weight)
        for (module, name), (other, _) in zip(a.owners, b.owners, strict=True):
            assert same(getattr(module, name), getattr(other, name))


@RANKINGS
@pytest.mark.parametrize("weights", distributions.distribution_names())
def test_pruning_there_and_here(example, options, weights):
    gpu = iterand.prune_(example.build().cuda(), 0.6, seed=5, weights=weights, **options)
    cpu = iterand.prune_(example.build(), 0.6, seed=5, weights=weights, **options)
    assert_same_state(gpu, cpu)


@RANKINGS
def test_a_sequence_of_randomizations(example, options):
    gpu = iterand.prune_(example.build().cuda(), 0.6, **options)
    cpu = iterand.prune_(example.build(), 0.6, **options)
    generator = torch.Generator().manual_seed(0)
    for rate in (0.1, 0.5, 1.0, 0.0, 0.3):
        for a, b in zip(iterand.scores(gpu), iterand.scores(cpu)):
            scores = torch.randn(b.shape, generator=generator)
            a.data.copy_(scores)
            b.data.copy_(scores)
        iterand.randomize_(gpu, rate)
        iterand.randomize_(cpu, rate)
        assert_same_state(gpu, cpu)


@RANKINGS
@pytest.mark.parametrize("candidates", ["pruned", "negative"])
def test_a_padding_row_stays_zero(options, candidates):
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(30, 12, padding_idx=4), nn.Linear(12, 12))

    gpu = iterand.prune_(build().cuda(), 0.6, **options)
    cpu = iterand.prune_(build(), 0.6, **options)
    for _ in range(3):
        for model in (gpu, cpu):
            iterand.randomize_(model, 0.5, candidates=candidates, redrawn_scores="follow")
            assert not model[0].weight[4].any()
        assert_same_state(gpu, cpu)
    assert parse(ticket_bytes(gpu)).header.weights_sha256 == parse(ticket_bytes(cpu)).header.weights_sha256


@RANKINGS
def test_a_state_that_moves(example, options):
    cpu = iterand.prune_(example.build(), 0.6, **options)
    gpu = copy.deepcopy(cpu).cuda()
    assert_same_state(gpu, cpu)
    for model in (gpu, cpu):
        iterand.randomize_(model, 0.5)
    other = iterand.prune_(example.build(), 0.6, seed=9, **options)
    with pytest.warns(UserWarning, match="the state has seed=0, and this model was pruned with seed=9; "):
        other.load_state_dict(gpu.state_dict())
    assert_same_state(gpu, other)
    back = iterand.prune_(example.build(), 0.6, seed=8, **options).cuda()
    with pytest.warns(UserWarning, match="the state has seed=0, and this model was pruned with seed=8; "):
        back.load_state_dict(cpu.state_dict())
    assert_same_state(back, cpu)
    gpu.cpu()
    for a, b in zip(iterand.masked_layers(gpu).values(), iterand.masked_layers(cpu).values()):
        assert torch.equal(a.weight, b.weight)
        assert torch.equal(a.draw, b.draw)


@RANKINGS
def test_outputs_and_gradients_are_close(example, options):
    cpu = iterand.prune_(example.build(), 0.6, **options)
    gpu = copy.deepcopy(cpu).cuda()
    example.loss(cpu).backward()
    torch.nn.functional.cross_entropy(gpu(example.images.cuda()), example.labels.cuda()).backward()
    for a, b in zip(iterand.scores(gpu), iterand.scores(cpu)):
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-2, atol=1e-4)


def test_folding_there(example):
    model = iterand.prune_(example.build().cuda(), 0.6, ranking="global").eval()
    images = example.images.cuda()
    expected = model(images)
    assert torch.equal(iterand.fold_(model)(images), expected)


def test_channels_last_and_autocast(cnn):
    cpu = iterand.prune_(cnn.build(), 0.6)
    gpu = copy.deepcopy(cpu).cuda().to(memory_format=torch.channels_last)
    for model in (cpu, gpu):
        iterand.randomize_(model, 0.5)
    assert_same_state(gpu, cpu)
    with torch.autocast("cuda", torch.bfloat16):
        output = gpu(cnn.images.cuda().to(memory_format=torch.channels_last))
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert all(score.grad.dtype == torch.float32 for score in iterand.scores(gpu))


# --- What only the GPU asks for -------------------------------------------------------------------------------------


@RANKINGS
def test_a_step_never_waits_for_the_device(mlp, options):
    model = iterand.prune_(mlp.build().cuda(), 0.6, **options)
    images, labels = mlp.images.cuda(), mlp.labels.cuda()
    optimizer = torch.optim.SGD(iterand.scores(model), lr=0.1, momentum=0.9)
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@RANKINGS
def test_a_captured_graph_finds_the_mask_anew(mlp, options):
    model = iterand.prune_(mlp.build().cuda(), 0.6, **options).eval()
    images = mlp.images.cuda()
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                model(images)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = model(images)
        for score in iterand.scores(model):
            score.neg_()
        iterand.randomize_(model, 1.0)
        graph.replay()
        torch.testing.assert_close(output, model(images))


@RANKINGS
def test_nan_scores_are_never_silent(mlp, options):
    """Raising would have to wait for the device in every step: NaN goes through, and ``mask`` names the layer."""
    model = iterand.prune_(mlp.build().cuda(), 0.6, **options)
    iterand.scores(model)[1].data[0, 0] = math.nan
    assert model(mlp.images.cuda()).isnan().any()
    iterand.randomize_(model, 1.0)
    assert model(mlp.images.cuda()).isnan().any()
    with pytest.raises(ValueError, match=r"the scores of '3\.weight' contain NaN"):
        _ = [layer.mask for layer in iterand.masked_layers(model).values()]


# --- Tickets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("latest", [False, True])
def test_places_of_draws(latest):
    history = draws.History(((philox.coin_threshold(0.1), 60), (philox.coin_threshold(0.3), 20)))
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, 1 << 33, (100_000,), generator=generator)
    draw = torch.randint(1, 81, (100_000,), generator=generator)
    key = philox.key(3, "layer.weight")
    assert same(
        draws.ordinals(index.cuda(), draw.cuda(), key, history, latest=latest),
        draws.ordinals(index, draw, key, history, latest=latest),
    )


def test_ticket():
    model = iterand.prune_(nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 100)), 0.5, seed=3)
    for _ in range(20):
        iterand.randomize_(model, 0.1)
        for score in iterand.scores(model):
            score.data = score.data.roll(1)  # so that redrawn weights are kept
    on_cpu = ticket_bytes(model)
    assert {layer.stored for layer in parse(on_cpu).header.layers} <= {"first", "latest"}
    assert ticket_bytes(model.cuda()) == on_cpu
