"""What batch norms add, random and masked like a weight."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import iterand
from iterand.lab.training.sync_batch_norm import _CpuSyncBatchNorm, share_batch_norms_


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4, 5), nn.LayerNorm(5)
    )


IMAGES = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("ranking", ["layer", "global"])
def test_shifts_are_random_and_masked(ranking):
    model = iterand.prune_(network(), 0.5, weights="signed_constant", norms="shifted", ranking=ranking)
    layers = iterand.masked_layers(model)
    assert list(layers) == ["0.weight", "1.bias", "4.weight", "5.bias"]
    assert (layers["1.bias"].weight.abs() == 0.5).all()
    for norm in (model[1], model[5]):
        assert (norm.weight == 1).all()
        assert not norm.weight.requires_grad
    kept = sum(int(layer.mask.sum()) for layer in layers.values())
    assert abs(2 * kept - sum(layer.mask.numel() for layer in layers.values())) <= 2  # 5 values are split 2 to 3
    fixed = nn.BatchNorm2d(8, affine=False)
    convolved = model[0](IMAGES)
    shift = (layers["1.bias"].weight * layers["1.bias"].mask).view(1, -1, 1, 1)
    torch.testing.assert_close(model[1](convolved), fixed(convolved) + shift)
    model(IMAGES).square().sum().backward()
    assert layers["1.bias"].score.grad.abs().sum() > 0
    assert {id(parameter) for parameter in model.parameters() if parameter.requires_grad} == {
        id(score) for score in iterand.scores(model)
    }


def test_shifts_are_redrawn():
    model = iterand.prune_(network(), 0.5, norms="shifted")
    layer = iterand.masked_layers(model)["1.bias"]
    before, mask = layer.weight.clone(), layer.mask
    iterand.randomize_(model, 1.0)
    assert torch.equal(layer.weight[mask], before[mask])
    assert (layer.weight != before)[~mask].all()


def test_fold_gives_an_ordinary_network():
    plain = network()
    model = iterand.prune_(copy.deepcopy(plain), 0.5, norms="shifted").eval()
    outputs = model(IMAGES)
    folded = iterand.fold_(model)
    assert torch.equal(folded(IMAGES), outputs)
    assert [name for name, _ in folded.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(folded.state_dict()) == list(plain.state_dict())
    assert folded[1].affine
    assert torch.equal(folded[1].weight, torch.ones(8))
    assert (folded[1].bias == 0).sum() == 4
    assert all(parameter.requires_grad for parameter in folded.parameters())


def test_ticket(tmp_path):
    model = iterand.prune_(network(), 0.5, weights="signed_constant", norms="shifted").eval()
    iterand.randomize_(model, 0.5)
    iterand.save_ticket(model, tmp_path / "a.ticket")
    loaded = iterand.load_ticket(tmp_path / "a.ticket", network()).eval()
    assert torch.equal(loaded(IMAGES), model(IMAGES))
    again = iterand.prune_(network(), 0.5, weights="signed_constant", norms="shifted").eval()
    iterand.read_ticket(tmp_path / "a.ticket").resume_(again)
    assert torch.equal(again(IMAGES), model(IMAGES))


def test_shifts_can_be_left_out():
    model = iterand.prune_(network(), 0.5, norms="shifted", include=["*.weight"], exclude=["5"])
    assert list(iterand.masked_layers(model)) == ["0.weight", "4.weight"]
    assert model[1].bias is None
    model = iterand.prune_(network(), 0.5, norms="shifted", exclude=["5.bias"])
    assert list(iterand.masked_layers(model)) == ["0.weight", "1.bias", "4.weight"]
    assert model[5].bias.requires_grad


def test_a_norm_of_which_a_part_is_left_alone():
    model = iterand.prune_(network(), 0.5, exclude=["1.bias"])
    assert (model[1].weight == 1).all()
    assert not model[1].weight.requires_grad
    assert model[1].bias.requires_grad


def test_a_shift_that_is_computed_or_tied_to_a_bias_is_refused():
    computed = network()
    parametrize.register_parametrization(computed[1], "bias", nn.Identity())
    with pytest.raises(ValueError, match=r"'1\.bias' is computed from other tensors"):
        iterand.prune_(computed, 0.5, norms="shifted")
    tied = network()
    tied[5].bias = tied[4].bias
    with pytest.raises(
        ValueError, match=r"'5\.bias' and '4\.bias' are one tied tensor, and the second is never masked"
    ):
        iterand.prune_(tied, 0.5, norms="shifted")


def test_all_shifts_of_a_layer_may_go():
    model = iterand.prune_(network(), 0.95, norms="shifted")
    assert iterand.masked_layers(model)["1.bias"].mask.sum() == 0
    iterand.randomize_(model, 1.0)
    convolved = model[0](IMAGES)
    torch.testing.assert_close(model[1](convolved), nn.BatchNorm2d(8, affine=False)(convolved))


def test_ranks_share_norms_whose_shift_is_masked():
    model = iterand.prune_(network(), 0.5, norms="shifted").eval()
    before = model(IMAGES)
    share_batch_norms_(model, torch.device("cpu"))
    assert isinstance(model[1], _CpuSyncBatchNorm)
    assert torch.equal(model(IMAGES), before)
    iterand.randomize_(model, 1.0)
    layer = iterand.masked_layers(model)["1.bias"]
    assert torch.equal(model[1].bias, layer.weight * layer.mask)


@pytest.mark.parametrize("norm", [nn.Identity(), nn.BatchNorm1d(3, affine=False), nn.LayerNorm(3, bias=False)])
def test_a_model_without_anything_to_shift_is_refused(norm):
    with pytest.raises(ValueError, match="norms is 'shifted', but Sequential has no norm that adds anything"):
        iterand.prune_(nn.Sequential(nn.Linear(4, 3), norm), 0.5, norms="shifted")


def test_an_unknown_way_is_refused():
    with pytest.raises(ValueError, match="norms is 'random'; it must be one of fixed, shifted, keep"):
        iterand.prune_(network(), 0.5, norms="random")
