"""A masked tensor: the mask is never stale, and the gradient goes straight through to the scores."""

import copy
import math
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import iterand
from pruned import INPUTS, RANKINGS, network, plain_masks, plain_output, score_gradients, shake

# --- The mask is never stale ----------------------------------------------------------------------------------------


@RANKINGS
def test_new_scores_are_seen_at_once(options):
    model = network(**options)
    for _ in range(3):
        assert torch.equal(model(INPUTS), plain_output(model))
        shake(model)
        assert torch.equal(model(INPUTS), plain_output(model))
        assert [layer.mask.flatten().tolist() for layer in iterand.masked_layers(model).values()] == plain_masks(model)


@RANKINGS
@pytest.mark.parametrize("assign", [False, True])
def test_loaded_scores_are_seen_at_once(options, assign):
    model, other = network(**options), network(**options, seed=9)
    shake(other)
    model(INPUTS)
    with pytest.warns(UserWarning, match="the state has seed="):
        model.load_state_dict(other.state_dict(), assign=assign)
    assert torch.equal(model(INPUTS), plain_output(other))


@RANKINGS
def test_a_part_called_by_itself_sees_them_too(options):
    model = network(**options)
    model(INPUTS)
    shake(model)
    assert torch.equal(model[2](model[1](model[0](INPUTS))), plain_output(model))
    assert torch.equal(model.forward(INPUTS), plain_output(model))


@RANKINGS
def test_an_optimizer_step_is_seen_at_once(options):
    model = network(**options)
    optimizer = torch.optim.SGD(iterand.scores(model), lr=10.0)
    for _ in range(3):
        optimizer.zero_grad()
        model(INPUTS).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            assert torch.equal(model(INPUTS), plain_output(model))


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.error:
            raise self.error
        return inputs


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt(), SystemExit(), GeneratorExit()], ids=repr)
@RANKINGS
def test_a_forward_that_fails_in_the_middle_leaves_no_mask_behind(options, error):
    model = nn.Sequential(nn.Linear(8, 16), Failing(), nn.Linear(16, 4))
    iterand.prune_(model, 0.6, **options)
    model[1].error = error
    with pytest.raises(type(error)):
        model(INPUTS)
    model[1].error = None
    shake(model)
    masks = [layer.mask.flatten().tolist() for layer in iterand.masked_layers(model).values()]
    assert masks == plain_masks(model)
    hidden = model[0](INPUTS)
    assert torch.equal(model(INPUTS), model[2](hidden))
    assert masks == plain_masks(model)


def test_an_interrupted_pass_does_not_hold_the_sparsity_either():
    model = nn.Sequential(nn.Linear(8, 16), Failing(), nn.Linear(16, 4))
    iterand.prune_(model, 0.5, ranking="global")
    model[1].error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        model(INPUTS)
    iterand.SparsitySchedule(model, "linear", steps=3)
    assert [int(model[n].weight.count_nonzero()) for n in (0, 2)] == [128, 64]


@RANKINGS
def test_threads_can_share_a_model(options):
    model = network(**options)
    expected = plain_output(model)

    def outputs(_: int) -> bool:
        with torch.no_grad():
            return all(torch.equal(model(INPUTS), expected) for _ in range(50))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(outputs, range(4)))
    finally:
        sys.setswitchinterval(interval)


@RANKINGS
def test_a_model_that_calls_itself(options):
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, inputs: Tensor, depth: int = 3) -> Tensor:
            return self.linear(self(inputs, depth - 1)) if depth else inputs

    model = iterand.prune_(Recursive(), 0.6, **options)
    shake(model)
    assert torch.equal(model(INPUTS), model.linear(model.linear(model.linear(INPUTS))))


def test_scores_changed_inside_the_forward_pass():
    """A model that adapts while it runs: every reading after the change must see it."""

    class Adapting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, inputs: Tensor) -> list[Tensor]:
            before = self.linear(inputs)
            with torch.no_grad():
                self.linear.parametrizations.weight[0].score.neg_()
            return [before, self.linear(inputs)]

    model = iterand.prune_(Adapting(), 0.6, ranking="global")
    after = model(INPUTS)[1]
    assert torch.equal(after, model.linear(INPUTS))


# --- The gradient ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranking", ["layer", "global"])
def test_the_gradient_goes_straight_through_to_every_score(ranking):
    """∂L/∂s = θ ⊙ ∂L/∂(θ ⊙ m), for pruned weights as for kept ones."""
    model = network(ranking=ranking)
    folded = iterand.fold_(copy.deepcopy(model))
    folded(INPUTS).square().sum().backward()
    for layer, plain, gradient in zip(
        iterand.masked_layers(model).values(), (folded[0], folded[2]), score_gradients(model)
    ):
        torch.testing.assert_close(gradient, layer.weight * plain.weight.grad)
        assert gradient[~layer.mask].any()
        assert layer.weight.grad is None


def test_by_magnitude_the_gradient_has_the_sign_of_the_score():
    model = network(rank_by="magnitude")
    folded = iterand.fold_(copy.deepcopy(model))
    folded(INPUTS).square().sum().backward()
    layer = iterand.masked_layers(model)["0.weight"]
    expected = layer.weight * folded[0].weight.grad * layer.score.sign()
    torch.testing.assert_close(score_gradients(model)[0], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_small_gradient_survives_half_precision(dtype):
    """The product of a small weight and a small gradient is made in the precision of the scores."""
    layer = iterand.prune_(nn.Linear(4096, 1, bias=False, dtype=dtype), 0.5)
    (tensor,) = iterand.masked_layers(layer).values()
    layer(torch.full((1, 4096), 1e-6, dtype=dtype)).backward()
    expected = tensor.weight.float() * torch.tensor(1e-6, dtype=dtype).float()
    assert torch.equal(tensor.score.grad, expected)


@RANKINGS
def test_gradients_accumulate(options):
    model = network(**options)
    separate = [score_gradients(model, part) for part in (INPUTS[:2], INPUTS[2:])]
    for score in iterand.scores(model):
        score.grad = None
    for part in (INPUTS[:2], INPUTS[2:]):
        model(part).square().sum().backward()
    for score, a, b in zip(iterand.scores(model), *separate):
        torch.testing.assert_close(score.grad, a + b)


@RANKINGS
def test_several_forward_passes_a_step(options):
    model = network(**options)
    expected = [a + b for a, b in zip(score_gradients(model), score_gradients(model, -INPUTS))]
    for score in iterand.scores(model):
        score.grad = None
    (model(INPUTS).square().sum() + model(-INPUTS).square().sum()).backward()
    for score, gradient in zip(iterand.scores(model), expected):
        torch.testing.assert_close(score.grad, gradient)


@RANKINGS
def test_nan_scores_stop_the_forward_pass_by_name(options):
    model = network(**options)
    iterand.scores(model)[1].data[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"the scores of '2\.weight' contain NaN"):
        model(INPUTS)
    with pytest.raises(ValueError, match=r"the scores of '2\.weight' contain NaN"):
        iterand.randomize_(model, 1.0)


def test_pruned_negative_weights_are_plain_zeros():
    model = network()
    (weight, _) = (layer for layer in iterand.masked_layers(model).values())
    masked = model[0].weight[~weight.mask]
    assert not masked.any()
    assert not torch.signbit(masked).any()
