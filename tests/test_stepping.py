"""Iteration counts of steppers, which are part of the model's state dict."""

import copy
import io
import json

import pytest
import torch
from torch import nn

import iterand
from pruned import INPUTS, network


def steppers(model: nn.Module) -> list[iterand.IterativeRandomization | iterand.SparsitySchedule]:
    randomizer = iterand.IterativeRandomization(model, period=3, rate=0.5)
    return [randomizer, iterand.SparsitySchedule(model, "linear", steps=8)]


def train(model: nn.Module, steppers: list, steps: int) -> None:
    optimizer = torch.optim.SGD(iterand.scores(model), lr=0.3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(INPUTS).square().sum().backward()
        optimizer.step()
        for stepper in steppers:
            stepper.step()


def reloaded(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state after a trip through a file."""
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def counts(model: nn.Module) -> list[dict[str, list[int]]]:
    """What each mask has in its state."""
    states = [value for name, value in model.state_dict().items() if name.endswith("_extra_state")]
    return [json.loads(bytes(state.tolist())).get("iterations") for state in states]


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    first, second = one.state_dict(), other.state_dict()
    assert list(first) == list(second)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("ranking", ["layer", "global"])
def test_a_model_that_resumes_equals_one_that_was_not_stopped(when, ranking):
    """Its steppers are made before or after it loads the state; nothing else is loaded."""
    unbroken = network(ranking=ranking)
    train(unbroken, steppers(unbroken), 10)
    stopped = network(ranking=ranking)
    train(stopped, steppers(stopped), 5)
    resumed = network(ranking=ranking)
    if when == "before":
        made = steppers(resumed)
        resumed.load_state_dict(reloaded(stopped))
    else:
        resumed.load_state_dict(reloaded(stopped))
        made = steppers(resumed)
    assert [stepper.iteration for stepper in made] == [5, 5]
    assert_equal_masks(resumed, stopped)
    train(resumed, made, 5)
    assert [stepper.iteration for stepper in made] == [10, 10]
    assert_equal(resumed, unbroken)


def assert_equal_masks(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(iterand.masked_layers(one).values(), iterand.masked_layers(other).values()):
        assert torch.equal(a.mask, b.mask)


def test_every_mask_has_the_counts_of_its_steppers():
    model = network()
    assert counts(model) == [None, None]
    both, first = iterand.IterativeRandomization(model), iterand.SparsitySchedule(model[0], steps=5)
    both.step()
    both.step()
    first.step()
    assert counts(model) == [{"randomization": [2], "sparsity_schedule": [1]}, {"randomization": [2]}]


def test_parts_that_were_pruned_one_by_one():
    def parts() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        for seed, part in enumerate((model[0], model[2])):
            iterand.prune_(part, 0.6, seed=seed)
        return model

    model, other = parts(), parts()
    train(model, [iterand.IterativeRandomization(model, period=3)], 4)
    later = iterand.IterativeRandomization(other, period=3)
    other.load_state_dict(model.state_dict())
    assert later.iteration == 4
    assert counts(other) == [{"randomization": [4]}] * 2


def test_two_steppers_of_a_kind_are_told_apart_by_their_order():
    def make(model: nn.Module) -> list[iterand.IterativeRandomization]:
        return [iterand.IterativeRandomization(model, period=period) for period in (2, 3)]

    model, before, after = network(), network(), network()
    first, second = make(model)
    for _ in range(5):
        first.step()
    second.step()
    assert counts(model) == [{"randomization": [5, 1]}] * 2
    made = make(before)
    before.load_state_dict(model.state_dict())
    assert [stepper.iteration for stepper in made] == [5, 1]
    after.load_state_dict(model.state_dict())
    assert counts(after) == counts(model)  # also before any stepper is made
    assert [stepper.iteration for stepper in make(after)] == [5, 1]


def test_a_second_phase_begins_at_zero():
    model = network()
    first = iterand.IterativeRandomization(model)
    first.step()
    second = iterand.IterativeRandomization(model)
    assert (first.iteration, second.iteration) == (1, 0)
    second.step()
    second.step()
    del first  # only the steppers that exist are saved
    assert counts(model) == [{"randomization": [2]}] * 2
    del second  # unless there is none
    assert counts(model) == [{"randomization": [1, 2]}] * 2
    assert iterand.IterativeRandomization(model).iteration == 0


def test_a_state_loaded_into_a_trained_model_is_for_the_next_stepper():
    model, other = network(), network()
    train(other, [iterand.IterativeRandomization(other)], 7)
    train(model, [iterand.IterativeRandomization(model)], 3)
    model.load_state_dict(other.state_dict())
    assert iterand.IterativeRandomization(model).iteration == 7


def test_a_copy_has_counts_of_its_own():
    model = network()
    stepper = iterand.IterativeRandomization(model)
    stepper.step()
    twin = copy.deepcopy(model)
    continued = iterand.IterativeRandomization(twin)
    continued.step()
    stepper.step()
    stepper.step()
    assert (stepper.iteration, continued.iteration) == (3, 2)
    assert counts(model) == [{"randomization": [3]}] * 2
    assert counts(twin) == [{"randomization": [2]}] * 2
    pair = copy.deepcopy((model, stepper))
    pair[1].step()
    assert counts(pair[0]) == [{"randomization": [4]}] * 2
    assert stepper.iteration == 3


def test_a_state_without_counts_leaves_them_alone():
    model, other = network(), network()
    stepper = iterand.IterativeRandomization(model)
    stepper.step()
    assert counts(other) == [None, None]
    model.load_state_dict(other.state_dict())
    assert stepper.iteration == 1
    stepper.load_state_dict({"iteration": 9})
    assert stepper.state_dict() == {"iteration": 9}
    assert counts(model) == [{"randomization": [9]}] * 2


def test_another_schedule_takes_over_at_the_next_step():
    model = network()
    schedule = iterand.SparsitySchedule(model, "linear", steps=20)
    for _ in range(10):
        schedule.step()
    half = iterand.summary(model).kept
    other = network()
    shorter = iterand.SparsitySchedule(other, "linear", steps=8)
    other.load_state_dict(model.state_dict())
    assert shorter.iteration == 10  # beyond its end
    assert iterand.summary(other).kept == half  # what the state says
    shorter.step()
    assert iterand.summary(other).kept == iterand.summary(network()).kept < half


def test_folding_forgets_the_counts():
    model = network()
    iterand.IterativeRandomization(model).step()
    iterand.prune_(iterand.fold_(model), 0.6)
    assert counts(model) == [None, None]


@pytest.mark.parametrize("pruned_again", [False, True])
def test_steppers_of_folded_masks_are_refused(pruned_again):
    model = network()
    old = steppers(model)
    train(model, old, 2)
    iterand.fold_(model)
    if pruned_again:
        iterand.prune_(model, 0.5)
    before = copy.deepcopy(model)
    for stepper in old:
        sentence = f"the masks of this {type(stepper).__name__} were folded; make a new one after prune_"
        with pytest.raises(ValueError, match=sentence):
            stepper.step()
    assert_equal(model, before)


def test_steppers_go_on_with_the_masks_that_are_left():
    model = network()
    schedule = iterand.SparsitySchedule(model, "linear", steps=2)
    iterand.fold_(model[0])
    schedule.step()
    schedule.step()
    assert iterand.summary(model).kept == 64 - 38
