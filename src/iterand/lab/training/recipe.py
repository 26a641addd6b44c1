"""A recipe: all settings that decide the result of a run, as frozen dataclasses."""

import json
import math
from dataclasses import Field, dataclass, field, fields
from typing import Any, get_args

from iterand import distributions, mask_kinds, randomization
from iterand import sparsity as sparsities
from iterand.backend import RankBy
from iterand.checks import shown
from iterand.errors import RecipeError
from iterand.lab.data import AUGMENTATIONS, IMAGE_FOLDER, LARGEST_IMAGE, NORMALIZATIONS, SMALLEST_IMAGE
from iterand.lab.networks import require_known
from iterand.lab.networks.external import EXTERNAL_FORMS, is_external
from iterand.planning import LARGEST_GAIN
from iterand.selection import RankingChoice

METHODS = ("sgd", "edge_popup", "iterand", "imp")
LEARNING_RATES = ("constant", "cosine", "multi_step", "warmup_cosine")
PRECISIONS = ("float32", "bfloat16")
SCALES = ("full", "tiny")


_LARGEST_COUNT = (1 << 31) - 1
_LARGEST_RATE = 1e30  # a float32 holds it
_STEPS = "learning_rate.schedule", ("multi_step",)
_WARMUP = "learning_rate.schedule", ("warmup_cosine",)
_RISING = "method.sparsity_schedule", tuple(name for name in sparsities.SCHEDULES if name != "constant")


# ``only_for`` names another key and the values of it with which this one is read.
def _count(default: int, low: int, high: int = _LARGEST_COUNT, **more: Any) -> Any:
    return field(default=default, metadata={"low": low, "high": high, **more})


def _number(default: float, low: float, high: float, **more: Any) -> Any:
    return field(default=default, metadata={"low": low, "high": high, **more})


def _choice(default: str, *choices: str) -> Any:
    return field(default=default, metadata={"choices": choices})


class Arguments(dict[str, Any]):
    """A table of plain values; it is never changed, so it can be hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True))


@dataclass(frozen=True)
class DataRecipe:
    """The data set, and how it is prepared."""

    name: str = "digits"
    """Data set: digits, cifar10, imagenet or imdb; image_folder for your own images."""
    path: str = ""
    """For ``image_folder``: the folder of the images, relative to the recipe's file."""
    image_size: int = _count(64, SMALLEST_IMAGE, LARGEST_IMAGE)
    """For ``image_folder``: the side of the square to which images are resized."""
    sha256: str = ""
    """For ``image_folder``: digest of the names and sizes of all images, which ``iterand train`` fills in."""
    augmentation: str = _choice("none", *AUGMENTATIONS)
    """How training images are augmented."""
    normalization: str = _choice("default", *NORMALIZATIONS)
    """The data set by whose mean and standard deviation pixels are normalized."""
    limit: int = _count(0, 0)
    """The number of examples that are used of each split; 0 for all."""
    train_limit: int = _count(0, 0)
    """The number of training examples that are used; 0 for all."""
    drop_last: bool = True
    """Leave out the last batch of an epoch if it is smaller."""

    @property
    def unused(self) -> tuple[str, ...]:
        """The keys that are for your own images, if these are others."""
        return () if self.name == IMAGE_FOLDER else ("path", "image_size", "sha256")

    def __post_init__(self) -> None:
        for key in self.unused:
            if getattr(self, key) != getattr(type(self), key):
                raise RecipeError(
                    f"data.{key} is for data.name = '{IMAGE_FOLDER}', but data.name is {shown(self.name)}; leave it out"
                )


@dataclass(frozen=True)
class NetworkRecipe:
    """The network."""

    name: str = "digits_conv"
    """Network of the package, or one of yours: ``timm:NAME``, ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``."""
    width_factor: float = _number(1.0, 1e-6, 1e12)
    """ρ: multiplies the number of channels."""
    classes: int = _count(0, 0)
    """Number of outputs; 0 takes it from the data."""
    vocabulary_size: int = _count(0, 0)
    """For an LSTM: number of words, with the unknown one and padding; 0 takes it from the data."""
    forget_bias: float = _number(0.0, -1000, 1000)
    """For an LSTM: the initial bias of its forget gates, which stays where weights are not trained."""
    word_scale: float = _number(1.0, 1e-6, 1e4)
    """For an LSTM: the factor by which word embeddings are multiplied."""
    arguments: Arguments = field(default_factory=Arguments)
    """For your own network: further arguments by name."""
    sha256: str = ""
    """For a network from a file or module: its digest, which ``iterand train`` fills in."""

    @property
    def unused(self) -> tuple[str, ...]:
        """The keys that are for a network of yours, if it is one of the package."""
        return () if is_external(self.name) else ("arguments", "sha256")

    def __post_init__(self) -> None:
        for key in self.unused:
            if getattr(self, key):
                try:
                    require_known(self.name)
                except ValueError as error:
                    raise RecipeError(str(error)) from None
                raise RecipeError(
                    f"network.{key} is for a network of yours, {EXTERNAL_FORMS}, but network.name is "
                    f"{shown(self.name)}; leave it out"
                )


@dataclass(frozen=True)
class MethodRecipe:
    """The method: which weights (ranking), how many (sparsity), from what (distributions), when (randomization)."""

    name: str = _choice("iterand", *METHODS)
    """``sgd`` and ``imp`` train weights; ``edge_popup`` and ``iterand`` search for a mask."""
    sparsity: float = _number(0.5, 0, 1)
    """p: share of weights that are pruned."""
    weight_distribution: str = "kaiming_uniform"
    """D_param: distribution of the weights."""
    gain: float = _number(1.0, 0, LARGEST_GAIN)
    """What the weights are multiplied by, for networks without norms; 0 for (1 − p)^(−1/4)."""
    score_distribution: str = "kaiming_uniform"
    """D_score: distribution of the initial scores."""
    ranking: str = _choice("layer", *get_args(RankingChoice))
    """Scores compete within their layer or over the whole network."""
    rank_by: str = _choice("score", *get_args(RankBy))
    """Rank raw scores or their magnitude."""
    mask: str = _choice("binary", *mask_kinds.MASK_KINDS)
    """What a weight is multiplied by: 0 or 1, or more (``prune_``). ``multicoat`` needs ``coats``, and ``gem_miner``
    a ``score_distribution`` of ``unit_uniform``."""
    coats: int = _count(1, 1, mask_kinds.MAX_COATS)
    """For a ``multicoat`` mask: how many masks are added."""
    binarize: bool = False
    """Give the kept weights of a layer one magnitude, the mean of theirs (biprop)."""
    share: tuple[str, ...] = ()
    """Patterns: the layers that one of them names have the same random weights."""
    include: tuple[str, ...] = ()
    """For searches: patterns of the parameters that are masked, also of those outside of known layers. Empty: the
    weights of all known layers."""
    exclude: tuple[str, ...] = ()
    """For searches: patterns of parameters that stay as they are built. A ticket stores them in full."""
    allocation: str = _choice("uniform", *sparsities.ALLOCATIONS)
    """How the sparsity is spread over layers that are ranked one by one."""
    floor: float = _number(0.0, 0, 1)
    """With global ranking, the share of its weights that every layer keeps."""
    norms: str = _choice("fixed", "fixed", "shifted", "keep")
    """For searches: what batch norms add to normalized values: nothing, a random bias that is masked like a weight, or
    what they learn."""
    train_norms: bool = True
    """For ``sgd`` and ``imp``: whether norms learn a scale and a shift, beside the weights."""
    sparsity_schedule: str = _choice("constant", *sparsities.SCHEDULES)
    """How the sparsity rises from 0 to its final value."""
    sparsity_schedule_share: float = _number(0.5, 1e-6, 1, only_for=_RISING)
    """The share of the iterations over which the sparsity rises."""
    period: int = _count(300, 1)
    """K_per: iterations between rounds of randomization."""
    late_rounds: bool = True
    """Whether weights are redrawn in the last ``period`` iterations, too, as in the paper. In short searches, false is
    often better: what is redrawn last has little time to be learned."""
    rate: float = _number(0.1, 0, 1)
    """r: probability with which a candidate is redrawn in a round."""
    candidates: str = _choice("pruned", *randomization.CANDIDATES)
    """Redraw all pruned weights, or only those with a negative score."""
    redrawn_scores: str = _choice("stay", *randomization.REDRAWN_SCORES)
    """Keep the score of a redrawn weight, or flip its sign when the weight's sign flips."""
    redraw_from: str = _choice("fresh", *randomization.REDRAW_FROM)
    """Give redrawn weights fresh values, or those of kept weights (weight recycling)."""
    freezing_period: int = _count(300, 1, only_for=("method.mask", ("gem_miner",)))
    """For ``gem_miner`` masks: iterations between the times at which pruned weights are frozen."""
    rounds: int = _count(3, 1, only_for=("method.name", ("imp",)))
    """For ``imp``: how many times weights are pruned and the others rewound."""

    @property
    def trains_weights(self) -> bool:
        """Whether weights are trained; other methods only mask and redraw them."""
        return self.name in ("sgd", "imp")

    def __post_init__(self) -> None:
        for key in ("weight_distribution", "score_distribution"):
            try:
                distributions.get_distribution(getattr(self, key))
            except ValueError as error:
                raise RecipeError(f"method.{key}: {error}") from None
        try:
            mask_kinds.check_kind(self.mask, self.coats)
        except ValueError as error:
            raise RecipeError(f"method.{error}") from None
        if not self.trains_weights:
            self._check_search()

    def _check_search(self) -> None:
        """Refuse what does not go with a search, or with the kind of its mask."""
        if not self.train_norms:
            raise RecipeError(
                f"method.train_norms is for sgd and imp, but method.name is {self.name!r}; set method.norms instead"
            )
        if self.mask == "multicoat" and self.coats == 1:
            raise RecipeError("method.mask is 'multicoat', but method.coats is 1; set it to the number of coats")
        if self.mask == "gem_miner" and self.score_distribution != "unit_uniform":
            raise RecipeError(
                f"method.mask is 'gem_miner', which rounds scores between 0 and 1, but method.score_distribution is "
                f"{self.score_distribution!r}; set it to 'unit_uniform'"
            )
        if self.mask == "bernoulli" and self.sparsity_schedule != "constant":
            raise RecipeError(
                f"method.mask is 'bernoulli', which samples by scores alone, but method.sparsity_schedule is "
                f"{self.sparsity_schedule!r}; set it to 'constant'"
            )
        reason = mask_kinds.why_signs_say_nothing(self.mask, self.rank_by)
        reads_signs = self.candidates == "negative" or self.redrawn_scores == "follow"
        if self.name == "iterand" and reads_signs and reason:
            raise RecipeError(
                f"method.{reason}, where the sign of a score says nothing about that of its weight; set "
                "method.candidates to 'pruned' and method.redrawn_scores to 'stay'"
            )


@dataclass(frozen=True)
class OptimizerRecipe:
    """SGD with momentum and weight decay, on scores or weights."""

    momentum: float = _number(0.9, 0, 1)
    """Momentum of SGD."""
    weight_decay: float = _number(5e-4, 0, _LARGEST_RATE)
    """Weight decay, of scores or weights."""


@dataclass(frozen=True)
class LearningRateRecipe:
    """The learning rate η over epochs (Appendix B)."""

    initial: float = _number(0.1, 0, _LARGEST_RATE)
    """Learning rate at the start, or after the warm-up."""
    schedule: str = _choice("cosine", *LEARNING_RATES)
    """How it changes, once per epoch."""
    milestones: tuple[int, ...] = field(default=(), metadata={"low": 0, "high": _LARGEST_COUNT, "only_for": _STEPS})
    """For ``multi_step``: the epochs at which the rate is multiplied by ``factor``."""
    factor: float = _number(0.1, 0, _LARGEST_RATE, only_for=_STEPS)
    """For ``multi_step``: the factor."""
    warmup_epochs: int = _count(5, 0, only_for=_WARMUP)
    """For ``warmup_cosine``: epochs of linear warm-up."""
    final_epochs: int = _count(5, 0, only_for=_WARMUP)
    """For ``warmup_cosine``: epochs at the end with the rate ``final``."""
    final: float = _number(1e-5, 0, _LARGEST_RATE, only_for=_WARMUP)
    """For ``warmup_cosine``: the rate of the last ``final_epochs``."""

    def __post_init__(self) -> None:
        if self.schedule == "multi_step" and self.factor > 1 and self.initial > 0:
            most = math.log(self.initial) + len(self.milestones) * math.log(self.factor)
            if most > math.log(_LARGEST_RATE):
                raise RecipeError(
                    f"learning_rate.factor is {self.factor:g}; at {len(self.milestones)} milestones it makes the rate "
                    f"larger than {_LARGEST_RATE:g}, so lower it"
                )


@dataclass(frozen=True)
class TrainingRecipe:
    """Epochs, batches, precision, loss, and which epoch is tested."""

    epochs: int = _count(10, 1)
    """Number of epochs, all rounds of ``imp`` together."""
    batch_size: int = _count(64, 1)
    """Examples per step, over all ranks."""
    precision: str = _choice("float32", *PRECISIONS)
    """Type of the forward and backward pass; weights and scores are float32."""
    channels_last: bool = False
    """Memory format of images and convolutions."""
    norm_statistics: str = _choice("running", "running", "recomputed", "recomputed_half")
    """For batch norms: running averages, or recomputed for the final network, in half precision for small tickets."""
    label_smoothing: float = _number(0.0, 0, 1)
    """The share of a label that is spread over all classes, in training."""
    temperature: float = _number(1.0, 1e-3, 1e3)
    """Outputs are divided by it before the loss, in training; below 1 it helps networks with few weights."""
    teacher: str = ""
    """Distillation: the run folder or ticket of a network whose outputs are learned beside the labels."""
    teacher_weight: float = _number(0.5, 0, 1)
    """With a teacher: its share of the loss."""
    teacher_temperature: float = _number(1.0, 1e-3, 1e3)
    """With a teacher: outputs of both networks are divided by it before they are compared."""
    teacher_sha256: str = ""
    """Digest of the teacher's checkpoint or ticket. ``iterand train`` fills it in, so that a run does not change
    teachers."""
    select_epoch: str = _choice("last", "last", "best_validation")
    """Which epoch's network is tested and saved: the last, or the one with the lowest validation loss."""
    threads: int = _count(0, 0, 1024)
    """Threads on a CPU, on which floating-point sums depend; 0 for torch's default."""

    @property
    def unused(self) -> tuple[str, ...]:
        """The keys that are for a teacher, if there is none."""
        return () if self.teacher else ("teacher", "teacher_weight", "teacher_temperature", "teacher_sha256")

    def __post_init__(self) -> None:
        for key in self.unused:
            if getattr(self, key) != getattr(type(self), key):
                raise RecipeError(f"training.{key} is for a teacher, but training.teacher is missing; leave it out")

    @property
    def recomputes_norms(self) -> bool:
        """Whether batch-norm statistics are recomputed at the end."""
        return self.norm_statistics != "running"


@dataclass(frozen=True)
class Recipe:
    """A whole recipe."""

    name: str = "unnamed"
    """Name of the recipe and of its run folders."""
    description: str = ""
    """One line for ``iterand recipes``."""
    seed: int = _count(0, 0, (1 << 63) - 1)
    """Decides weights, scores, what is redrawn, the order of examples and augmentation."""
    scale: str = _choice("full", *SCALES)
    """``tiny`` marks a dry run, whose results mean nothing."""
    data: DataRecipe = field(default_factory=DataRecipe)
    network: NetworkRecipe = field(default_factory=NetworkRecipe)
    method: MethodRecipe = field(default_factory=MethodRecipe)
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    learning_rate: LearningRateRecipe = field(default_factory=LearningRateRecipe)
    training: TrainingRecipe = field(default_factory=TrainingRecipe)

    @property
    def phases(self) -> int:
        """How many times the network is trained from its initial weights: once, except for ``imp``."""
        return self.method.rounds + 1 if self.method.name == "imp" else 1

    @property
    def phase_epochs(self) -> int:
        """The epochs of each phase; ``training.epochs`` is their sum."""
        return self.training.epochs // self.phases

    def __post_init__(self) -> None:
        rate, epochs = self.learning_rate, self.training.epochs
        if epochs % self.phases:
            raise RecipeError(
                f"training.epochs is {epochs}, but imp with method.rounds = {self.method.rounds} trains {self.phases} "
                f"times; make it a multiple of {self.phases}"
            )
        if self.training.select_epoch == "best_validation":
            self._check_epochs_comparable()
        if rate.schedule == "warmup_cosine" and rate.warmup_epochs + rate.final_epochs >= self.phase_epochs:
            raise RecipeError(
                f"learning_rate.warmup_epochs and final_epochs take {rate.warmup_epochs + rate.final_epochs} epochs, "
                f"training.epochs is {epochs}; make training.epochs larger"
            )

    def _check_epochs_comparable(self) -> None:
        """Only epochs of the same sparsity and the same kind of batch-norm statistics can be compared by their loss."""
        reasons = {
            "method.name is 'imp'": self.method.name == "imp",
            "method.sparsity_schedule is not 'constant'": self.method.sparsity_schedule != "constant",
            f"training.norm_statistics is '{self.training.norm_statistics}'": self.training.recomputes_norms,
        }
        for reason, holds in reasons.items():
            if holds:
                raise RecipeError(
                    f"training.select_epoch is 'best_validation', but {reason}, so only the last epoch has the network "
                    "that is asked for; leave training.select_epoch at 'last'"
                )


SECTIONS: dict[str, type] = {
    "data": DataRecipe,
    "network": NetworkRecipe,
    "method": MethodRecipe,
    "optimizer": OptimizerRecipe,
    "learning_rate": LearningRateRecipe,
    "training": TrainingRecipe,
}


def recipe_keys() -> dict[str, Field[Any]]:
    """All dotted keys of a recipe, with their fields."""
    found = {entry.name: entry for entry in fields(Recipe) if entry.name not in SECTIONS}
    for name, section in SECTIONS.items():
        found |= {f"{name}.{entry.name}": entry for entry in fields(section)}
    return found
