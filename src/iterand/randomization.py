"""Randomize (Section 3): redraw pruned weights, Eq. (2) and (3); and when to do it, Algorithm 3.

Three choices go beyond the paper: which pruned weights are redrawn, what happens to the score of a redrawn weight
(docs/explanation/beyond.md), and where its new value comes from (docs/guides/kinds.md).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from iterand import backend, mask_kinds, philox
from iterand.backend import reference
from iterand.checks import check_fraction, check_int, shown
from iterand.distributions import normal_levels
from iterand.parametrization import calculate_masks
from iterand.selection import GlobalRanking
from iterand.settings import RedrawFrom, source_index
from iterand.sparsity import SparsitySchedule
from iterand.stepping import CountingStepper
from iterand.surgery import MaskedLayer, by_ranking, require_masked_layers

if TYPE_CHECKING:
    from iterand.backend.triton.cuts import FindCuts

Candidates = Literal["pruned", "negative"]
"""Which weights a round may redraw: all that are pruned, or those of them whose score is below zero."""
RedrawnScores = Literal["stay", "follow"]
"""What happens to the score of a redrawn weight: nothing, or it flips its sign when the weight does."""
CANDIDATES: tuple[str, ...] = get_args(Candidates)
REDRAWN_SCORES: tuple[str, ...] = get_args(RedrawnScores)
REDRAW_FROM: tuple[str, ...] = get_args(RedrawFrom)


def check_rate(rate: float) -> float:
    """The rate itself, if it is one."""
    return check_fraction("rate", rate, "the share of pruned weights redrawn")


def randomize_(
    model: nn.Module,
    rate: float = 0.1,
    *,
    candidates: Candidates = "pruned",
    redrawn_scores: RedrawnScores = "stay",
    redraw_from: RedrawFrom = "fresh",
) -> None:
    """Redraw pruned weights of all masked layers, each with probability ``rate``, in place.

    Partial randomization, Eq. (3), with r = ``rate``; at r = 1 every pruned weight is redrawn: naive randomization,
    Eq. (2). Kept weights never change. The k-th call gives draw k to the weights whose coin b_r comes up in round k, so
    the result is a function of seed, round and mask alone.

    With ``candidates="negative"`` only pruned weights whose score is below zero are redrawn: those that would reduce
    the loss with the opposite sign. With ``redrawn_scores="follow"`` a score flips its sign when its weight does.

    With ``redraw_from="kept"`` a weight takes the value of a kept one instead of a fresh draw (weight recycling;
    Gorbett and Whitley, 2023): that of a random position of its tensor, if the weight there is kept and was never
    redrawn itself. Otherwise it stays as it is, so about ``rate`` times the share of kept weights are replaced. The
    position is a function of seed, index and round, so a ticket needs no more than with fresh draws.
    """
    threshold = philox.coin_threshold(check_rate(rate))
    layers = list(require_masked_layers(model).values())
    negative, follow = _check_choices(layers, candidates, redrawn_scores, redraw_from)
    for layer in layers:
        layer.parametrization.follow_source_()
        layer.parametrization.hold_draws_up_to(layer.parametrization.rounds + 1)
        layer.parametrization.settings = replace(layer.parametrization.settings, redraw_from=redraw_from)
    plain: list[MaskedLayer] = []
    for group in by_ranking(layers):
        if _uses_triton(group):
            redraw_on_device_(group, find_cuts_on_device(group), threshold, negative, follow)
        else:
            plain += group
    masks = calculate_masks([layer.parametrization for layer in plain])
    wanted = [mask | (layer.score.detach() >= 0) if negative else mask for layer, mask in zip(plain, masks)]
    for layer, kept, stays in zip(plain, _any_of_shared(plain, masks), _any_of_shared(plain, wanted)):
        _redraw_layer_(layer, kept, stays, threshold, negative, follow)
    for layer in layers:
        layer.parametrization.add_round(threshold)


def _any_of_shared(layers: Sequence[MaskedLayer], masks: Sequence[Tensor]) -> list[Tensor]:
    """For each layer, where its mask or that of a layer with the same weights is true."""
    union: dict[str, Tensor] = {}
    for layer, mask in zip(layers, masks):
        if shared := layer.parametrization.settings.shared:
            union[shared] = union[shared] | mask if shared in union else mask
    return [union.get(layer.parametrization.settings.shared, mask) for layer, mask in zip(layers, masks)]


def _check_choices(
    layers: Sequence[MaskedLayer], candidates: str, redrawn_scores: str, redraw_from: str
) -> tuple[bool, bool]:
    """Whether only negative scores are redrawn, and whether scores follow their weights."""
    for name, value, known in (
        ("candidates", candidates, CANDIDATES),
        ("redrawn_scores", redrawn_scores, REDRAWN_SCORES),
        ("redraw_from", redraw_from, REDRAW_FROM),
    ):
        if value not in known:
            raise ValueError(f"{name} is {shown(value)}; it must be one of {', '.join(known)}")
    for layer in layers:
        state = layer.parametrization
        if state.rounds and state.settings.redraw_from != redraw_from:
            raise ValueError(
                f"redraw_from is {redraw_from!r}, but the weights of {layer.name!r} were redrawn from "
                f"{state.settings.redraw_from!r} before; a search has one source"
            )
        if state.is_existing:
            raise ValueError(
                f"{layer.name!r} holds existing weights, which are never redrawn; train the scores without "
                "randomization, or prune_ with random weights"
            )
    negative, follow = candidates == "negative", redrawn_scores == "follow"
    reason = _why_signs_say_nothing(layers)
    if (negative or follow) and reason:
        raise ValueError(
            f"{reason}, where the sign of a score says nothing about that of its weight; leave out "
            "candidates='negative' and redrawn_scores='follow'"
        )
    _refuse_parts_of_shared(layers)
    return negative, follow


def _why_signs_say_nothing(layers: Sequence[MaskedLayer]) -> str | None:
    settings = [layer.parametrization.settings for layer in layers]
    reasons = [mask_kinds.why_signs_say_nothing(one.mask, one.rank_by) for one in settings]
    return next(filter(None, reasons), None)


def _refuse_parts_of_shared(layers: Sequence[MaskedLayer]) -> None:
    masks = {layer.parametrization for layer in layers}
    for mask in masks:
        for other in mask.ranking.members:
            if mask.settings.shared and other.settings.shared == mask.settings.shared and other not in masks:
                raise ValueError(
                    f"{mask.name!r} has the same weights as {other.name!r}, which is not in the model that was given; "
                    "give the whole model that was pruned"
                )


@torch.no_grad()
def _redraw_layer_(
    layer: MaskedLayer, kept: Tensor, stays: Tensor, threshold: int, negative: bool, follow: bool
) -> None:
    """`reference.redraw` with the coins and new weights of the next round, in chunks that bound the memory.

    Weights that are ``kept`` may be the source of others; those that are true in ``stays`` are not redrawn.
    """
    state = layer.parametrization
    number, settings = state.rounds + 1, state.settings
    # In the order of the indices; the tensors may lie in memory in another.
    stays, draw, weight = stays.reshape(-1), layer.draw.reshape(-1).clone(), layer.weight.reshape(-1).clone()
    score = layer.score.reshape(-1).clone()
    before, source = weight.clone(), state.clear_padding_(kept & (layer.draw == 0)).reshape(-1)
    for part in philox.chunks(draw.numel(), draw.device):
        index = philox.indices(part, draw.device)
        words = philox.philox(index, number, state.key)
        coin = philox.coins(words[1], threshold)
        if settings.redraw_from == "kept":
            where = source_index(state.key, index, number, draw.numel())
            fresh, coin = before[where], coin & source[where]
        else:
            fresh = state.distribution.values(words, settings.fan_in, settings.scale).to(weight.dtype)
        weight[part], draw[part], score[part] = reference.redraw(
            weight[part], draw[part], score[part], stays[part], fresh, coin, number, negative=negative, follow=follow
        )
    if follow:
        layer.score.copy_(score.view(layer.score.shape))
    layer.draw.copy_(draw.view(layer.draw.shape))
    layer.weight.copy_(state.clear_padding_(weight.view(layer.weight.shape)))


def _uses_triton(layers: Sequence[MaskedLayer]) -> bool:
    """Whether kernels can redraw these layers: known distributions, and all that are ranked together are there."""
    masks = [layer.parametrization for layer in layers]
    return (
        {*masks}.issuperset(masks[0].ranking.rivals(masks[0]))
        and all(mask.distribution.kind is not None and mask.settings.mask != "gem_miner" for mask in masks)
        and all(mask.settings.redraw_from == "fresh" and not mask.settings.shared for mask in masks)
        and backend.uses_triton(
            [mask.score.detach() for mask in masks],
            [layer.weight for layer in layers],
            [layer.draw for layer in layers],
        )
    )


@torch.no_grad()
def find_cuts_on_device(layers: Sequence[MaskedLayer]) -> "FindCuts":
    """The cuts without a host sync, so NaN scores do not raise here."""
    masks = [layer.parametrization for layer in layers]
    cuts = masks[0].ranking.prepare_cuts(masks)
    cuts.run()
    return cuts


@torch.no_grad()
def redraw_on_device_(
    layers: Sequence[MaskedLayer], cuts: "FindCuts", threshold: int, negative: bool = False, follow: bool = False
) -> None:
    """Redraw the weights that these cuts prune, all layers in one launch."""
    from iterand.backend.triton import redraw
    from iterand.backend.triton.layers import bump_version, to_device_async

    masks = [layer.parametrization for layer in layers]
    for mask in masks:
        mask.hold_draws_up_to(max(torch.iinfo(other.draw.dtype).max for other in masks))
    weights, draws = [layer.weight for layer in layers], [layer.draw for layer in layers]
    device = weights[0].device
    numbers = to_device_async(torch.tensor([mask.rounds + 1 for mask in masks]), device)
    operation = redraw.prepare(cuts, weights, draws, [mask.origin for mask in masks], normal_levels(device))
    operation.run(numbers, threshold, negative=negative, follow=follow)
    for mask, weight in zip(masks, weights):
        mask.clear_padding_(weight)
    bump_version((*weights, *draws, *(layer.score for layer in layers if follow)))


class IterativeRandomization(CountingStepper):
    """Lines 5-7 of Algorithm 3 as a stepper: call ``step()`` after the optimizer's, once an iteration.

    Every K_per-th step (``period``) the weights that the updated scores prune are randomized at rate r (``rate``);
    ``candidates``, ``redrawn_scores`` and ``redraw_from`` are those of ``randomize_``. If the length of the search is
    given (``steps``), rounds that fewer than ``period`` steps would follow are left out: what they redraw could not be
    learned. The count of iterations is part of the model's state dict: a model that loads one continues there.
    """

    kind = "randomization"

    def __init__(
        self,
        model: nn.Module,
        period: int = 300,
        rate: float = 0.1,
        *,
        candidates: Candidates = "pruned",
        redrawn_scores: RedrawnScores = "stay",
        redraw_from: RedrawFrom = "fresh",
        steps: int | None = None,
    ) -> None:
        self.model = model
        self.period = check_int("period", period, "a number of iterations, at least 1", low=1)
        self.steps = None if steps is None else check_int("steps", steps, "a number of iterations, at least 1", low=1)
        self.rate = check_rate(rate)
        layers = list(require_masked_layers(model).values())
        _check_choices(layers, candidates, redrawn_scores, redraw_from)
        self.candidates, self.redrawn_scores, self.redraw_from = candidates, redrawn_scores, redraw_from
        super().__init__(layer.parametrization for layer in layers)

    def step(self) -> None:
        """Count one iteration; randomize if k + 1 can be divided by K_per, and the search does not end too soon."""
        self._advance()
        ends = self.steps is not None and self.steps - self.period < self.iteration <= self.steps
        if self.iteration % self.period == 0 and not ends:
            self.randomize()

    def randomize(self) -> None:
        """One round, whatever the iteration."""
        randomize_(
            self.model,
            self.rate,
            candidates=self.candidates,
            redrawn_scores=self.redrawn_scores,
            redraw_from=self.redraw_from,
        )


class Stepper(Protocol):
    """What is called once an iteration, after the optimizer; it has the protocol of torch's schedulers."""

    def step(self) -> None:
        """Count one iteration."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state."""
        ...


def recommended_steppers(model: nn.Module, *, steps: int) -> list[Stepper]:
    """The steppers that go with ``prune_(..., preset="recommended")``; call ``step()`` of each once an iteration.

    Every 300 iterations, but not in the last 299 of the ``steps``, pruned weights with negative scores are redrawn (all
    of signed constants, a tenth of other distributions), and scores follow their weights. Where the signs of scores do
    not say this (signed, Bernoulli and GEM-Miner masks, magnitudes), a tenth of all pruned weights is redrawn. Existing
    weights are not redrawn. Where the whole network is ranked as one, the sparsity rises to its final value over the
    first half of the ``steps``, except with Bernoulli masks.
    """
    check_int("steps", steps, "a number of iterations, at least 1", low=1)
    layers = list(require_masked_layers(model).values())
    masks = [layer.parametrization for layer in layers]
    steppers: list[Stepper] = []
    if not any(mask.is_existing for mask in masks):
        options: dict[str, Any] = {"rate": 0.1}
        if _why_signs_say_nothing(layers) is None:
            two_valued = all(mask.settings.weight_distribution == "signed_constant" for mask in masks)
            options = {"rate": 1.0 if two_valued else 0.1, "candidates": "negative", "redrawn_scores": "follow"}
        steppers.append(IterativeRandomization(model, period=300, steps=steps, **options))
    sampled = any(mask.settings.mask == "bernoulli" for mask in masks)
    if any(isinstance(mask.ranking, GlobalRanking) for mask in masks) and not sampled:
        steppers.append(SparsitySchedule(model, "cubic", steps=max(1, round(0.5 * steps))))
    return steppers
