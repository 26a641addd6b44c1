"""The statements of Sections 2, 3 and 5 as assertions: Algorithms 1-3, Eq. (2) and (3), KU and SC."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import iterand
import reference

GENERATOR = torch.Generator().manual_seed(0)
INPUTS, LABELS = torch.randn(32, 12, generator=GENERATOR), torch.randint(3, (32,), generator=GENERATOR)


def network(seed: int = 0, **options: object) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
    return iterand.prune_(model, 0.6, seed=seed, **options)


def layers(model: nn.Module) -> list[iterand.MaskedLayer]:
    return list(iterand.masked_layers(model).values())


def weights(model: nn.Module) -> list[Tensor]:
    return [layer.weight.clone() for layer in layers(model)]


def train_mask(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """TrainMask (Algorithm 2): one loop body."""
    optimizer.zero_grad()
    F.cross_entropy(model(INPUTS), LABELS).backward()
    optimizer.step()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(iterand.scores(model), lr=0.5, momentum=0.9, weight_decay=5e-4)


# --- Section 2: CalculateMask and Algorithm 1 -----------------------------------------------------------------------


@pytest.mark.parametrize("sparsity", [0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99])
def test_p_is_the_share_pruned_and_the_top_scores_are_kept(sparsity):
    """m_i = 1 if s_i is top 100(1 − p) % in s, otherwise m_i = 0."""
    layer = nn.Linear(40, 25)
    iterand.prune_(layer, sparsity)
    (masked,) = layers(layer)
    assert int(masked.mask.sum()) == 1000 - round(1000 * sparsity)
    assert masked.score[masked.mask].min() > masked.score[~masked.mask].max()
    assert int((layer.weight == 0).sum()) == round(1000 * sparsity)


def test_the_network_computes_with_weight_times_mask():
    """f(x; θ ⊙ m)."""
    model = network()
    first, second = ((layer.weight * layer.mask) for layer in layers(model))
    assert torch.equal(model(INPUTS), F.linear(F.relu(F.linear(INPUTS, first)), second))


@pytest.mark.parametrize("ranking", ["layer", "global"])
def test_scores_get_the_gradient_at_the_mask(ranking):
    """Algorithm 2, line 3: ∇ of L(f(x; θ ⊙ s̄), y) at s̄ = m, as if the mask were the variable."""
    model = network(ranking=ranking)
    variables = [layer.mask.float().requires_grad_() for layer in layers(model)]
    first, second = (layer.weight * variable for layer, variable in zip(layers(model), variables))
    F.cross_entropy(F.linear(F.relu(F.linear(INPUTS, first)), second), LABELS).backward()
    F.cross_entropy(model(INPUTS), LABELS).backward()
    for layer, variable in zip(layers(model), variables):
        torch.testing.assert_close(layer.score.grad, variable.grad)


def test_the_score_gradient_is_weight_times_the_weights_gradient():
    """∂L/∂s = θ ⊙ ∂L/∂w with w = θ ⊙ m, taken from an ordinary network that holds w."""
    model = network()
    plain = iterand.fold_(copy.deepcopy(model))
    F.cross_entropy(plain(INPUTS), LABELS).backward()
    F.cross_entropy(model(INPUTS), LABELS).backward()
    for layer, ordinary in zip(layers(model), (plain[0], plain[2])):
        torch.testing.assert_close(layer.score.grad, layer.weight * ordinary.weight.grad)


def test_algorithm_1_never_changes_a_weight():
    model = network()
    before, masks = weights(model), [layer.mask for layer in layers(model)]
    optimizer = sgd(model)
    for _ in range(10):
        train_mask(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(weights(model), before))
    assert any(not torch.equal(layer.mask, mask) for layer, mask in zip(layers(model), masks))


# --- Section 3: Randomize -------------------------------------------------------------------------------------------


def fresh(layer: iterand.MaskedLayer, number: int) -> Tensor:
    """θ̃ of this round, D_param being uniform on [−1, 1]."""
    seed, name = layer.parametrization.settings.seed, layer.parametrization.settings.name
    drawn = [reference.uniform(reference.words(i, number, seed, name)[0], 1.0) for i in range(layer.weight.numel())]
    return torch.tensor(drawn).view(layer.weight.shape)


def coins(layer: iterand.MaskedLayer, number: int, rate: float) -> Tensor:
    """b_r of this round."""
    seed, name = layer.parametrization.settings.seed, layer.parametrization.settings.name
    fallen = [reference.words(i, number, seed, name)[1] < rate * 2**32 for i in range(layer.weight.numel())]
    return torch.tensor(fallen).view(layer.weight.shape).float()


def test_at_rate_one_partial_randomization_is_naive_randomization():
    """Eq. (2): θ ⊙ m + θ̃ ⊙ (1 − m)."""
    model = network(weights="uniform")
    before, masks = weights(model), [layer.mask.float() for layer in layers(model)]
    iterand.randomize_(model, 1.0)
    for layer, old, m in zip(layers(model), before, masks):
        assert torch.equal(layer.weight, old * m + fresh(layer, 1) * (1 - m))


def test_partial_randomization():
    """Eq. (3): θ ⊙ m + (θ ⊙ (1 − b_r) + θ̃ ⊙ b_r) ⊙ (1 − m)."""
    model = network(weights="uniform")
    for number in (1, 2, 3):
        before, masks = weights(model), [layer.mask.float() for layer in layers(model)]
        iterand.randomize_(model, 0.1)
        for layer, old, m in zip(layers(model), before, masks):
            b = coins(layer, number, 0.1)
            assert torch.equal(layer.weight, old * m + (old * (1 - b) + fresh(layer, number) * b) * (1 - m))


@pytest.mark.parametrize("rate", [0.001, 0.01, 0.1, 1.0])
def test_the_redrawn_share_of_the_pruned_weights_is_r(rate):
    layer = iterand.prune_(nn.Linear(500, 400), 0.6)
    (masked,) = layers(layer)
    pruned = 120_000
    iterand.randomize_(layer, rate)
    redrawn = int((masked.draw == 1).sum())
    assert abs(redrawn - rate * pruned) <= 5 * math.sqrt(pruned * rate * (1 - rate))
    assert not masked.draw[masked.mask].any()


def test_kept_weights_never_change():
    model = network()
    optimizer = sgd(model)
    randomizer = iterand.IterativeRandomization(model, period=1, rate=1.0)
    for _ in range(10):
        train_mask(model, optimizer)
        before, masks = weights(model), [layer.mask for layer in layers(model)]
        randomizer.step()
        for layer, old, mask in zip(layers(model), before, masks):
            assert torch.equal(layer.weight[mask], old[mask])
            assert (layer.weight[~mask] != old[~mask]).all()


# --- Section 3: Algorithm 3 -----------------------------------------------------------------------------------------


def test_at_rate_zero_iterand_is_algorithm_1_bit_for_bit():
    iterand_model, edge_popup = network(), network()
    randomizer = iterand.IterativeRandomization(iterand_model, period=2, rate=0.0)
    for model, stepper in ((iterand_model, randomizer), (edge_popup, None)):
        optimizer = sgd(model)
        for _ in range(12):
            train_mask(model, optimizer)
            if stepper:
                stepper.step()
    for a, b in zip(layers(iterand_model), layers(edge_popup)):
        assert torch.equal(a.score, b.score)
        assert torch.equal(a.weight, b.weight)
        assert torch.equal(a.mask, b.mask)
    assert torch.equal(iterand_model(INPUTS), edge_popup(INPUTS))


@pytest.mark.parametrize(("iterations", "period"), [(10, 3), (12, 3), (7, 7), (6, 7), (5, 1)])
def test_the_number_of_randomizations_is_n_over_the_period_rounded_down(iterations, period):
    """⌊N / K_per⌋."""
    model = network()
    randomizer = iterand.IterativeRandomization(model, period, rate=0.1)
    for _ in range(iterations):
        randomizer.step()
    assert [layer.parametrization.rounds for layer in layers(model)] == [iterations // period] * 2


def test_randomization_comes_after_the_step_with_the_mask_of_the_updated_scores():
    """Algorithm 2, line 4 and Algorithm 3, line 6."""
    model = network()
    (layer, _), before = layers(model), weights(model)[0]
    old = layer.mask
    optimizer = torch.optim.SGD(iterand.scores(model), lr=50.0)  # so much that one step turns the mask over
    randomizer = iterand.IterativeRandomization(model, period=1, rate=1.0)
    train_mask(model, optimizer)
    new = layer.mask
    assert (old & ~new).any()
    assert (~old & new).any()
    randomizer.step()
    changed = layer.weight != before
    assert torch.equal(changed, ~new)


def plain_iterand(iterations: int, period: int, rate: float, seed: int) -> list[dict[str, np.ndarray]]:
    """Algorithm 3 with Algorithm 2 inside, in numpy, with the gradients worked out by hand."""
    state = []
    for name, shape in (("0.weight", (16, 12)), ("2.weight", (3, 16))):
        indices, bound = range(math.prod(shape)), math.sqrt(6 / shape[1])
        theta = [reference.uniform(reference.words(i, 0, seed, name)[0], bound) for i in indices]
        score = [reference.uniform(reference.words(i, 0, seed, name, 1)[0], bound) for i in indices]
        state.append(
            {"theta": np.array(theta).reshape(shape), "score": np.array(score).reshape(shape)}
            | {"momentum": np.zeros(shape), "draw": np.zeros(shape, dtype=int)}
        )

    def calculate_mask(score: np.ndarray) -> np.ndarray:
        kept = reference.kept_by_sort(score.ravel().tolist(), score.size - round(0.6 * score.size))
        return np.array([i in kept for i in range(score.size)]).reshape(score.shape)

    x, y = INPUTS.double().numpy(), LABELS.numpy()
    for k in range(iterations):
        masks = [calculate_mask(layer["score"]) for layer in state]  # Algorithm 2, line 2
        first, second = (layer["theta"] * mask for layer, mask in zip(state, masks))
        hidden = np.maximum(x @ first.T, 0)
        logits = hidden @ second.T
        error = np.exp(logits - logits.max(1, keepdims=True))
        error /= error.sum(1, keepdims=True)
        error[np.arange(len(y)), y] -= 1
        error /= len(y)
        back = (error @ second) * (hidden > 0)
        for layer, gradient in zip(state, (back.T @ x, error.T @ hidden)):  # line 3
            step = layer["theta"] * gradient + 5e-4 * layer["score"]
            layer["momentum"] = 0.9 * layer["momentum"] + step
            layer["score"] = layer["score"] - 0.5 * layer["momentum"]
        if (k + 1) % period == 0:  # Algorithm 3, lines 5-7
            number = (k + 1) // period
            for name, layer in zip(("0.weight", "2.weight"), state):
                mask = calculate_mask(layer["score"]).ravel()  # Algorithm 2, line 4
                bound = math.sqrt(6 / layer["theta"].shape[1])
                for i in np.flatnonzero(~mask):
                    words = reference.words(int(i), number, seed, name)
                    if words[1] < rate * 2**32:
                        layer["theta"].ravel()[i] = reference.uniform(words[0], bound)
                        layer["draw"].ravel()[i] = number
    for layer in state:
        layer["mask"] = calculate_mask(layer["score"])
    return state


@pytest.mark.parametrize(("period", "rate"), [(100, 0.1), (3, 0.1), (2, 0.5), (1, 1.0)])
def test_algorithm_3_line_by_line(period, rate):
    model = network(seed=4)
    optimizer, randomizer = sgd(model), iterand.IterativeRandomization(model, period, rate)
    for _ in range(12):
        train_mask(model, optimizer)
        randomizer.step()
    for layer, expected in zip(layers(model), plain_iterand(12, period, rate, seed=4)):
        np.testing.assert_array_equal(layer.mask.numpy(), expected["mask"])
        np.testing.assert_array_equal(layer.draw.numpy(), expected["draw"])
        np.testing.assert_array_equal(layer.weight.numpy(), expected["theta"])
        np.testing.assert_allclose(layer.score.detach().numpy(), expected["score"], rtol=1e-4, atol=1e-6)


# --- Section 5: the distributions -----------------------------------------------------------------------------------


def test_sc_takes_two_values():
    """{−sqrt(2 / c_fanin), sqrt(2 / c_fanin)}, each as often as the other."""
    layer = nn.Conv2d(8, 500, 3)
    iterand.prune_(layer, 0.5, weights="signed_constant")
    (masked,) = layers(layer)
    constant = np.float32(math.sqrt(2 / 72))
    assert masked.weight.unique().tolist() == [-constant, constant]
    assert abs(int((masked.weight > 0).sum()) - 18_000) < 5 * math.sqrt(9_000)


def test_ku_fills_its_interval():
    """Uniform over [−sqrt(6 / c_fanin), sqrt(6 / c_fanin)]."""
    layer = nn.Conv2d(8, 500, 3)
    iterand.prune_(layer, 0.5, weights="kaiming_uniform")
    (masked,) = layers(layer)
    bound = math.sqrt(6 / 72)
    assert bound * 0.999 < masked.weight.abs().max() <= np.float32(bound)
    counts = torch.histc(masked.weight, bins=10, min=-bound, max=bound)
    assert (counts - 3_600).abs().max() < 5 * math.sqrt(3_600)


def test_weights_and_scores_have_distributions_of_their_own():
    """θ ~ D_param and s ~ D_score are drawn apart from each other."""
    layer = iterand.prune_(nn.Linear(100, 100), 0.5, weights="uniform", scores="uniform")
    (masked,) = layers(layer)
    assert abs(float((masked.weight * masked.score.detach()).mean())) < 5 / 3 / 100  # uncorrelated
    assert not torch.equal(masked.weight, masked.score)
