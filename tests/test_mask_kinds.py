"""Every kind of mask against a plain loop over its definition; and that all of them train, resume, fold and export."""

import copy
import itertools
import math
import shutil

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import iterand
from iterand import distributions, mask_kinds
from iterand.parametrization import calculate_multipliers
from iterand.ticket import inspect

KINDS = {
    "bernoulli": {"mask": "bernoulli"},
    "signed": {"mask": "signed"},
    "multicoat": {"mask": "multicoat", "coats": 3},
    "gem_miner": {"mask": "gem_miner"},
    "binarize": {"binarize": True},
    "binarized coats": {"mask": "multicoat", "binarize": True},
    "binarized signs": {"mask": "signed", "binarize": True},
    "share": {"share": "[24]"},
    "binary": {},
}


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(24, 5))


def pruned(sparsity=0.6, seed=0, **options):
    return iterand.prune_(network(), sparsity, seed=seed, **options)


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 1, 8, 8, generator=generator), torch.randint(0, 5, (16,), generator=generator)


def trained(model, steps=6, randomizer=None, start=0):
    optimizer = torch.optim.SGD(iterand.scores(model), lr=0.5)
    steppers = [randomizer] if randomizer else []
    if any(layer.parametrization.settings.mask == "gem_miner" for layer in iterand.masked_layers(model).values()):
        steppers += [iterand.SparsitySchedule(model, "geometric", steps=5), iterand.ScoreFreezing(model, 2)]
    for step in range(start, start + steps):
        images, labels = batch(step)
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        for stepper in steppers:
            stepper.step()
    return model


def top(scores, count):
    """The indices of the highest scores; of equal ones the first."""
    return set(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count])


# --- The definitions --------------------------------------------------------------------------------------------------


def masked_by_hand(layer, multiplier):
    """multiplier(scores, kept) → one factor for each weight."""
    scores, weights = layer.score.detach().flatten().tolist(), layer.weight.detach().flatten()
    factors = multiplier(scores, int(layer.parametrization.kept))
    return (weights * torch.tensor(factors, dtype=torch.float32)).view(layer.weight.shape)


def signed(scores, kept):
    chosen = top([abs(s) for s in scores], kept)
    return [0 if i not in chosen else -1 if s < 0 else 1 for i, s in enumerate(scores)]


def three_coats(scores, kept):
    coats = [top(scores, kept * share // 3) for share in (3, 2, 1)]
    return [sum(i in coat for coat in coats) for i in range(len(scores))]


def gem_miner(scores, kept):
    chosen = top(scores, kept)
    return [int(i in chosen and s >= 0.5) for i, s in enumerate(scores)]


@pytest.mark.parametrize(
    ("options", "multiplier"),
    [
        ({"mask": "signed"}, signed),
        ({"mask": "multicoat", "coats": 3}, three_coats),
        ({"mask": "gem_miner"}, gem_miner),
    ],
)
@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.8])
def test_masked_weights_are_what_the_definition_says(options, multiplier, sparsity):
    model = pruned(sparsity, **options)
    for layer in iterand.masked_layers(model).values():
        expected = masked_by_hand(layer, multiplier)
        module, attribute = layer.owners[0]
        assert torch.equal(getattr(module, attribute), expected), layer.name
        assert (calculate_multipliers([layer.parametrization])[0] != 0).sum() == expected.count_nonzero()


def test_coats_of_a_global_ranking_are_nested_and_have_their_sizes():
    model = pruned(0.6, mask="multicoat", coats=4, ranking="global")
    states = [layer.parametrization for layer in iterand.masked_layers(model).values()]
    counted = torch.cat([one.flatten() for one in calculate_multipliers(states)])
    everything = torch.cat([state.score.detach().flatten() for state in states])
    kept = len(everything) - round(0.6 * len(everything))
    sizes = [int((counted >= coat).sum()) for coat in (1, 2, 3, 4)]
    assert sizes[0] == kept
    assert sizes == pytest.approx([kept, kept * 3 / 4, kept / 2, kept / 4], abs=len(states))
    for low, high in itertools.pairwise(range(5)):
        assert everything[counted == low].max() <= everything[counted == high].min()


def test_coats_keep_the_variance_of_kept_weights():
    plain, coated = (pruned(0.5, weights="signed_constant", **options) for options in ({}, KINDS["multicoat"]))
    one, other = (iterand.fold_(model)[4].weight.detach().double() for model in (plain, coated))
    mean = [float((weight**2).sum() / weight.count_nonzero()) for weight in (one, other)]
    assert mean[1] == pytest.approx(mean[0], rel=1e-2)
    assert mask_kinds.coat_scale(3) == pytest.approx(math.sqrt(3 / (1 + 4 + 9)))


def test_binarized_weights_have_the_mean_magnitude_of_the_kept_ones():
    model = pruned(0.7, binarize=True, weights="kaiming_normal")
    layer = iterand.masked_layers(model)["2.weight"]
    kept = layer.weight[layer.mask].detach()
    alpha = sum(abs(value) for value in kept.tolist()) / len(kept)
    expected = torch.where(layer.mask, layer.weight.sign() * alpha, 0.0)
    torch.testing.assert_close(model[2].weight, expected, rtol=1e-6, atol=0)
    assert len(model[2].weight.detach().abs().unique()) == 2


def last_sample(model, number):
    """The masked weights of the last forward pass. To read or to print them samples nothing."""
    repr(model)
    return model[number].weight.detach().clone()


def test_a_bernoulli_mask_is_sampled_with_the_sigmoid_of_its_score():
    model = pruned(0.5, mask="bernoulli")
    layer = iterand.masked_layers(model)["7.weight"]
    with torch.no_grad():
        layer.score[0].fill_(2.0)
        layer.score[1].fill_(-30.0)
        layer.score[2].fill_(30.0)
    images, _ = batch()
    seen = []
    for _ in range(200):
        model(images)
        seen.append(last_sample(model, 7) != 0)
    share = torch.stack(seen).float().mean(0)
    assert share[0].mean() == pytest.approx(1 / (1 + math.exp(-2.0)), abs=0.03)
    assert share[1].max() == 0
    assert share[2].min() == 1
    assert 0.2 < share[3].mean() < 0.8


def test_a_bernoulli_mask_is_sampled_once_a_pass_and_is_the_cut_in_eval_mode():
    model = pruned(0.5, mask="bernoulli")
    images, _ = batch()
    model(images)
    first = last_sample(model, 4)
    assert torch.equal(last_sample(model, 4), first)
    model(images)
    assert not torch.equal(last_sample(model, 4), first)
    model.eval()
    layer = iterand.masked_layers(model)["4.weight"]
    assert torch.equal(model[4].weight, torch.where(layer.mask, layer.weight, 0.0))


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_layers_that_are_called_by_themselves_sample_anew(reentrant):
    model, samples = pruned(0.5, mask="bernoulli"), []

    def layers(activations):
        for module in model:
            activations = module(activations)
        return activations

    for step in range(3):
        images = batch()[0].requires_grad_()
        outputs = layers(images) if reentrant is None else checkpoint(layers, images, use_reentrant=reentrant)
        outputs.sum().backward()
        samples.append(last_sample(model, 4))
        assert iterand.masked_layers(model)["4.weight"].parametrization.passes == step + 1
    assert not torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[1], samples[2])


def test_a_layer_that_is_the_whole_model_or_attention_samples_once_a_pass():
    attention = iterand.prune_(nn.MultiheadAttention(8, 2), 0.5, mask="bernoulli")
    linear = iterand.prune_(nn.Linear(8, 8), 0.5, mask="bernoulli")
    block = iterand.prune_(nn.Sequential(nn.MultiheadAttention(8, 2)), 0.5, mask="bernoulli")
    rows = torch.randn(3, 8)
    for number in range(1, 4):
        attention(rows, rows, rows)
        linear(rows)
        block[0](rows, rows, rows)
        for model in (attention, linear, block):
            for layer in iterand.masked_layers(model).values():
                assert layer.parametrization.passes == number
                assert layer.parametrization.running_passes == 0
    iterand.fold_(attention)
    assert type(attention) is nn.MultiheadAttention


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_pass_is_repeated_with_the_same_sample(reentrant):
    model, other = pruned(0.5, mask="bernoulli"), pruned(0.5, mask="bernoulli")
    images, labels = batch()
    images.requires_grad_()
    outputs = checkpoint(model, images, use_reentrant=reentrant)
    functional.cross_entropy(outputs, labels).backward()
    expected = score_gradients(other)
    for name, layer in iterand.masked_layers(model).items():
        assert torch.equal(layer.score.grad, expected[name])
        assert layer.parametrization.passes == 1


def test_a_nan_among_sampled_scores_is_named():
    model = pruned(0.5, mask="bernoulli")
    with torch.no_grad():
        iterand.masked_layers(model)["4.weight"].score[0] = math.nan
    with pytest.raises(ValueError, match=r"4\.weight"):
        model(batch()[0])


@pytest.mark.parametrize("kind", KINDS)
def test_dense_layers_keep_all_weights(kind):
    model = pruned(0.5, overrides={"7": "dense"}, **KINDS[kind])
    if kind == "gem_miner":
        iterand.ScoreFreezing(model, 1).step()
    model(batch()[0])
    assert (last_sample(model, 7) != 0).all()
    assert iterand.masked_layers(model)["7.weight"].mask.all()


def test_coats_of_many_small_tensors_have_their_sizes_together():
    layers = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(20)]
    model = iterand.prune_(
        nn.Sequential(*layers), 0.9, mask="multicoat", coats=8, ranking="global", norms="shifted", weights="uniform"
    )
    states = [layer.parametrization for layer in iterand.masked_layers(model).values()]
    multipliers = torch.cat([found.flatten() for found in calculate_multipliers(states)])
    kept = int(sum(state.kept for state in states))
    assert [int((multipliers >= coat).sum()) for coat in range(1, 9)] == [
        kept * share // 8 for share in range(8, 0, -1)
    ]


def test_coats_are_nested_where_a_floor_changes_the_first():
    model = pruned(0.9, ranking="global", floor=0.08, mask="multicoat", coats=3)
    layers = iterand.masked_layers(model)
    with torch.no_grad():
        layers["7.weight"].score.add_(5.0)
    states = [layer.parametrization for layer in layers.values()]
    for layer, multipliers in zip(layers.values(), calculate_multipliers(states)):
        assert torch.equal(layer.mask, multipliers > 0)
    assert iterand.summary(model).kept == sum(int(layer.mask.sum()) for layer in layers.values())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch, about its own tracer
def test_scores_of_one_half_are_kept_by_every_way_to_compute_a_mask():
    """GEM-Miner rounds them up; compiled code finds a mask in another way than eager code."""
    model = iterand.prune_(nn.Linear(8, 4), 0.0, mask="gem_miner")
    with torch.no_grad():
        iterand.masked_layers(model)["weight"].score.fill_(0.5)[0] = 0.3
    inputs = torch.randn(2, 8)
    compiled = torch.compile(model, backend="eager")(inputs)
    assert torch.equal(compiled, model(inputs))
    assert model.weight.count_nonzero() == 24


@pytest.mark.parametrize("sparsity", [0.1, 0.5, 0.9])
def test_a_bernoulli_mask_begins_at_the_sparsity(sparsity):
    model = pruned(sparsity, mask="bernoulli")
    images, _ = batch()
    model(images)
    share = model[4].weight.count_nonzero() / model[4].weight.numel()
    assert float(share) == pytest.approx(1 - sparsity, abs=0.1)


@pytest.mark.parametrize("scale", [1000.0, 1e-11])
def test_binarized_weights_of_any_size(scale, monkeypatch):
    name = f"sign_times_{scale:g}"
    monkeypatch.setattr(distributions, "_REGISTRY", dict(distributions._REGISTRY))
    iterand.register_distribution(iterand.Distribution(name, lambda words: (words[0] & 1) * 2 - 1, lambda fan: scale))
    model = iterand.prune_(nn.Linear(2048, 2048), 0.4, weights=name, binarize=True)
    assert model.weight.detach().abs().unique().tolist() == pytest.approx([0.0, scale], rel=1e-6, abs=0)


def test_shared_tensors_have_the_same_weights_and_masks_of_their_own():
    model = pruned(0.6, share="[24]")
    first, second = (iterand.masked_layers(model)[name] for name in ("2.weight", "4.weight"))
    assert torch.equal(first.weight, second.weight)
    assert not torch.equal(first.mask, second.mask)


def test_shared_tensors_have_one_gain():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    iterand.prune_(model, 0.5, preset="recommended", share="*", overrides={"2": 0.9})
    first, second = iterand.masked_layers(model).values()
    assert torch.equal(first.weight, second.weight)


# --- Gradients --------------------------------------------------------------------------------------------------------


def score_gradients(model):
    images, labels = batch()
    functional.cross_entropy(model(images), labels).backward()
    return {name: layer.score.grad for name, layer in iterand.masked_layers(model).items()}


@pytest.mark.parametrize("kind", ["signed", "multicoat", "gem_miner", "binarize", "binarized coats"])
def test_the_gradient_goes_straight_through(kind):
    """∂L/∂s = θ ⊙ ∂L/∂W, with the gradient of W from the folded network."""
    model = pruned(0.5, **KINDS[kind])
    layers = iterand.masked_layers(model)
    bases = {name: layer.weight.detach() for name, layer in layers.items()}
    if KINDS[kind].get("binarize"):
        bases = {
            name: torch.where(base < 0, -1.0, 1.0) * base[layers[name].mask].abs().mean()
            for name, base in bases.items()
        }
    found = score_gradients(model)
    plain = iterand.fold_(copy.deepcopy(model))
    images, labels = batch()
    functional.cross_entropy(plain(images), labels).backward()
    for name, parameter in plain.named_parameters():
        if name in found:
            torch.testing.assert_close(found[name], bases[name] * parameter.grad)


def test_the_gradient_of_a_sample_has_the_slope_of_the_sigmoid():
    model = pruned(0.5, mask="bernoulli")
    found = score_gradients(model)
    layers = iterand.masked_layers(model)
    plain = network()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            module = model.get_submodule(name.rpartition(".")[0])
            parameter.copy_(getattr(module, name.rpartition(".")[2]))
    images, labels = batch()
    functional.cross_entropy(plain(images), labels).backward()
    for name, layer in layers.items():
        chance = torch.sigmoid(layer.score.detach())
        expected = layer.weight * plain.get_parameter(name).grad * chance * (1 - chance)
        torch.testing.assert_close(found[name], expected)


# --- GEM-Miner --------------------------------------------------------------------------------------------------------


def test_frozen_weights_stay_pruned_and_scores_stay_between_0_and_1():
    model = pruned(0.8, mask="gem_miner", scores="unit_uniform")
    schedule = iterand.SparsitySchedule(model, "geometric", steps=8)
    freezing = iterand.ScoreFreezing(model, 2)
    optimizer = torch.optim.SGD(iterand.scores(model), lr=0.2, momentum=0.9, weight_decay=1e-2)
    layers = iterand.masked_layers(model)
    frozen = {name: set() for name in layers}
    for step in range(10):
        images, labels = batch(step)
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        schedule.step()
        freezing.step()
        for name, layer in layers.items():
            scores = layer.score.detach().flatten()
            now = set(torch.nonzero(layer.parametrization.frozen.flatten()).flatten().tolist())
            assert now >= frozen[name]
            assert not layer.mask.flatten()[sorted(now)].any()
            assert all(scores[i] == -1 if i in now else 0 <= scores[i] <= 1 for i in range(len(scores)))
            frozen[name] = now
    for name, layer in layers.items():
        kept = layer.score.numel() - round(0.8 * layer.score.numel())
        assert layer.score.numel() - len(frozen[name]) == kept
        assert 0 < int(layer.mask.sum()) <= kept


def test_freezing_is_for_gem_miner():
    with pytest.raises(ValueError, match="whose scores are not frozen; prune_ with mask='gem_miner'"):
        iterand.ScoreFreezing(pruned(), 10)


# --- Randomization ----------------------------------------------------------------------------------------------------


def test_recycled_weights_have_the_values_of_kept_ones():
    model = pruned(0.4, weights="kaiming_uniform")
    layers = iterand.masked_layers(model)
    for _ in range(5):
        before = {name: layer.weight.detach().clone() for name, layer in layers.items()}
        masks = {name: layer.mask for name, layer in layers.items()}
        never = {name: layer.draw == 0 for name, layer in layers.items()}
        iterand.randomize_(model, 0.9, redraw_from="kept")
        for name, layer in layers.items():
            changed = layer.weight != before[name]
            sources = set(before[name][masks[name] & never[name]].tolist())
            assert changed.any()
            assert not changed[masks[name]].any()
            assert set(layer.weight[changed].tolist()) <= sources
            assert torch.equal(layer.parametrization.weight(), layer.weight)
        with torch.no_grad():
            for layer in layers.values():
                layer.score.copy_(layer.score.flatten().roll(3).view(layer.score.shape))


def test_a_search_has_one_source_of_new_values():
    model = pruned()
    iterand.randomize_(model, redraw_from="kept")
    with pytest.raises(ValueError, match="were redrawn from 'kept' before; a search has one source"):
        iterand.randomize_(model)
    with pytest.raises(ValueError, match="redraw_from is 'fres'; it must be one of fresh, kept"):
        iterand.randomize_(model, redraw_from="fres")


@pytest.mark.parametrize("options", [{}, {"candidates": "negative", "redrawn_scores": "follow"}])
def test_shared_weights_are_redrawn_only_where_all_masks_prune_them(options):
    model = pruned(0.6, share="[24]", weights="signed_constant")
    first, second = (iterand.masked_layers(model)[name] for name in ("2.weight", "4.weight"))
    stays = first.mask | second.mask
    if options:
        stays |= (first.score >= 0) | (second.score >= 0)
    before = first.weight.detach().clone()
    iterand.randomize_(model, 1.0, **options)
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(first.draw, second.draw)
    assert torch.equal(first.draw > 0, ~stays)
    assert torch.equal(first.weight[stays], before[stays])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("redraw_from", ["fresh", "kept"])
def test_every_kind_can_be_randomized(kind, redraw_from):
    model = pruned(0.6, **KINDS[kind])
    trained(model, randomizer=iterand.IterativeRandomization(model, 2, 0.5, redraw_from=redraw_from))
    layers = iterand.masked_layers(model)
    for layer in layers.values():
        assert torch.equal(layer.parametrization.weight(), layer.weight)
        assert layer.parametrization.rounds == 3
    assert torch.equal(layers["2.weight"].weight, layers["4.weight"].weight) == (kind == "share")


@pytest.mark.parametrize("distribution", ["kaiming_uniform", "signed_constant"])
@pytest.mark.parametrize("redraw_from", ["fresh", "kept"])
def test_a_padding_row_is_neither_redrawn_nor_a_source(distribution, redraw_from, tmp_path):
    for seed in range(5):
        model = nn.Sequential(nn.Embedding(50, 16, padding_idx=0), nn.Flatten(), nn.Linear(48, 3))
        iterand.prune_(model, 0.6, weights=distribution, seed=seed)
        layers = iterand.masked_layers(model)
        for step in range(10):
            iterand.randomize_(model, 0.5, redraw_from=redraw_from)
            with torch.no_grad():
                for layer in layers.values():
                    layer.score.copy_(layer.score.flatten().roll(7 + step).view(layer.score.shape))
        for layer in layers.values():
            assert torch.equal(layer.parametrization.weight(), layer.weight)
        assert not layers["0.weight"].weight[0].any()
        iterand.save_ticket(model, tmp_path / "a.ticket")


def test_a_part_of_shared_weights_is_not_randomized():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8)))
    iterand.prune_(model, 0.5, share="[01].0")
    with pytest.raises(ValueError, match=r"has the same weights as '1\.0\.weight', which is not in the model"):
        iterand.randomize_(model[0], 1.0)
    iterand.randomize_(model, 1.0)


@pytest.mark.parametrize("kind", ["bernoulli", "signed", "gem_miner", "binarize"])
@pytest.mark.parametrize("options", [{"candidates": "negative"}, {"redrawn_scores": "follow"}])
def test_the_signs_of_some_scores_say_nothing_about_weights(kind, options):
    model = pruned(rank_by="magnitude", **KINDS[kind]) if kind == "binarize" else pruned(**KINDS[kind])
    what = "rank_by is 'magnitude'" if kind == "binarize" else f"mask is '{kind}'"
    with pytest.raises(ValueError, match=f"{what}, where the sign of a score says nothing"):
        iterand.randomize_(model, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_recommended_steppers_go_with_every_kind(kind):
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 5))
    options = {} if kind == "share" else KINDS[kind]
    iterand.prune_(model, 0.9, preset="recommended", **options)
    steppers = iterand.recommended_steppers(model, steps=20)
    if kind == "gem_miner":
        steppers.append(iterand.ScoreFreezing(model, 5))
    steppers[0].period = 5
    model(torch.randn(4, 1, 8, 8)).sum().backward()
    for _ in range(20):
        for stepper in steppers:
            stepper.step()
    for layer in iterand.masked_layers(model).values():
        assert layer.parametrization.rounds == 3
        if kind == "bernoulli" and layer.score.numel() > 6:
            assert float(torch.sigmoid(layer.score.detach()).mean()) == pytest.approx(0.1, abs=0.05)
        if kind == "gem_miner":
            assert not (layer.mask & layer.parametrization.frozen).any()


# --- The rest of the package ------------------------------------------------------------------------------------------


def with_rounds(kind, distribution="kaiming_uniform", redraw_from="fresh", **more):
    model = pruned(0.6, weights=distribution, **KINDS[kind], **more)
    return trained(model, randomizer=iterand.IterativeRandomization(model, 2, 0.5, redraw_from=redraw_from))


@pytest.mark.parametrize("kind", KINDS)
def test_training_resumes_bit_for_bit(kind):
    whole, half, rest = (pruned(0.6, **KINDS[kind], seed=seed) for seed in (3, 3, 3))
    for model, steps in ((whole, 9), (half, 4)):
        trained(model, steps, iterand.IterativeRandomization(model, 2, 0.5))
    rest.load_state_dict(half.state_dict())
    trained(rest, 5, iterand.IterativeRandomization(rest, 2, 0.5), start=4)
    for (name, one), other in zip(whole.state_dict().items(), rest.state_dict().values()):
        assert torch.equal(one, other), name


# Each kind with each distribution; both ways to redraw in turn, so that each kind and distribution meets both.
IN_TURN = zip(
    itertools.product(KINDS, ["kaiming_uniform", "signed_constant", "kaiming_normal"]),
    itertools.cycle(["fresh", "kept"]),
)


@pytest.mark.parametrize(("kind", "distribution", "redraw_from"), [(*pair, way) for pair, way in IN_TURN])
def test_tickets_and_folded_models_compute_the_same(kind, distribution, redraw_from, tmp_path):
    model = with_rounds(kind, distribution, redraw_from).eval()
    iterand.save_ticket(model, tmp_path / "a.ticket")
    loaded = iterand.load_ticket(tmp_path / "a.ticket", network()).eval()
    folded = iterand.fold_(copy.deepcopy(model))
    images, _ = batch(99)
    assert torch.equal(model(images), folded(images))
    for (name, one), other in zip(folded.state_dict().items(), loaded.state_dict().values()):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", ["signed", "multicoat", "binarize", "binarized coats"])
def test_tickets_of_other_dtypes(kind, dtype, tmp_path):
    model = pruned(0.6, weights="signed_constant", **KINDS[kind]).to(dtype)
    iterand.save_ticket(model, tmp_path / "a.ticket")
    loaded = iterand.load_ticket(tmp_path / "a.ticket", network().to(dtype))
    for (name, one), other in zip(iterand.fold_(model).state_dict().items(), loaded.state_dict().values()):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("distribution", ["kaiming_uniform", "signed_constant"])
def test_the_kept_weights_of_a_ticket(kind, distribution, tmp_path):
    model = pruned(0.6, weights=distribution, **KINDS[kind])
    iterand.save_ticket(model, tmp_path / "a.ticket")
    for layer in iterand.read_ticket(tmp_path / "a.ticket").layers.values():
        assert torch.equal(layer.values(), layer.weight()[layer.mask])


def test_a_ticket_of_few_levels_holds_them_and_no_draws(tmp_path):
    for kind, bits in (("signed", 1.0), ("multicoat", 1 + math.log2(3)), ("binarize", 1.0)):
        distribution = "kaiming_normal" if kind == "binarize" else "signed_constant"
        model = iterand.prune_(nn.Linear(400, 300), 0.5, weights=distribution, **KINDS[kind])
        iterand.save_ticket(model, tmp_path / "a.ticket")
        ticket = iterand.read_ticket(tmp_path / "a.ticket")
        header = ticket.layers["weight"].header
        assert header.stored == "level"
        assert header.settings.weight_distribution == distribution
        assert ticket.size == pytest.approx((1 + 0.5 * bits) * 120_000 / 8, rel=0.06)
        assert iterand.summary(model).bits == pytest.approx((1 + 0.5 * bits) * 120_000, rel=0.01)


def test_the_cost_of_a_ticket_counts_multipliers(tmp_path):
    model = iterand.prune_(nn.Linear(400, 300), 0.5, weights="kaiming_uniform", **KINDS["multicoat"])
    iterand.save_ticket(model, tmp_path / "a.ticket")
    ticket = iterand.read_ticket(tmp_path / "a.ticket")
    bits = (1 + 0.5 * math.log2(3)) * 120_000
    assert inspect.cost(ticket).bound - inspect.cost(ticket).other_tensors == pytest.approx(bits / 8, rel=0.01)
    assert ticket.size == pytest.approx(bits / 8, rel=0.06)
    assert iterand.summary(model).bits == pytest.approx(bits, rel=0.01)


def test_only_a_search_with_binary_masks_resumes_from_a_ticket(tmp_path):
    for kind in ("signed", "multicoat", "binarize", "bernoulli", "gem_miner"):
        iterand.save_ticket(pruned(0.6, **KINDS[kind]), tmp_path / "a.ticket")
        others = [KINDS[kind]] if kind in ("bernoulli", "gem_miner") else [KINDS[kind], {}]
        for options in others:
            with pytest.raises(iterand.TicketError, match="resume from a checkpoint, which has them"):
                iterand.read_ticket(tmp_path / "a.ticket").resume_(pruned(0.6, **options))


@pytest.mark.parametrize("distribution", ["kaiming_uniform", "signed_constant"])
@pytest.mark.parametrize("redraw_from", ["fresh", "kept"])
def test_shared_weights_stay_shared_when_a_ticket_is_resumed(distribution, redraw_from, tmp_path):
    model = with_rounds("share", distribution, redraw_from)
    iterand.save_ticket(model, tmp_path / "a.ticket")
    other = pruned(0.6, weights=distribution, **KINDS["share"])
    iterand.read_ticket(tmp_path / "a.ticket").resume_(other)
    layers = iterand.masked_layers(other)
    for name, layer in layers.items():
        before = iterand.masked_layers(model)[name]
        assert torch.equal(layer.mask, before.mask)
        assert torch.equal(layer.weight[layer.mask], before.weight[layer.mask])
    iterand.randomize_(other, 0.5, redraw_from=redraw_from)
    assert torch.equal(layers["2.weight"].draw, layers["4.weight"].draw)
    assert torch.equal(layers["2.weight"].weight, layers["4.weight"].weight)


def test_an_average_of_recycled_weights_can_be_saved(tmp_path):
    model = pruned(0.5)
    average = AveragedModel(model)
    for step in range(4):
        trained(model, 1, start=step)
        iterand.randomize_(model, 1.0, redraw_from="kept")
        average.update_parameters(model)
    iterand.save_ticket(average.module, tmp_path / "a.ticket")
    for layer in iterand.masked_layers(average.module).values():
        assert torch.equal(layer.parametrization.weight(), layer.weight)


@pytest.mark.parametrize("other", ["bernoulli", "gem_miner"])
def test_a_state_of_a_mask_with_another_state_is_refused(other):
    for one, two in (("binary", other), (other, "binary")):
        with pytest.raises(
            ValueError, match=f"the state one that is {one}, with another state; prune_ with mask='{one}'"
        ):
            pruned(mask=two).load_state_dict(pruned(mask=one).state_dict())


@pytest.mark.parametrize("activations", ["float32", "int8"])
@pytest.mark.parametrize("kind", ["signed", "multicoat", "binarized coats"])
def test_inference_in_c_adds_a_weight_as_often_as_its_level(kind, activations):
    from iterand.inference.c.lists import Lists
    from iterand.inference.graph import trace

    model = iterand.fold_(pruned(0.5, weights="signed_constant", **KINDS[kind])).eval()
    for node in trace(model, batch()[0]).nodes:
        if hasattr(node, "weight"):
            lists = Lists(node, integers=activations == "int8")
            assert lists.values is None
            rows = node.weight.reshape(len(node.weight), -1)
            for number, row in enumerate(rows):
                plus, minus = lists._places[number]
                rebuilt = np.bincount(plus, minlength=len(row)) - np.bincount(minus, minlength=len(row))
                np.testing.assert_allclose(rebuilt * lists.scale[number] / node.scale[number], row, rtol=1e-6)


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_compiled_ticket_of_coats_computes_what_torch_does(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    iterand.save_ticket(pruned(0.5, weights="signed_constant", **KINDS["multicoat"]), tmp_path / "a.ticket")
    images, _ = batch(7)
    expected = iterand.load_ticket(tmp_path / "a.ticket", network()).eval()(images).detach()
    exact = iterand.compile_ticket(tmp_path / "a.ticket", network(), input_shape=(1, 8, 8))(images)
    torch.testing.assert_close(exact, expected, rtol=1e-5, atol=1e-6)
    close = iterand.compile_ticket(
        tmp_path / "a.ticket", network(), input_shape=(1, 8, 8), activations="int8", sample=images
    )(images)
    assert (close - expected).abs().max() < 0.05 * expected.abs().max()
    assert not torch.equal(close, exact)


def test_embeddings_keep_their_padding_row_at_zero():
    for kind in ("signed", "multicoat", "binarize", "bernoulli"):
        model = nn.Sequential(nn.Embedding(20, 8, padding_idx=0), nn.Flatten(), nn.Linear(24, 3))
        iterand.prune_(model, 0.3, **KINDS[kind])
        model(torch.randint(0, 20, (4, 3)))
        assert not model[0].weight[0].any()
        assert model[0].weight[1:].any()
        assert not iterand.fold_(model)[0].weight[0].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": "sign"}, "mask is 'sign'; it must be one of binary, bernoulli, signed, multicoat, gem_miner"),
        ({"coats": 2}, "coats is 2, but mask is 'binary'; set mask='multicoat', or coats=1"),
        ({"mask": "multicoat", "coats": 9}, "coats is 9; it is a whole number from 1 to 8"),
        ({"mask": "multicoat", "coats": 2.0}, "coats is 2.0; it is a whole number from 1 to 8"),
        ({"mask": "signed", "weights": "existing"}, "mask is 'signed', but existing weights are kept as they are"),
        (
            {"mask": "bernoulli", "weights": "existing"},
            "mask is 'bernoulli', but existing weights are kept as they are",
        ),
        ({"binarize": True, "weights": "existing"}, "binarize is True, but existing weights are kept as they are"),
        ({"mask": "gem_miner", "rank_by": "magnitude"}, "rank_by is 'magnitude', but GEM-Miner rounds scores"),
        ({"mask": "gem_miner", "scores": "uniform"}, "scores is 'uniform', but GEM-Miner rounds scores"),
        ({"mask": "bernoulli", "rank_by": "magnitude"}, "rank_by is 'magnitude', but a Bernoulli mask keeps likely"),
        ({"binarize": "no"}, "binarize is 'no'; it must be True or False"),
        ({"share": "9"}, "share has '9', which names 0 of the masked tensors; name two or more"),
        ({"weights": []}, "unknown distribution"),
        ({"share": "[02]"}, "have shapes .*, so they cannot share their weights"),
    ],
)
def test_what_does_not_go_together_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        pruned(**options)


def test_embeddings_with_other_padding_rows_cannot_share():
    model = nn.ModuleList([nn.Embedding(9, 4, padding_idx=0), nn.Embedding(9, 4)])
    with pytest.raises(ValueError, match="have other padding rows, so they cannot share"):
        iterand.prune_(model, 0.5, share="*")


def test_two_patterns_may_share_the_same_tensors():
    assert len(iterand.masked_layers(pruned(share=["[24]", "[24].weight"]))) == 4


def test_a_bernoulli_mask_has_no_schedule():
    with pytest.raises(ValueError, match="sampled by their scores alone while training"):
        iterand.SparsitySchedule(pruned(mask="bernoulli"), steps=10)


def test_numbers_of_coats_may_come_from_numpy():
    model = pruned(mask="multicoat", coats=np.int64(3))
    assert iterand.masked_layers(model)["0.weight"].parametrization.coats == 3
    pruned(mask="multicoat", coats=3).load_state_dict(model.state_dict())


def test_a_printed_model_says_how_it_is_masked():
    assert "mask=multicoat, coats=3, binarize=True" in repr(pruned(mask="multicoat", coats=3, binarize=True))
    assert "mask=" not in repr(pruned())


# --- On a GPU ---------------------------------------------------------------------------------------------------------

CUDA = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=CUDA) for kind in KINDS])
@pytest.mark.parametrize("redraw_from", ["fresh", "kept"])
@pytest.mark.parametrize("ranking", ["layer", "global"])
def test_the_same_scores_give_the_same_bits_on_a_gpu(kind, redraw_from, ranking):
    here, there = (pruned(0.6, ranking=ranking, **KINDS[kind]) for _ in range(2))
    there.cuda()
    for number in range(4):
        for model in (here, there):
            for score in iterand.scores(model):
                order = torch.randn(score.shape, generator=torch.Generator().manual_seed(number))
                score.data.add_(order.to(score.device), alpha=0.1)
            iterand.randomize_(model, 0.5, redraw_from=redraw_from)
        for name, layer in iterand.masked_layers(here).items():
            other = iterand.masked_layers(there)[name]
            assert torch.equal(layer.weight, other.weight.cpu()), name
            assert torch.equal(layer.mask, other.mask.cpu()), name
    folded = [iterand.fold_(model).state_dict() for model in (here, there)]
    for name, tensor in folded[0].items():
        assert torch.equal(tensor, folded[1][name].cpu()), name


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=CUDA) for kind in KINDS])
def test_make_step_trains_every_kind_as_a_plain_loop_does(kind):
    plain, stepped = (pruned(0.6, **KINDS[kind]).cuda() for _ in range(2))
    optimizers = [torch.optim.SGD(iterand.scores(model), lr=0.1) for model in (plain, stepped)]
    step = iterand.make_step(stepped, optimizers[1], functional.cross_entropy)
    for number in range(8):
        images, labels = (tensor.cuda() for tensor in batch(number))
        optimizers[0].zero_grad()
        expected = functional.cross_entropy(plain(images), labels)
        expected.backward()
        optimizers[0].step()
        torch.testing.assert_close(step(images, labels), expected.detach(), rtol=1e-3, atol=1e-4)
    assert step.replays
