"""Biases and norms while a model is pruned ("non-affine", Appendix B), and free again once it is folded."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import iterand

INPUTS = torch.randn(6, 4, 5, 5, generator=torch.Generator().manual_seed(2))


def network() -> nn.Sequential:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True), nn.Conv2d(8, 8, 2)
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=3.0)
    return model


def test_biases_are_zero_and_frozen():
    model = iterand.prune_(network(), 0.5)
    for layer in (model[0], model[4]):
        assert not layer.bias.any()
        assert not layer.bias.requires_grad


def test_batch_norm_is_non_affine_and_other_norms_are_fixed():
    model = iterand.prune_(network(), 0.5)
    assert (model[1].weight, model[1].bias, model[1].affine) == (None, None, False)
    for norm in (model[2], model[3]):
        assert (norm.weight == 1).all()
        assert (norm.bias == 0).all()
        assert not norm.weight.requires_grad
        assert not norm.bias.requires_grad
    hidden = model[1](torch.randn(100, 8, 2, 2) * 3 + 1)
    assert hidden.mean((0, 2, 3)).abs().max() < 1e-5
    torch.testing.assert_close(hidden.var((0, 2, 3), correction=0), torch.ones(8), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("option", "places"),
    [("biases", ["0.bias", "4.bias"]), ("norms", [f"{n}.{name}" for n in (1, 2, 3) for name in ("weight", "bias")])],
)
def test_either_can_be_kept(option, places):
    model = network()
    before = copy.deepcopy(model)
    iterand.prune_(model, 0.5, **{option: "keep"})
    for name in places:
        assert torch.equal(model.get_parameter(name), before.get_parameter(name))
    model(INPUTS).square().sum().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert {name for name in trained if "parametrizations" not in name} == set(places)


def test_folding_frees_them_where_they_are():
    model = network()
    before = [(name, parameter.shape, parameter.dtype) for name, parameter in model.named_parameters()]
    iterand.prune_(model, 0.5).train()
    model(INPUTS)
    expected = model.eval()(INPUTS)
    iterand.fold_(model)
    assert torch.equal(model(INPUTS), expected)
    assert [(name, parameter.shape, parameter.dtype) for name, parameter in model.named_parameters()] == before
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model[1].affine
    assert (model[1].weight == 1).all()
    assert (model[1].bias == 0).all()
    model(INPUTS).sum().backward()


def test_what_the_user_froze_stays_frozen():
    model = network()
    for name in ("0.bias", "1.bias", "2.weight", "4.weight"):
        model.get_parameter(name).requires_grad_(False)
    iterand.prune_(model, 0.5)
    assert all(score.requires_grad for score in iterand.scores(model))
    for pruned in (copy.deepcopy(model), model):
        iterand.fold_(pruned)
        frozen = {name for name, parameter in pruned.named_parameters() if not parameter.requires_grad}
        assert frozen == {"0.bias", "1.bias", "2.weight", "4.weight"}


def test_shared_biases_and_norm_weights_are_freed_too():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4))
    model[2].bias = model[0].bias
    model[3].weight = model[1].weight
    iterand.fold_(iterand.prune_(model, 0.5))
    assert model[2].bias is model[0].bias
    assert model[0].bias.requires_grad
    assert model[1].weight.requires_grad


def test_a_norm_without_affine_part_stays_without():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.LayerNorm(4, elementwise_affine=False))
    iterand.fold_(iterand.prune_(model, 0.5))
    assert not model[1].affine
    assert list(dict(model.named_parameters())) == ["0.weight", "0.bias"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_folded_norm_has_the_precision_of_its_model(dtype):
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8, track_running_stats=False)).to(dtype)
    iterand.fold_(iterand.prune_(model, 0.5))
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model(INPUTS.to(dtype)).dtype == dtype


def test_a_norm_without_statistics_keeps_its_own_precision(tmp_path):
    def mixed():
        return nn.Sequential(
            nn.Conv2d(4, 8, 3), nn.InstanceNorm2d(8, affine=True).to(torch.float64), nn.Conv2d(8, 8, 2)
        )

    model = iterand.prune_(mixed(), 0.5)
    iterand.save_ticket(model, tmp_path / "it.ticket")
    for plain in (iterand.load_ticket(tmp_path / "it.ticket", mixed()), iterand.fold_(model)):
        assert [parameter.dtype for parameter in plain[1].parameters()] == [torch.float64] * 2
        assert (plain[1].weight == 1).all()


def test_a_copy_can_be_freed_while_the_original_stays_frozen():
    model = iterand.prune_(network(), 0.5)
    folded = iterand.fold_(copy.deepcopy(model))
    assert folded[1].affine
    assert not model[1].affine
    assert not model[0].bias.requires_grad
    assert folded[0].bias.requires_grad


def test_norms_outside_the_chosen_layers_are_fixed_unless_excluded():
    model = iterand.prune_(network(), 0.5, include="0", exclude="1")
    assert model[1].affine
    assert not model[3].weight.requires_grad
    assert model[4].bias.requires_grad  # not a masked layer: its bias is left alone


# --- Norms that are made anew while the model is pruned -------------------------------------------------------------


def to_sync(model: nn.Module) -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def to_ordinary(model: nn.Module) -> nn.Module:
    """By hand, as it is done where torch has no conversion: from the arguments, then the state."""
    for name, norm in list(model.named_children()):
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            given = norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats
            new = nn.BatchNorm2d(*given).train(norm.training)
            new.load_state_dict(norm.state_dict())
            setattr(model, name, new)
    return model


CONVERSIONS = {
    "sync": (to_sync,),
    "ordinary": (to_ordinary,),
    "and back": (to_sync, to_ordinary),
    "copied": (copy.deepcopy, to_sync, copy.deepcopy),
    "double": (to_sync, nn.Module.double, nn.Module.float),
}


@pytest.mark.parametrize("conversions", CONVERSIONS.values(), ids=CONVERSIONS)
def test_a_norm_made_anew_gets_its_affine_part_back(conversions, tmp_path):
    model = network()
    model[1].bias.requires_grad_(False)
    iterand.prune_(model, 0.5).train()(INPUTS)
    expected = model.eval()(INPUTS)
    for convert in conversions:
        model = convert(model)
    assert torch.equal(model(INPUTS), expected)
    assert model[1].weight is None
    iterand.save_ticket(model, tmp_path / "it.ticket")
    for plain in (network(), to_sync(network())):
        assert torch.equal(iterand.load_ticket(tmp_path / "it.ticket", plain).eval()(INPUTS), expected)
    iterand.fold_(model)
    assert torch.equal(model(INPUTS), expected)
    assert [(name, parameter.shape) for name, parameter in model.named_parameters()] == [
        (name, parameter.shape) for name, parameter in network().named_parameters()
    ]
    assert model[1].affine is True
    assert (model[1].weight.requires_grad, model[1].bias.requires_grad) == (True, False)
    assert repr(to_ordinary(model)) == repr(network())


def test_a_norm_of_which_a_part_is_left_alone_made_anew_is_freed():
    model = to_sync(iterand.prune_(network(), 0.5, exclude="1.bias"))
    assert not model[1].weight.requires_grad
    iterand.fold_(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_norm_without_statistics_made_anew_is_freed():
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8, track_running_stats=False))
    iterand.fold_(to_sync(iterand.prune_(model, 0.5)))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model[1].affine is True


def test_a_frozen_norm_is_printed_as_one_without_affine_part():
    model = iterand.prune_(nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)), 0.5)
    assert str(model[1]) == str(nn.BatchNorm2d(8, affine=False))


class Shifted(nn.Module):
    def forward(self, bias: Tensor) -> Tensor:
        return bias + 1


@pytest.mark.parametrize("trained", [True, False])
def test_a_bias_that_is_computed_since_it_was_frozen_is_freed(trained):
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].bias.requires_grad_(trained)
    iterand.prune_(model, 0.5)
    parametrize.register_parametrization(model[0], "bias", Shifted())
    iterand.fold_(model)
    assert model[0].bias.tolist() == [1.0] * 4
    assert model[0].parametrizations.bias.original.requires_grad == trained
