"""Kinds of masks: what a weight is multiplied by, from its score. The paper's masks are ``binary``.

A mask is a cut through the scores (`iterand.selection`) whatever its kind, so counts, rankings, schedules and
randomization are the same for all of them. Here s is the score, t the threshold of the cut, a the multiplier and
W = a ⊙ θ the masked weight.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from iterand import philox
from iterand.backend import Cut, RankBy, reference
from iterand.checks import check_int

MaskKind = Literal["binary", "bernoulli", "signed", "multicoat", "gem_miner"]
"""What a score becomes in the forward pass:

``binary``
    a = 1 if s > t, else 0 (edge-popup; Ramanujan et al., 2020).
``bernoulli``
    While training, a is 1 with probability σ(s), drawn anew in each forward pass; in eval mode ``binary``. Scores begin
    around the value whose probability is 1 − p (Zhou et al., 2019).
``signed``
    a = sign(s) if |s| > t, else 0: a mask of {−1, 0, 1} with the thresholds −t and t (Koster et al., 2022).
``multicoat``
    a = Σⱼ 1[s > tⱼ], the sum of k nested masks, of which the j-th keeps (k − j + 1)/k of the kept weights. Weights are
    drawn smaller, so that kept ones have the variance that they have without coats (Okoshi et al., 2022).
``gem_miner``
    a = 1 if s ≥ 0.5 and s > t, else 0, with scores in [0, 1] that ``ScoreFreezing`` keeps there (Sreenivasan et al.,
    2022).
"""
MASK_KINDS: tuple[str, ...] = get_args(MaskKind)

MAX_COATS = 8
_GAIN = re.compile(r"gain(\d{1,20}(?:\.\d{1,20})?(?:e[+-]\d{1,3})?)", re.ASCII)
_HALF = 0.5  # from here a score of GEM-Miner is rounded to 1
_WORDS = float(1 << 32)  # how many random words there are


def check_kind(kind: str, coats: int) -> int:
    """The number of coats; refuses an unknown kind of mask, or a number that does not go with it."""
    if kind not in MASK_KINDS:
        raise ValueError(f"mask is {kind!r}; it must be one of {', '.join(MASK_KINDS)}")
    coats = check_int("coats", coats, f"a whole number from 1 to {MAX_COATS}", low=1, high=MAX_COATS + 1)
    if kind != "multicoat" and coats != 1:
        raise ValueError(f"coats is {coats}, but mask is {kind!r}; set mask='multicoat', or coats=1")
    return coats


def has_multipliers(kind: str) -> bool:
    """Whether kept weights are multiplied by other numbers than 1."""
    return kind in ("signed", "multicoat")


def why_signs_say_nothing(kind: str, rank_by: str) -> str | None:
    """Why the sign of a score does not say whether its weight should have the other sign; None if it does.

    Randomization reads these signs with ``candidates="negative"`` and ``redrawn_scores="follow"``.
    """
    if kind in ("binary", "multicoat"):
        return "rank_by is 'magnitude'" if rank_by == "magnitude" else None
    return f"mask is {kind!r}"


def of_dense(kind: MaskKind) -> MaskKind:
    """The kind of mask of a layer that keeps all weights: neither samples nor rounded scores may prune any."""
    return "binary" if kind in ("bernoulli", "gem_miner") else kind


def ranked_by(kind: MaskKind, asked: RankBy) -> RankBy:
    """What is ranked: a signed mask keeps the scores of the largest magnitude."""
    return "magnitude" if kind == "signed" else asked


def coat_scale(coats: int) -> float:
    """The factor of the weights under coats: one over the root mean square of the multipliers 1 … k."""
    return 1.0 if coats == 1 else math.sqrt(6 / ((coats + 1) * (2 * coats + 1)))


def first_offset(kind: MaskKind, sparsity: float) -> float:
    """What is added to initial scores: the logit of 1 − p where probabilities are σ(s)."""
    if kind != "bernoulli":
        return 0.0
    share = min(max(1 - sparsity, 1e-6), 1 - 1e-6)
    return math.log(share / (1 - share))


def limit(kind: MaskKind, cut: Cut, count: int) -> Cut:
    """The cut that decides which of ``count`` weights are kept: GEM-Miner keeps no score below 0.5."""
    if kind != "gem_miner":
        return cut
    low = cut.threshold < _HALF
    return Cut(torch.where(low, _HALF, cut.threshold), torch.where(low, count - 1, cut.last))


def kept(ranked: Tensor, cut: Cut) -> Tensor:
    """m: true where the weight is kept."""
    return reference.mask_of(ranked, cut) if reference.holds_numbers(ranked) else reference.keeps(ranked, cut)


def multipliers(kind: MaskKind, score: Tensor, ranked: Tensor, cuts: Sequence[Cut]) -> Tensor:
    """a as int8, for all kinds but a sample: 0 where the weight is pruned. ``cuts`` has one cut for each coat."""
    first = kept(ranked, cuts[0]).to(torch.int8)
    if kind == "signed":
        return torch.where(score < 0, -first, first)
    inner = sum(kept(ranked, cut).to(torch.int8) for cut in cuts[1:])  # a floor may let the first coat keep others
    return first * (inner + 1)


def possible(kind: MaskKind, coats: int) -> tuple[int, ...]:
    """The multipliers of kept weights, ascending."""
    return (-1, 1) if kind == "signed" else tuple(range(1, coats + 1))


def levels(support: Iterable[int], kind: MaskKind, coats: int) -> list[int]:
    """The levels of masked weights, ascending, from those of the weights."""
    return sorted({level * factor for level in support for factor in possible(kind, coats)})


def sample(score: Tensor, key: philox.Key, number: Tensor) -> tuple[Tensor, Tensor]:
    """A Bernoulli mask as int8 and the slope σ'(s), for the ``number``-th forward pass.

    The sample is a function of seed, tensor, index and ``number``.
    """
    probability = torch.sigmoid(score.detach().reshape(-1))
    mask = torch.empty_like(probability, dtype=torch.int8)
    for part in philox.chunks(probability.numel(), score.device):
        index = philox.indices(part, score.device)
        words = philox.philox(index, number.expand(index.shape), key, philox.SAMPLE)
        mask[part] = (words[0].double() < probability[part].double() * _WORDS).to(torch.int8)
    return mask.view(score.shape), (probability * (1 - probability)).view(score.shape)


def mean_magnitude(weight: Tensor, mask: Tensor, unit: float) -> Tensor:
    """α: the mean magnitude of the kept weights, as float32; the same bits on every device.

    Magnitudes are multiples of the ``unit`` of their distribution, and are added as integers.
    """
    levels = (weight.detach().double().abs() / unit).round().to(torch.int64)
    total = torch.where(mask, levels, 0).sum()
    return (total.double() * unit / mask.sum().clamp(min=1).double()).float()


def binarize(weight: Tensor, mask: Tensor, unit: float) -> Tensor:
    """α · sign(θ) in float32, with one α for a tensor: the mean magnitude of its kept weights.

    Biprop (Diffenderfer and Kailkhura, 2021).
    """
    scale = mean_magnitude(weight, mask, unit)
    return torch.where(weight.detach() < 0, -scale, scale)


def apply_multipliers(weight: Tensor, multipliers: Tensor, threshold: Tensor, dtype: torch.dtype) -> Tensor:
    """a ⊙ θ; pruned weights become +0, or NaN if the threshold is."""
    zero = torch.where(threshold.isnan(), threshold, 0.0).float()
    return torch.where(multipliers == 0, zero, weight.float() * multipliers).to(dtype)


class Factors(NamedTuple):
    """A masked weight before it is multiplied: W = a ⊙ base."""

    base: Tensor
    """θ, or α · sign(θ) if weights are binarized."""
    multipliers: Tensor
    threshold: Tensor
    """Is NaN if a score is."""
    slope: Tensor | None
    """σ'(s) where a was sampled."""

    def masked(self, dtype: torch.dtype) -> Tensor:
        """W."""
        return apply_multipliers(self.base, self.multipliers, self.threshold, dtype)

    def gradient(self, gradient: Tensor) -> Tensor:
        """∂L/∂s from ∂L/∂W; where magnitudes are ranked, ∂L/∂|s|."""
        return _score_gradient(self.base, self.slope, gradient)


def _score_gradient(base: Tensor, slope: Tensor | None, gradient: Tensor) -> Tensor:
    found = reference.score_gradient(base, gradient)
    return found if slope is None else found * slope


class _MultipliedWeight(torch.autograd.Function):
    """W, and in the backward pass ∂L/∂s = base ⊙ ∂L/∂W, times σ'(s) where a was sampled."""

    generate_vmap_rule = True

    @staticmethod
    def forward(score: Tensor, dtype: torch.dtype, *factors: Any) -> Tensor:
        return Factors(*factors).masked(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, base, _, _, slope = inputs
        ctx.save_for_backward(base, slope)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        base, slope = ctx.saved_tensors
        return _score_gradient(base, slope, gradient), *[None] * 5


def multiply(factors: Factors, score: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """W as a function of what is ranked, for autograd."""
    found: Tensor = _MultipliedWeight.apply(score, dtype, *factors)  # type: ignore[no-untyped-call]
    return found


def tags(kind: MaskKind, coats: int, gain: float, binarized: bool, recycled: bool) -> str:
    """What is special about masked weights, behind the name of their distribution, as a ticket holds it."""
    words = [] if gain == 1 else [f"gain{gain!r}"]
    words += [f"multicoat{coats}" if kind == "multicoat" else "signed"] if has_multipliers(kind) else []
    words += ["binarized"] * binarized + ["recycled"] * recycled
    return "".join(f":{word}" for word in words)


def without_tags(name: str) -> tuple[str, dict[str, Any]]:
    """The name of a distribution and the settings that its tags stand for."""
    settings: dict[str, Any] = {}
    while ":" in name:
        rest, _, word = name.rpartition(":")
        digits = word.removeprefix("multicoat")
        if factor := _GAIN.fullmatch(word):
            settings["gain"] = float(factor[1])
        elif word == "signed":
            settings["mask"] = "signed"
        elif word != digits and digits in map(str, range(1, MAX_COATS + 1)):
            settings |= {"mask": "multicoat", "coats": int(digits)}
        elif word in ("binarized", "recycled"):
            settings |= {"binarize": True} if word == "binarized" else {"redraw_from": "kept"}
        else:
            break
        name = rest
    return name, settings
