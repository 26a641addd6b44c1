"""Randomize as a pure function of seed, round and mask, and the stepper that says when."""

import copy

import pytest
import torch
from torch import nn

import iterand
import reference
from iterand import philox, randomization
from kernel_cases import shrink


def pruned(**options: object) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    return iterand.prune_(model, 0.6, **{"weights": "uniform", **options})


def shake(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for score in iterand.scores(model):
        score.data.copy_(torch.randn(score.shape, generator=generator))


@pytest.mark.parametrize("ranking", ["layer", "global"])
def test_many_rounds_against_a_plain_loop(ranking):
    """A weight holds the value of the last round in which it was pruned and its coin fell; else it stays."""
    model = pruned(seed=11, ranking=ranking)
    layers = iterand.masked_layers(model)
    draws = {name: [0] * layer.weight.numel() for name, layer in layers.items()}
    for number, rate in enumerate((0.3, 0.3, 1.0, 0.0, 0.5, 0.1), start=1):
        shake(model, number)
        masks = {name: layer.mask.flatten().tolist() for name, layer in layers.items()}
        iterand.randomize_(model, rate)
        for name, mask in masks.items():
            for i, is_kept in enumerate(mask):
                coin = reference.words(i, number, 11, name)[1]
                if not is_kept and coin < rate * 2**32:
                    draws[name][i] = number
    for name, layer in layers.items():
        values = [reference.uniform(reference.words(i, k, 11, name)[0], 1.0) for i, k in enumerate(draws[name])]
        assert layer.draw.flatten().tolist() == draws[name]
        assert layer.weight.flatten().tolist() == values
        assert torch.equal(layer.parametrization.weight(), layer.weight)
        assert layer.parametrization.rounds == 6


@pytest.mark.parametrize("candidates", ["pruned", "negative"])
@pytest.mark.parametrize("redrawn_scores", ["stay", "follow"])
def test_candidates_and_scores_against_a_plain_loop(candidates, redrawn_scores):
    model = pruned(seed=3)
    layers = iterand.masked_layers(model)
    shake(model, 1)
    turned = 0
    for number in (1, 2, 3):
        before = {
            name: [
                each.detach().flatten().tolist() for each in (layer.mask, layer.score, layer.weight, layer.draw)
            ]
            for name, layer in layers.items()
        }  # fmt: skip
        iterand.randomize_(model, 0.5, candidates=candidates, redrawn_scores=redrawn_scores)
        for name, columns in before.items():
            for i, (is_kept, old_score, old, draw) in enumerate(zip(*columns)):
                words = reference.words(i, number, 3, name)
                redrawn = not is_kept and words[1] < 2**31 and (candidates == "pruned" or old_score < 0)
                new = reference.uniform(words[0], 1.0) if redrawn else old
                turns = redrawn_scores == "follow" and (new < 0) != (old < 0)
                turned += turns
                assert layers[name].weight.flatten()[i].item() == new
                assert layers[name].draw.flatten()[i].item() == (number if redrawn else draw)
                assert layers[name].score.flatten()[i].item() == (-old_score if turns else old_score)
    assert (turned > 0) == (redrawn_scores == "follow")


def test_redrawing_negative_scores_ends_where_none_is_pruned_below_zero():
    """Signs are redrawn until they are what the scores ask for; then nothing changes any more."""
    model = pruned(weights="signed_constant")
    shake(model, 1)
    for _ in range(30):
        iterand.randomize_(model, 1.0, candidates="negative", redrawn_scores="follow")
    assert all((layer.score >= 0)[~layer.mask].all() for layer in iterand.masked_layers(model).values())


@pytest.mark.parametrize("option", ["candidates", "redrawn_scores", "redraw_from"])
def test_an_unknown_way_to_redraw_is_refused(option):
    with pytest.raises(ValueError, match=f"{option} is 'all'; it must be one of "):
        iterand.randomize_(pruned(), **{option: "all"})
    with pytest.raises(ValueError, match=f"{option} is 'all'; it must be one of "):
        iterand.IterativeRandomization(pruned(), **{option: "all"})


def test_signs_mean_nothing_where_scores_are_ranked_by_magnitude():
    model = pruned(rank_by="magnitude")
    for options in ({"candidates": "negative"}, {"redrawn_scores": "follow"}):
        with pytest.raises(ValueError, match="rank_by is 'magnitude', where the sign of a score says nothing"):
            iterand.randomize_(model, **options)
        with pytest.raises(ValueError, match="rank_by is 'magnitude'"):
            iterand.IterativeRandomization(model, **options)


def test_history_is_run_length_coded():
    model = pruned()
    for rate in (0.5, 0.5, 0.5, 1.0, 0.5):
        iterand.randomize_(model, rate)
    history = iterand.masked_layers(model)["0.weight"].parametrization.history.runs
    assert history == [(1 << 31, 3), (1 << 32, 1), (1 << 31, 1)]


def test_the_same_seed_gives_the_same_weights_and_another_others():
    models = [pruned(seed=seed) for seed in (1, 1, 2)]
    for model in models:
        shake(model, 0)
        iterand.randomize_(model, 0.5)
    first, again, other = (iterand.masked_layers(model)["0.weight"].weight for model in models)
    assert torch.equal(first, again)
    assert (first != other).all()


def test_chunks_do_not_matter(monkeypatch):
    models = [pruned(), pruned()]
    iterand.randomize_(models[0], 0.5)
    monkeypatch.setattr(philox, "CHUNK", 7)
    iterand.randomize_(models[1], 0.5)
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(models[0], models[1]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities, where the interpreter runs the kernels
@pytest.mark.parametrize("kernels", [False, True])
def test_a_part_is_randomized_by_the_ranking_of_the_whole(kernels, monkeypatch):
    model = pruned(ranking="global")
    with torch.no_grad():
        iterand.scores(model)[0].add_(10)  # these 30 fill the 20 places of the network
    if kernels:
        pytest.importorskip("triton", reason="the kernels are written in Triton")
        shrink(monkeypatch)
        monkeypatch.setattr(randomization.backend, "uses_triton", lambda scores, weights=(), draws=(): bool(weights))
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model.to(device)
    iterand.randomize_(model[1], 1.0)
    assert (iterand.masked_layers(model)["1.weight"].draw == 1).all()
    iterand.randomize_(model[0], 1.0)
    first = iterand.masked_layers(model)["0.weight"]
    assert torch.equal(first.draw == 1, ~first.mask)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("channels", [1, 4])
def test_channels_last_weights(kernel, channels):
    models = [nn.Sequential(nn.Conv2d(channels, 6, kernel)) for _ in range(2)]
    for model in models:
        iterand.prune_(model, 0.5)
    models[1].to(memory_format=torch.channels_last)
    for _ in range(2):
        for model in models:
            iterand.randomize_(model, 0.7)
        a, b = (iterand.masked_layers(model)["0.weight"] for model in models)
        assert torch.equal(a.weight, b.weight)
        assert torch.equal(a.draw, b.draw)
        assert torch.equal(b.weight, b.parametrization.weight())
        assert b.weight.is_contiguous(memory_format=torch.channels_last)


def test_weights_keep_their_storage():
    """Compiled graphs, optimizers and other owners hold these very tensors."""
    model = pruned()
    layer = iterand.masked_layers(model)["0.weight"]
    before = (id(layer.weight), layer.weight.data_ptr(), id(layer.score), layer.draw.data_ptr())
    iterand.randomize_(model, 1.0)
    layer = iterand.masked_layers(model)["0.weight"]
    assert (id(layer.weight), layer.weight.data_ptr(), id(layer.score), layer.draw.data_ptr()) == before


def test_nan_in_a_later_layer_leaves_no_round_half_done():
    model = pruned()
    iterand.scores(model)[1].data[0, 0] = torch.nan
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"'1\.weight' contain NaN"):
        iterand.randomize_(model, 1.0)
    for name, value in model.state_dict().items():
        assert torch.equal(value.nan_to_num(), before[name].nan_to_num())


@pytest.mark.parametrize("rate", [-1, 1.01, float("nan"), "0.1", None, True])
def test_a_bad_rate_is_refused(rate):
    with pytest.raises(ValueError, match=r"rate is .*; it is the share of pruned weights redrawn, from 0 to 1"):
        iterand.randomize_(pruned(), rate)
    with pytest.raises(ValueError, match="rate is"):
        iterand.IterativeRandomization(pruned(), rate=rate)


# --- The stepper ----------------------------------------------------------------------------------------------------


def rounds(model: nn.Module) -> int:
    return iterand.masked_layers(model)["0.weight"].parametrization.rounds


@pytest.mark.parametrize(("period", "steps", "expected"), [(1, 5, 5), (3, 2, 0), (3, 3, 1), (3, 10, 3), (300, 299, 0)])
def test_every_period_th_step_randomizes(period, steps, expected):
    model = pruned()
    randomizer = iterand.IterativeRandomization(model, period, rate=0.5)
    for _ in range(steps):
        randomizer.step()
    assert rounds(model) == expected


@pytest.mark.parametrize(("steps", "expected"), [(9, [3, 6]), (10, [3, 6]), (11, [3, 6]), (12, [3, 6, 9]), (2, [])])
def test_no_round_is_held_in_the_last_period_of_the_steps(steps, expected):
    model = pruned()
    randomizer = iterand.IterativeRandomization(model, period=3, rate=0.5, steps=steps)
    held = []
    for iteration in range(1, steps + 1):
        before = rounds(model)
        randomizer.step()
        if rounds(model) > before:
            held.append(iteration)
    assert held == expected
    for _ in range(3):  # a search that goes on after all
        randomizer.step()
    assert rounds(model) == len(expected) + 1


def test_a_state_goes_on_where_it_stopped():
    whole, broken = pruned(), pruned()
    randomizer = iterand.IterativeRandomization(whole, period=3, rate=0.5)
    for _ in range(10):
        randomizer.step()
    first = iterand.IterativeRandomization(broken, period=3, rate=0.5)
    for _ in range(4):
        first.step()
    resumed = pruned(seed=8)
    with pytest.warns(UserWarning, match="the state has seed="):
        resumed.load_state_dict(broken.state_dict())
    second = iterand.IterativeRandomization(resumed, period=3, rate=0.5)
    second.load_state_dict(first.state_dict())
    for _ in range(6):
        second.step()
    for a, b in zip(iterand.masked_layers(whole).values(), iterand.masked_layers(resumed).values()):
        assert torch.equal(a.weight, b.weight)
        assert torch.equal(a.draw, b.draw)
        assert a.parametrization.history.runs == b.parametrization.history.runs


@pytest.mark.parametrize("period", [0, -3, 2.5, True, None, "3"])
def test_a_bad_period_is_refused(period):
    with pytest.raises(ValueError, match=r"period is .*; it is a number of iterations, at least 1"):
        iterand.IterativeRandomization(pruned(), period)


@pytest.mark.parametrize("steps", [0, -3, 2.5, True, "3"])
def test_a_bad_number_of_steps_is_refused(steps):
    with pytest.raises(ValueError, match=r"steps is .*; it is a number of iterations, at least 1"):
        iterand.IterativeRandomization(pruned(), steps=steps)


def test_a_model_without_masks_is_refused():
    with pytest.raises(ValueError, match="Linear has no masked layer; call prune_ on it first"):
        iterand.IterativeRandomization(nn.Linear(3, 3))


def test_draws_take_as_few_bytes_as_their_rounds_allow():
    """A byte for 255 rounds; more are held in more, and the weights are those of their draws all the same."""
    model = iterand.prune_(nn.Linear(8, 8), 0.5)
    (layer,) = iterand.masked_layers(model).values()
    for rounds, dtype in ((255, torch.uint8), (256, torch.int16)):
        while layer.parametrization.rounds < rounds:
            iterand.randomize_(model, 0.3)
        assert layer.draw.dtype == dtype
        assert layer.draw.max() > 200
        assert torch.equal(layer.parametrization.weight(), layer.weight)
    other = iterand.prune_(nn.Linear(8, 8), 0.5)
    with torch.no_grad():
        layer.draw[0, 0] = 300  # does not fit the byte of a fresh model
    other.load_state_dict(model.state_dict())
    (loaded,) = iterand.masked_layers(other).values()
    assert torch.equal(loaded.draw.int(), layer.draw.int())
    assert torch.equal(loaded.parametrization.weight(), layer.parametrization.weight())
