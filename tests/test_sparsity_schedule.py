"""The sparsity over time, as a stepper."""

import pytest
import torch
from torch import nn

import iterand


def pruned(sparsity: object = 0.8, **options: object) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    return iterand.prune_(model, sparsity, **options)


def kept(model: nn.Module) -> list[int]:
    return [int(layer.mask.sum()) for layer in iterand.masked_layers(model).values()]


def walk(schedule: iterand.SparsitySchedule, steps: int) -> list[int]:
    """The number of weights kept of the first layer, at first and after each step."""
    counts = [kept(schedule.model)[0]]
    for _ in range(steps):
        schedule.step()
        counts.append(kept(schedule.model)[0])
    return counts


@pytest.mark.parametrize(
    ("name", "start", "expected"),
    [
        ("linear", 0.0, [100, 80, 60, 40, 20, 20, 20]),
        ("linear", 0.4, [60, 50, 40, 30, 20, 20, 20]),
        # p = .8 · (1 − (1 − t)³): .4625, .7, .7875 → 46, 70, 79 of 100 pruned.
        ("cubic", 0.0, [100, 54, 30, 21, 20, 20, 20]),
        ("constant", 0.0, [20, 20, 20, 20, 20, 20, 20]),
    ],
)
def test_the_sparsity_rises_to_its_final_value(name, start, expected):
    assert walk(iterand.SparsitySchedule(pruned(), name, steps=4, start=start), 6) == expected


@pytest.mark.parametrize("name", ["linear", "cubic"])
@pytest.mark.parametrize("ranking", ["layer", "global"])
def test_a_schedule_that_starts_at_the_final_sparsity_stays_there(name, ranking):
    for sparsity in [step / 400 for step in range(2, 398, 3)]:  # many of them round a half
        model = pruned(sparsity, ranking=ranking)
        before = kept(model)
        schedule = iterand.SparsitySchedule(model, name, steps=7, start=sparsity)
        for _ in range(7):
            assert kept(model) == before
            schedule.step()


@pytest.mark.parametrize("ranking", ["layer", "global"])
def test_a_ticket_from_the_middle_of_a_schedule_is_named(tmp_path, ranking):
    model = pruned(ranking=ranking)
    iterand.save_ticket(model, tmp_path / "a.ticket")
    schedule = iterand.SparsitySchedule(model, "linear", steps=4)
    for counts in (200, 160, 120, 80):
        sentence = f"a.ticket keeps {counts} weights, and not the 40 of the sparsity that prune_ was given; save after"
        with pytest.warns(UserWarning, match=sentence):
            iterand.save_ticket(model, tmp_path / "a.ticket")
        schedule.step()
    iterand.save_ticket(model, tmp_path / "a.ticket")  # warnings are errors here


def test_together_the_count_is_exact_at_every_step():
    model = pruned(ranking="global")
    schedule = iterand.SparsitySchedule(model, "linear", steps=4)
    totals = [sum(kept(model))]
    for _ in range(5):
        schedule.step()
        totals.append(sum(kept(model)))
    assert totals == [200, 160, 120, 80, 40, 40]


def test_each_layer_stops_at_its_own_sparsity():
    model = pruned({"0": 0.3, "1": 0.9})
    schedule = iterand.SparsitySchedule(model, "linear", steps=3)
    counts = [kept(model)]
    for _ in range(3):
        schedule.step()
        counts.append(kept(model))
    assert counts == [[100, 100], [70, 70], [70, 40], [70, 10]]


def test_parts_with_rankings_of_their_own():
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    iterand.prune_(model[0], 0.5, ranking="global")
    iterand.prune_(model[1], 0.9, ranking="global")
    schedule = iterand.SparsitySchedule(model, "linear", steps=3)
    for _ in range(3):
        schedule.step()
    assert kept(model) == [50, 10]


def test_dense_layers_stay_dense():
    model = pruned(0.8, overrides={"0": "dense"})
    schedule = iterand.SparsitySchedule(model, "linear", steps=2)
    schedule.step()
    assert kept(model) == [100, 60]


def test_the_mask_of_a_step_is_the_mask_of_that_sparsity():
    model = pruned()
    schedule = iterand.SparsitySchedule(model, "linear", steps=4)
    schedule.step()
    layer = iterand.masked_layers(model)["0.weight"]
    assert torch.equal(layer.mask, iterand.calculate_mask(layer.score, 0.2))


@pytest.mark.parametrize("ranking", ["layer", "global"])
def test_a_state_goes_on_where_it_stopped(ranking):
    first, second = pruned(ranking=ranking), pruned(ranking=ranking)
    schedule = iterand.SparsitySchedule(first, "cubic", steps=5)
    walk(schedule, 2)
    resumed = iterand.SparsitySchedule(second, "cubic", steps=5)
    resumed.load_state_dict(schedule.state_dict())
    assert kept(second) == kept(first)
    assert walk(resumed, 4) == walk(schedule, 4)


def test_the_models_state_holds_the_present_sparsity():
    first, second = pruned(), pruned()
    walk(iterand.SparsitySchedule(first, "linear", steps=4), 1)
    second.load_state_dict(first.state_dict())
    assert kept(second) == kept(first) == [80, 80]


def test_a_state_that_the_model_loads_brings_its_final_sparsity():
    model, other = pruned(0.8), pruned(0.4)
    schedule = iterand.SparsitySchedule(model, "linear", steps=4)
    first = iterand.SparsitySchedule(other, "linear", steps=4)
    walk(first, 1)
    with pytest.warns(
        UserWarning, match=r"^the state has sparsity=0\.4, and this model was pruned with sparsity=0\.8; "
    ):
        model.load_state_dict(other.state_dict())
    schedule.load_state_dict(first.state_dict())
    assert schedule.final == 0.4
    assert walk(schedule, 4) == walk(first, 4) == [90, 80, 70, 60, 60]


def test_a_part_of_a_global_ranking_is_refused():
    model = pruned(ranking="global")
    message = r"'weight' is ranked together with '1\.weight', which is not masked in .*; give the whole model"
    with pytest.raises(ValueError, match=message):
        iterand.SparsitySchedule(model[0], "linear", steps=3)
    assert sum(kept(model)) == 40
    iterand.fold_(model[1])
    with pytest.raises(ValueError, match=r"'0\.weight' is ranked together with '1\.weight', which is not masked"):
        iterand.SparsitySchedule(model, "linear", steps=3)
    part = pruned()
    iterand.SparsitySchedule(part[0], "linear", steps=3)
    assert kept(part) == [100, 20]


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "3"])
def test_a_bad_number_of_steps_is_refused(steps):
    with pytest.raises(ValueError, match=f"steps is {steps!r}; it is a number of iterations, at least 1"):
        iterand.SparsitySchedule(pruned(), steps=steps)


def test_other_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="schedule is 'fast'"):
        iterand.SparsitySchedule(pruned(), "fast", steps=3)
    with pytest.raises(ValueError, match=r"start is 1\.2"):
        iterand.SparsitySchedule(pruned(), steps=3, start=1.2)
    with pytest.raises(
        ValueError, match=r"start is 0\.9, but the model was pruned with 0\.\d+; prune_ it with a higher"
    ):
        iterand.SparsitySchedule(pruned(), steps=3, start=0.9)
    with pytest.raises(
        ValueError, match=r"sparsity is 0\.9, but the model was pruned with 0\.\d+; prune_ it with a hig"
    ):
        iterand.set_sparsity_(pruned(), 0.9)
    with pytest.raises(ValueError, match="no masked layer"):
        iterand.SparsitySchedule(nn.Linear(3, 3), steps=3)


def test_a_refused_schedule_changes_nothing():
    model = pruned()
    with pytest.raises(ValueError, match="start is"):
        iterand.SparsitySchedule(model, steps=3, start=-1)
    assert kept(model) == [20, 20]


@pytest.mark.parametrize("sparsity", [2, -0.1, float("nan"), "half"])
def test_a_sparsity_that_is_none_is_refused(sparsity):
    model = iterand.prune_(torch.nn.Linear(10, 10), 0.5)
    with pytest.raises(ValueError, match=r"sparsity is .*; it is the share of weights pruned, from 0 to 1"):
        iterand.set_sparsity_(model, sparsity)
    assert int(iterand.masked_layers(model)["weight"].mask.sum()) == 50
