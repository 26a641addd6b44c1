"""Randomize (Section 3): redraw pruned weights, Eq. (2) and Eq. (3); and when to do it, Algorithm 3.

Two things can be done differently than in the paper (docs/beyond.md says why): which pruned weights are redrawn, and
what becomes of the score of a redrawn one.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from iterand import philox
from iterand.checks import check_fraction, check_int, unknown
from iterand.distributions import normal_levels
from iterand.masking import MaskedLayer, require_masked_layers
from iterand.parametrization import Ranking, calculate_masks, selection_on_device
from iterand.selection import on_device

CANDIDATES = ("pruned", "negative")
"""Which weights a round may redraw: all that are pruned, or those of them that score below zero."""
SCORES = ("stay", "follow")
"""What a redrawn weight does to its score: nothing, or the score changes its sign when the weight does."""


def check_rate(rate: float) -> float:
    """The rate itself, if it is one."""
    return check_fraction("rate", rate, "the share of pruned weights redrawn")


def randomize_(
    model: nn.Module, rate: float = 1.0, *, candidates: str = "pruned", redrawn_scores: str = "stay"
) -> None:  # fmt: skip
    """Redraw pruned weights of all masked layers, each with probability ``rate``, in place.

    Partial randomization, Eq. (3), with r = ``rate``; at r = 1 every pruned weight is redrawn: naive randomization,
    Eq. (2). Kept weights never change. The k-th call gives draw k of the weights whose coin b_r falls in round k, so
    what changes is a function of seed, round and mask alone.

    With ``candidates="negative"`` only pruned weights whose score is below zero are redrawn: those that the network
    would rather have with the other sign. With ``redrawn_scores="follow"`` a score changes its sign when its weight
    does.
    """
    _randomize_(model, rate, candidates, redrawn_scores)


def _randomize_(
    model: nn.Module, rate: float, candidates: str, redrawn_scores: str, known_cuts: Callable[[], Any] | None = None
) -> None:
    threshold = philox.coin_threshold(check_rate(rate))
    layers = list(require_masked_layers(model).values())
    negative, follow = _check_choices(layers, candidates, redrawn_scores)
    for group in _ranked_alike(layers):
        if _on_device(group):
            found = known_cuts() if known_cuts else _find_on_device(group)
            redraw_on_device_(group, found, threshold, negative, follow)
        else:
            masks = calculate_masks([layer.parametrization for layer in group])
            for layer, mask in zip(group, masks):
                _randomize_layer_(layer, mask, threshold, negative, follow)
    for layer in layers:
        layer.parametrization.add_round(threshold)


def _check_choices(layers: Iterable[MaskedLayer], candidates: str, redrawn_scores: str) -> tuple[bool, bool]:
    """Whether only negative scores are redrawn, and whether scores follow their weights."""
    if candidates not in CANDIDATES:
        raise ValueError(unknown("kind of candidates", candidates, CANDIDATES))
    if redrawn_scores not in SCORES:
        raise ValueError(unknown("way of redrawn scores", redrawn_scores, SCORES))
    negative, follow = candidates == "negative", redrawn_scores == "follow"
    if (negative or follow) and any(layer.parametrization.settings.rank_by == "magnitude" for layer in layers):
        raise ValueError(
            "scores are ranked by magnitude, where their signs say nothing; leave out candidates='negative' and "
            "redrawn_scores='follow', or prune_ with rank_by='score'"
        )
    return negative, follow


def _ranked_alike(layers: Sequence[MaskedLayer]) -> list[list[MaskedLayer]]:
    groups: dict[Ranking, list[MaskedLayer]] = {}
    for layer in layers:
        groups.setdefault(layer.parametrization.ranking, []).append(layer)
    return list(groups.values())


@torch.no_grad()
def _randomize_layer_(layer: MaskedLayer, mask: torch.Tensor, threshold: int, negative: bool, follow: bool) -> None:
    state = layer.parametrization
    number = state.rounds + 1
    key, distribution, fan_in = state.key, state.distribution, state.settings.fan_in
    # In the order of the indices; the tensors may lie in another.
    kept, draw, weight = mask.reshape(-1), layer.draw.reshape(-1).clone(), layer.weight.reshape(-1).clone()
    score = layer.score.reshape(-1).clone()
    for part in philox.chunks(draw.numel(), draw.device):
        words = philox.philox(philox.indices(part, draw.device), number, key)
        redraw = philox.coins(words[1], threshold) & ~kept[part]
        if negative:
            redraw &= score[part] < 0
        fresh = distribution.values(words, fan_in).to(weight.dtype)
        if follow:
            turned = redraw & ((fresh < 0) != (weight[part] < 0))
            score[part] = torch.where(turned, -score[part], score[part])
        draw[part] = torch.where(redraw, number, draw[part])
        weight[part] = torch.where(redraw, fresh, weight[part])
    if follow:
        layer.score.copy_(score.view(layer.score.shape))
    layer.draw.copy_(draw.view(layer.draw.shape))
    layer.weight.copy_(weight.view(layer.weight.shape))


def _on_device(layers: Sequence[MaskedLayer]) -> bool:
    """Whether ``iterand.kernels`` can do it: everything float32 and in one order on a GPU, known distributions.

    They find the cuts of these layers by these layers alone, so none may be ranked together with others.
    """
    if not on_device([layer.score.detach() for layer in layers]):
        return False
    masks = [layer.parametrization for layer in layers]
    if not {*masks}.issuperset(masks[0].ranking.rivals(masks[0])):
        return False
    from iterand.backend.triton.layers import is_dense, same_order

    return all(
        layer.parametrization.distribution.kind is not None
        and layer.weight.dtype == torch.float32
        and is_dense(layer.weight)
        and same_order(layer.score, layer.draw)
        for layer in layers
    )


@torch.no_grad()
def _find_on_device(layers: Sequence[MaskedLayer]) -> Any:
    """The cuts; the host does not wait, so scores that are NaN do not raise here."""
    found = selection_on_device([layer.parametrization for layer in layers])
    found.find()
    return found


@torch.no_grad()
def redraw_on_device_(
    layers: Sequence[MaskedLayer], found: Any, threshold: int, negative: bool = False, follow: bool = False
) -> None:
    """Redraw what cuts that were found prune, all layers in one launch."""
    from iterand.backend.triton.layers import bump_version, to_device_async
    from iterand.backend.triton.redraw import redraw as prepared

    masks = [layer.parametrization for layer in layers]
    origins = [mask.origin for mask in masks]
    device = layers[0].weight.device
    numbers = to_device_async(torch.tensor([mask.rounds + 1 for mask in masks]), device)
    redraw = prepared(
        found, [layer.weight for layer in layers], [layer.draw for layer in layers], origins, normal_levels(device)
    )
    redraw.run(numbers, threshold, negative=negative, follow=follow)
    bump_version(tensor for layer in layers for tensor in (layer.weight, layer.draw))
    if follow:
        bump_version(layer.score for layer in layers)


class IterativeRandomization:
    """Lines 5-7 of Algorithm 3 as a stepper: call ``step()`` after the optimizer's, once an iteration.

    Every K_per-th step (``period``) the weights that the updated scores prune are randomized at rate r (``rate``);
    ``candidates`` and ``redrawn_scores`` are those of ``randomize_``.
    """

    def __init__(
        self,
        model: nn.Module,
        period: int = 300,
        rate: float = 0.1,
        *,
        candidates: str = "pruned",
        redrawn_scores: str = "stay",
    ) -> None:
        self.model = model
        self.period = check_int("period", period, "a number of iterations, at least 1", low=1)
        self.rate = check_rate(rate)
        _check_choices(require_masked_layers(model).values(), candidates, redrawn_scores)
        self.candidates, self.redrawn_scores = candidates, redrawn_scores
        self.known_cuts: Callable[[], Any] | None = None
        """Gives the cuts of all layers on a GPU, from whoever has found them anyway; else a round finds them."""
        self.iteration = 0

    def step(self) -> None:
        """Count one iteration; randomize if k + 1 can be divided by K_per."""
        self.iteration += 1
        if self.iteration % self.period == 0:
            self.randomize()

    def randomize(self) -> None:
        """One round, whatever the iteration."""
        _randomize_(self.model, self.rate, self.candidates, self.redrawn_scores, self.known_cuts)

    def state_dict(self) -> dict[str, Any]:
        """The count of iterations; the rounds themselves are the model's state."""
        return {"iteration": self.iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.iteration = int(state["iteration"])
