"""The recommended settings in two lines are those of the recipes ``best-*``."""

import copy
import math

import pytest
import torch
from torch import nn

import iterand
from iterand.lab.experiments.library import find_recipe


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)
    )


def settings(model):
    return {name: layer.parametrization.settings for name, layer in iterand.masked_layers(model).items()}


def same_state(a, b):
    a, b = a.state_dict(), b.state_dict()
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def test_the_paper_is_the_default():
    models = network(), network(), network()
    iterand.prune_(models[0], 0.7)
    iterand.prune_(models[1], 0.7, preset="paper")
    iterand.prune_(models[2], 0.7, weights="kaiming_uniform", ranking="layer", norms="fixed")
    assert same_state(models[0], models[1])
    assert same_state(models[0], models[2])


def test_recommended_is_signed_constants_ranked_globally_with_shifted_norms():
    model, explicit = network(), network()
    iterand.prune_(model, 0.7, preset="recommended", seed=3)
    iterand.prune_(explicit, 0.7, weights="signed_constant", ranking="global", norms="shifted", seed=3)
    assert same_state(model, explicit)
    assert list(settings(model)) == ["0.weight", "1.bias", "4.weight"]
    assert {(one.weight_distribution, one.ranking) for one in settings(model).values()} == {
        ("signed_constant", "global")
    }


def test_a_keyword_that_is_given_wins():
    model = network()
    iterand.prune_(model, 0.7, preset="recommended", weights="kaiming_normal", norms="keep")
    assert list(settings(model)) == ["0.weight", "4.weight"]
    assert {one.weight_distribution for one in settings(model).values()} == {"kaiming_normal"}
    assert model[1].bias.requires_grad


@pytest.mark.parametrize("sparsity", [0.5, {"*": 0.5}])
def test_without_norms_or_with_a_sparsity_for_each_layer_each_layer_is_ranked_by_itself(sparsity):
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)) if sparsity == 0.5 else network()
    iterand.prune_(model, sparsity, preset="recommended")
    assert {(one.weight_distribution, one.ranking) for one in settings(model).values()} == {
        ("signed_constant", "layer")
    }
    (stepper,) = iterand.recommended_steppers(model, steps=100)
    assert isinstance(stepper, iterand.IterativeRandomization)


@pytest.mark.parametrize(
    "norm", [nn.RMSNorm(10), nn.LayerNorm(10, bias=False), nn.BatchNorm1d(10, affine=False)], ids=str
)
def test_norms_without_a_shift_are_norms_too(norm):
    model = iterand.prune_(nn.Sequential(nn.Linear(10, 10), norm, nn.Linear(10, 10)), 0.5, preset="recommended")
    assert {(one.ranking, one.gain) for one in settings(model).values()} == {("global", 1.0)}
    kinds = [type(stepper) for stepper in iterand.recommended_steppers(model, steps=100)]
    assert iterand.SparsitySchedule in kinds


def test_weights_are_larger_the_more_is_pruned_of_a_model_without_norms():
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10), nn.Linear(10, 10))
    iterand.prune_(model, 0.9, preset="recommended", overrides={"2": 0.5, "3": "dense"})
    assert [one.gain for one in settings(model).values()] == [1.78, 1.19, 1.0]
    assert model[0].weight.abs().max().item() == pytest.approx(1.78 * math.sqrt(2 / 10))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(10), nn.RMSNorm(10), nn.BatchNorm1d(10, affine=False)])
def test_norms_need_no_gain(norm):
    for sparsity in (0.9, {"*": 0.9}):
        model = nn.Sequential(nn.Linear(10, 10), copy.deepcopy(norm), nn.Linear(10, 10))
        iterand.prune_(model, sparsity, preset="recommended")
        assert {one.gain for one in settings(model).values()} == {1.0}


def test_an_unknown_preset_is_refused():
    model = network()
    before = model.state_dict()
    with pytest.raises(ValueError, match="preset is 'best'; it must be one of paper, recommended"):
        iterand.prune_(model, 0.7, preset="best")
    assert list(model.state_dict()) == list(before)


@pytest.mark.parametrize("argument", ["weights", "ranking", "norms"])
def test_an_empty_name_is_not_the_default(argument):
    with pytest.raises(ValueError, match="''"):
        iterand.prune_(network(), 0.7, **{argument: ""})


def test_the_steppers_are_those_of_the_recipe():
    method = find_recipe("best-resnet20").method
    model = network()
    iterand.prune_(model, 0.9, preset="recommended")
    randomizer, schedule = iterand.recommended_steppers(model, steps=10_000)
    chosen = {one.ranking for one in settings(model).values()} | {
        one.weight_distribution for one in settings(model).values()
    }
    assert chosen == {method.ranking, method.weight_distribution}
    assert method.norms == "shifted"
    assert (randomizer.period, randomizer.rate, randomizer.steps) == (method.period, method.rate, 10_000)
    assert (randomizer.candidates, randomizer.redrawn_scores) == (method.candidates, method.redrawn_scores)
    assert (schedule.schedule, schedule.steps) == (method.sparsity_schedule, method.sparsity_schedule_share * 10_000)


@pytest.mark.parametrize(("steps", "held"), [(1, 0), (300, 0), (599, 0), (600, 1), (899, 1), (3000, 9)])
def test_a_search_does_not_end_with_a_round(steps, held):
    model = network()
    iterand.prune_(model, 0.9, preset="recommended")
    randomizer, _ = iterand.recommended_steppers(model, steps=steps)
    for _ in range(steps):
        randomizer.step()
    assert {layer.parametrization.rounds for layer in iterand.masked_layers(model).values()} == {held}


def test_other_distributions_are_redrawn_a_tenth_at_a_time():
    model = network()
    iterand.prune_(model, 0.9, preset="recommended", weights="kaiming_uniform")
    randomizer, _ = iterand.recommended_steppers(model, steps=10)
    assert randomizer.rate == 0.1


def test_the_sparsity_rises_over_the_first_half():
    model = network()
    iterand.prune_(model, 0.9, preset="recommended")
    total = sum(layer.mask.numel() for layer in iterand.masked_layers(model).values())
    steppers = iterand.recommended_steppers(model, steps=10)
    kept = []
    for _ in range(10):
        kept.append(sum(int(layer.mask.sum()) for layer in iterand.masked_layers(model).values()))
        for stepper in steppers:
            stepper.step()
    assert kept[0] == total
    assert kept[:6] == sorted(kept[:6], reverse=True)
    assert set(kept[5:]) == {total - round(0.9 * total)}


@pytest.mark.parametrize("steps", [0, -1, 1.5])
def test_steps_must_be_a_number_of_iterations(steps):
    model = network()
    iterand.prune_(model, 0.9, preset="recommended")
    with pytest.raises(ValueError, match=rf"steps is {steps}; it is a number of iterations, at least 1"):
        iterand.recommended_steppers(model, steps=steps)
