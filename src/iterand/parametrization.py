"""A masked tensor: weight ⊙ mask in the forward pass, straight-through gradient to the score in the backward pass.

The mask is computed from the scores each time the tensor is read, so it is never stale.
"""

import json
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from iterand import distributions, mask_kinds, philox
from iterand.backend import Cut, RankBy, reference
from iterand.history import BranchedHistory, Runs
from iterand.selection import Ranking, floor_count, kept_count
from iterand.settings import Settings, draw_weights
from iterand.stepping import Counts, load_counts, save_counts

_DRAWS = (torch.uint8, torch.int16, torch.int32)
"""What draws are held in: the smallest that fits."""

_STATE_BYTES = 1024
"""The extra state has a multiple of so many bytes: with some 30 different rates, it still has as many as at first."""


class _MaskedWeight(torch.autograd.Function):
    """θ ⊙ m, and in the backward pass ∂L/∂s = θ ⊙ ∂L/∂(θ ⊙ m) (Algorithm 2, line 3)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, ranked: Tensor, threshold: Tensor, last: Tensor) -> Tensor:
        return reference.apply_mask(weight, ranked, Cut(threshold, last))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        if not torch.compiler.is_compiling() and gradient.is_sparse:  # compiled, it never is; torch 2.6 cannot ask
            gradient = gradient.to_dense()
        return None, reference.score_gradient(weight, gradient), None, None


class _GivenMaskedWeight(torch.autograd.Function):
    """`_MaskedWeight` where θ ⊙ m is there already."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ranked: Tensor, masked: list[Tensor]) -> Tensor:
        ctx.save_for_backward(weight)
        return masked[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        _, score_gradient, *_ = _MaskedWeight.backward(ctx, gradient)
        return None, score_gradient, None


class MaskedParametrization(nn.Module):
    """The state of one masked tensor: its scores s, the draw every weight holds, and how many weights are kept."""

    draw: Tensor
    mark: Tensor
    """Which rounds the draws come from, for copies into which something copies all buffers, as averages do."""
    kept: Tensor
    passes: Tensor
    """Of a Bernoulli mask: the number of forward passes in training mode."""
    frozen: Tensor
    """Of GEM-Miner: true where the weight is pruned for good."""
    _holder: nn.Module
    padding: int | None = None
    """The row of an embedding that stands for padding: its weights are zero, whatever is drawn."""

    def __init__(
        self,
        weight: Tensor,
        settings: Settings,
        ranking: "Ranking[MaskedParametrization]",
        *,
        padding: int | None = None,
        scores: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.ranking = ranking
        self.trained = weight.requires_grad
        """Whether the tensor took gradients before it was masked, and will again."""
        self.given: Tensor | None = None
        """θ ⊙ m as computed elsewhere, during a training step of `iterand.engine`."""
        self.padding = padding
        self.running_passes = 0
        """Of a Bernoulli mask: how many forward passes are running, one inside the other."""
        self.history = BranchedHistory(settings)
        self._copied_from: weakref.ref[MaskedParametrization] | None = None
        self.iterations: Counts = {}
        """The counts of the steppers of this tensor."""
        if scores is None:
            scores = distributions.sample(
                distributions.get_distribution(settings.score_distribution),
                weight.numel(),
                settings.fan_in,
                philox.key(settings.seed, settings.name),
                stream=philox.SCORE,
                device=weight.device,
            ).add_(mask_kinds.first_offset(settings.mask, settings.sparsity))
        self.score = nn.Parameter(scores.view(weight.shape))
        self.register_buffer("draw", torch.zeros(weight.shape, dtype=_DRAWS[0], device=weight.device))
        self.register_buffer("mark", torch.zeros((), dtype=torch.int64, device=weight.device), persistent=False)
        kept = kept_count(weight.numel(), settings.sparsity)
        self.register_buffer("kept", torch.tensor(kept, device=weight.device))
        if settings.mask == "bernoulli":
            # Compiled code has keys as constants. Traced, the key of a second layer would become a number that varies,
            # which inductor cannot shift on a CPU.
            torch.compiler.assume_constant_result(philox.key)  # type: ignore[no-untyped-call]
            self.register_buffer("passes", torch.zeros((), dtype=torch.int64, device=weight.device))
        if settings.mask == "gem_miner":
            self.register_buffer("frozen", torch.zeros(weight.shape, dtype=torch.bool, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        """θ ⊙ m for the weights θ, in their memory format."""
        if self.given is not None:
            return self.given
        if not self.is_standard:
            return self._multiplied(weight)
        masked_weight = self.ranking.masked_weight(self)
        if masked_weight is not None:
            inputs = weight, self.ranked(), [masked_weight]
            return cast(Tensor, _GivenMaskedWeight.apply(*inputs))  # type: ignore[no-untyped-call]
        threshold, last = self.ranking.cut(self)
        masked: Tensor = _MaskedWeight.apply(weight, self.ranked(), threshold, last)  # type: ignore[no-untyped-call]
        return reference.match_layout(masked, weight)

    def _multiplied(self, weight: Tensor) -> Tensor:
        """The masked weights of the other kinds; see `iterand.mask_kinds`."""
        factors = self.factors(weight, partial(self.ranking.cut, self))
        score = self.ranked() if self.differentiates_magnitude else self.score
        return reference.match_layout(mask_kinds.multiply(factors, score, weight.dtype), weight)

    @torch.no_grad()
    def factors(self, weight: Tensor, cut: Callable[[int], Cut]) -> mask_kinds.Factors:
        """What the masked weights are multiplied from, given the cut of each coat."""
        settings, slope = self.settings, None
        if settings.mask == "bernoulli" and self.training:
            key = philox.key(settings.seed, settings.name)
            multipliers, slope = mask_kinds.sample(self.score, key, self.passes)
            threshold = self.score.max()  # is NaN if a score is
            if self.score.device.type == "cpu" and reference.holds_numbers(self.score) and threshold.isnan():
                raise reference.nan_error(settings.name)  # as where a cut is found
        else:
            cuts = [cut(coat) for coat in range(settings.coats)]
            multipliers, threshold = self.multipliers(cuts), cuts[0].threshold
        base = self.binarized(weight, multipliers) if settings.binarize else weight
        return mask_kinds.Factors(base, multipliers, threshold, slope)

    @property
    def differentiates_magnitude(self) -> bool:
        """Whether the masked weight is a function of |s|. Signs and probabilities come from s itself."""
        return self.settings.rank_by == "magnitude" and self.settings.mask not in ("signed", "bernoulli")

    def multipliers(self, cuts: Sequence[Cut]) -> Tensor:
        """What the weights are multiplied by under these cuts, one for each coat."""
        kind = self.settings.mask
        first = mask_kinds.limit(kind, cuts[0], self.score.numel())
        return mask_kinds.multipliers(kind, self.score.detach(), self.ranked().detach(), [first, *cuts[1:]])

    def binarized(self, weight: Tensor, multipliers: Tensor) -> Tensor:
        """α · sign(θ), in float32; the padding row of an embedding stays zero and does not count."""
        kept = self.clear_padding_(multipliers != 0)
        return self.clear_padding_(mask_kinds.binarize(weight, kept, self.unit))

    def begin_pass(self) -> None:
        """A forward pass of the model begins, or of the layer alone."""
        if self.running_passes == 0:
            self.count_pass_()
        self.running_passes += 1

    def end_pass(self) -> None:
        """The pass that began last ends."""
        self.running_passes -= 1

    def count_pass_(self) -> None:
        """Note that a forward pass begins: a Bernoulli mask is sampled anew, unless the pass repeats an earlier one."""
        if self.settings.mask == "bernoulli" and self.training and self.given is None and not _is_recomputing():
            self.passes += 1

    def ranked(self) -> Tensor:
        """What is ranked of the scores."""
        return reference.ranking_key(self.score, self.settings.rank_by)

    def attach_to(self, holder: nn.Module) -> None:
        """Set the module whose ``original`` is masked."""
        self.__dict__["_holder"] = holder  # not as a submodule, since it is the module above this one

    @property
    def attached_weight(self) -> Tensor:
        """θ, the weights that are masked."""
        return cast(Tensor, self._holder.original)

    @property
    def mask(self) -> Tensor:
        """m: true where the weight is kept."""
        return calculate_masks([self])[0]

    @property
    def name(self) -> str:
        """Qualified name in the pruned model."""
        return self.settings.name

    @property
    def rank_by(self) -> RankBy:
        """What is ranked: the score or its magnitude."""
        return self.settings.rank_by

    @property
    def is_existing(self) -> bool:
        """Whether the weights are those that the model had before it was pruned. They never change."""
        return self.settings.weight_distribution == distributions.EXISTING

    @property
    def distribution(self) -> distributions.Distribution:
        """D_param. Existing weights have none."""
        return distributions.get_distribution(self.settings.weight_distribution)

    @property
    def unit(self) -> float:
        """The value of level 1 of the weights."""
        return self.settings.unit32(self.distribution)

    @property
    def is_standard(self) -> bool:
        """Whether the masked weights are θ ⊙ m with a mask of {0, 1} from the cut alone, as in the paper."""
        return self.settings.is_standard

    @property
    def coats(self) -> int:
        """How many nested masks there are."""
        return self.settings.coats

    @property
    def key(self) -> philox.Key:
        """The tensor's key of the generator."""
        return self.settings.key

    @property
    def origin(self) -> tuple[int, int, int, float]:
        """Where the weights come from, as kernels read it: key, kind and unit of the distribution."""
        return *self.key, self.distribution.kind or 0, self.unit

    @property
    def rounds(self) -> int:
        """How often the pruned weights were randomized. The R of the theory counts draws, which is one more."""
        return self.history.rounds

    @property
    def floor_count(self) -> int:
        """How many weights a global ranking must leave to this tensor."""
        return floor_count(self.score.numel(), self.settings.floor)

    def match_layout_(self, weight: Tensor) -> None:
        """Give scores and draws the memory format of the weights, so that a kernel reads all of them in order."""
        self.score.data = torch.empty_like(weight.detach()).copy_(self.score.detach())
        self.draw = torch.empty_like(weight.detach(), dtype=self.draw.dtype).copy_(self.draw)

    def hold_draws_up_to(self, number: int) -> None:
        """Widen the integers that hold the draws, if they are too small for this number."""
        if number > torch.iinfo(self.draw.dtype).max:
            self.draw = self.draw.to(next(dtype for dtype in _DRAWS if number <= torch.iinfo(dtype).max))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **options: Any) -> None:
        score = state_dict.get(prefix + "score")
        if isinstance(score, Tensor) and score.shape != self.score.shape:
            # torch will refuse the scores and draws, so what belongs to them stays, too.
            state_dict = state_dict | {f"{prefix}kept": self.kept, f"{prefix}_extra_state": self.get_extra_state()}
        loaded = state_dict.get(prefix + "draw")
        if isinstance(loaded, Tensor):
            self.hold_draws_up_to(torch.iinfo(loaded.dtype).max)
        super()._load_from_state_dict(state_dict, prefix, *args, **options)

    def follow_source_(self) -> None:
        """Take over rounds and settings of the draws that something has copied into this copy of a tensor."""
        if self._copied_from is None or self.mark.is_meta or int(self.mark) == self.history.mark:
            return
        self.settings = self.history.follow(int(self.mark)) or self.settings
        source = self._copied_from()
        if source is not None and source.history.mark == self.history.mark:
            draw = source.draw.to(self.draw.device)
            if torch.equal(draw.to(self.draw.dtype), self.draw):
                self.draw = draw.clone()  # whose numbers may not fit the integers of a copy

    def _save_to_state_dict(self, *args: Any, **options: Any) -> None:
        self.follow_source_()
        super()._save_to_state_dict(*args, **options)

    def add_round(self, threshold: int) -> None:
        """Note a round of randomization with this coin."""
        self.history.add(threshold, self.settings)
        self.mark.fill_(self.history.mark)

    def set_history_(self, runs: Runs) -> None:
        """Replace the rounds so far; settings and draws must be set, too."""
        self.history.replace(runs, self.settings)
        self.mark.fill_(self.history.mark)

    @torch.no_grad()
    def weight(self) -> Tensor:
        """θ in float32, computed from the draws alone."""
        draw = self.draw.reshape(-1)
        index = torch.arange(draw.numel(), device=draw.device)
        values = draw_weights(self.settings, self.distribution, index, draw, draw.numel())
        return self.clear_padding_(values.view(self.draw.shape))

    @property
    def padding_size(self) -> int:
        """How many weights the padding row has."""
        return 0 if self.padding is None else self.draw[self.padding].numel()

    def clear_padding_(self, tensor: Tensor) -> Tensor:
        """Set the padding row of weights or of a mask to zero, in place; gives the tensor."""
        if self.padding is not None:
            tensor[self.padding] = 0
        return tensor

    def get_extra_state(self) -> Tensor:
        """Settings, history and iteration counts as JSON in bytes: a tensor, so that any safe format can hold it.

        Spaces fill it up: torch.distributed.checkpoint only loads a tensor into one of the same size.
        """
        more = {"iterations": save_counts(self.iterations)} if self.iterations else {}
        return self.description(multiple_of=_STATE_BYTES, **more)

    def description(self, multiple_of: int = 1, **more: Any) -> Tensor:
        """Settings and history, which with scores, draws and the number kept determine the masked weights."""
        text = json.dumps({"settings": asdict(self.settings), "history": self.history.runs, **more})
        filled = text.ljust(-(-len(text) // multiple_of) * multiple_of)
        return torch.frombuffer(bytearray(filled.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Become what the state says: its weights were drawn under these settings.

        Other settings than those of ``prune_`` are taken over with a warning. To load a state into a model that was
        pruned with another seed is normal, since scores, draws and weights come with it, but a script with another
        sparsity than the run it resumes is a mistake that should be seen. Another ranking is refused.
        """
        loaded = json.loads(bytes(state.cpu().tolist()))
        settings = Settings(**loaded["settings"])
        if settings.ranking != self.settings.ranking:
            raise ValueError(
                f"{self.settings.name!r} is ranked per {self.settings.ranking}, the state per {settings.ranking}; "
                f"prune_ as the saved model was: ranking={settings.ranking!r}, or a sparsity of its own in overrides"
            )
        if settings.mask != self.settings.mask and {settings.mask, self.settings.mask} & {"bernoulli", "gem_miner"}:
            raise ValueError(
                f"{self.settings.name!r} has a mask that is {self.settings.mask}, the state one that is "
                f"{settings.mask}, with another state; prune_ with mask={settings.mask!r}"
            )
        ours, theirs = asdict(self.settings), asdict(settings)
        others = [field for field in theirs if theirs[field] != ours[field] and field not in ("name", "redraw_from")]
        if others:
            # Without the name of the layer: Python shows a warning once, and not once for each layer.
            warnings.warn(
                f"the state has {', '.join(f'{field}={theirs[field]!r}' for field in others)}, and this model was "
                f"pruned with {', '.join(f'{field}={ours[field]!r}' for field in others)}; the state's settings are "
                "used, so prune_ with them if you resume this run",
                stacklevel=2,
            )
        rounds = sum(count for _, count in loaded["history"])
        if rounds > torch.iinfo(self.draw.dtype).max:
            raise ValueError(
                f"{self.settings.name!r} was randomized {rounds} times, but its draws are loaded as {self.draw.dtype}, "
                "to which torch.distributed.checkpoint cuts them in a new model; load what dcp_to_torch_save of "
                "torch.distributed.checkpoint.format_utils makes of the checkpoint"
            )
        self.settings = settings
        self.set_history_([(threshold, count) for threshold, count in loaded["history"]])
        load_counts(self.iterations, loaded.get("iterations", {}))

    def __getstate__(self) -> Any:
        # For copies. AveragedModel copies a model before anything else, so this is when it can be refused.
        self.follow_source_()
        state = super().__getstate__() | {"_copied_from": weakref.ref(self)}  # type: ignore[no-untyped-call]
        frame = sys._getframe().f_back
        while frame is not None:
            if frame.f_code is AveragedModel.__init__.__code__:
                if frame.f_locals["use_buffers"]:
                    raise ValueError(
                        "use_buffers=True would average random weights and their draws; set use_buffers=False, and if "
                        "the model has batch norms, call torch.optim.swa_utils.update_bn"
                    )
                # Draws of any number of rounds will be copied into these.
                state["_buffers"] = state["_buffers"] | {"draw": self.draw.to(_DRAWS[-1])}
            frame = frame.f_back
        return state

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Scores stay float32 and every tensor stays in the order of its indices, whatever .to() asks of the weights.
        score, gradient = self.score.data, self.score.grad
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = self.score.device
        if self.score.dtype != torch.float32:
            self.score.grad = None
            self.score.data = score.to(device)
            self.score.grad = None if gradient is None else gradient.to(device, torch.float32)
        self.score.data = self.score.data.contiguous()
        self.draw = self.draw.contiguous()
        return self

    def extra_repr(self) -> str:
        """One line for print(model)."""
        settings = self.settings
        words = [settings.weight_distribution, f"sparsity={settings.sparsity}", f"ranking={settings.ranking}"]
        words += [f"gain={settings.gain:g}"] if settings.gain != 1 else []
        words += [f"mask={settings.mask}"] if settings.mask != "binary" else []
        words += [f"coats={settings.coats}"] if settings.coats > 1 else []
        words += ["binarize=True"] if settings.binarize else []
        return ", ".join(words)


def _is_recomputing() -> bool:
    """Whether a backward pass is running, as where gradient checkpointing repeats a forward pass."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


@torch.no_grad()
def calculate_masks(masks: Sequence[MaskedParametrization], *, limited: bool = True) -> list[Tensor]:
    """The masks m of several tensors; those ranked together are cut once.

    Without ``limited`` a mask of GEM-Miner is that of the cut alone, without the rounding of scores.
    """
    cuts = _find_cuts(masks)
    if limited:
        cuts = {mask: mask_kinds.limit(mask.settings.mask, cut, mask.score.numel()) for mask, cut in cuts.items()}
    return [reference.mask_of(mask.ranked(), cut) for mask, cut in cuts.items()]


@torch.no_grad()
def calculate_multipliers(masks: Sequence[MaskedParametrization]) -> list[Tensor]:
    """What the weights of several tensors are multiplied by in eval mode, as int8: 0 where they are pruned."""
    coats = [_find_cuts(masks, coat) for coat in range(max(mask.coats for mask in masks))]
    return [mask.multipliers([found[mask] for found in coats if mask in found]) for mask in masks]


def _find_cuts(masks: Sequence[MaskedParametrization], coat: int = 0) -> dict[MaskedParametrization, Cut]:
    """The cuts of one coat, in the order of the masks that have it."""
    masks = [mask for mask in masks if coat < mask.coats]
    cuts: dict[MaskedParametrization, Cut] = {}
    for mask in masks:
        if mask.score.device.type != "cpu" and mask.score.isnan().any():  # on a CPU finding the cut raises
            raise reference.nan_error(mask.settings.name)
        if mask not in cuts:
            group = [other for other in masks if other.ranking is mask.ranking]
            cuts |= zip(group, mask.ranking.cuts(group, coat))
    return {mask: cuts[mask] for mask in masks}
