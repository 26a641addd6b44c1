"""Callbacks for Lightning and Hugging Face's Trainer, and tickets on the Hugging Face Hub.

Each module needs the extra of its name, such as ``pip install 'iterand[lightning]'``.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from torch import nn

from iterand.masking import prune_
from iterand.randomization import IterativeRandomization, Stepper, recommended_steppers
from iterand.surgery import MaskedLayer, masked_layers

MakeSteppers = Callable[[nn.Module, int], Iterable[Stepper]]
"""Makes the steppers of a model for this many optimizer steps."""


class Search:
    """What the callbacks of all trainers do: prune the model once, then step after every optimizer step.

    Iteration counts are in the state dict of the model, which trainers save and load, so there is no other state.
    """

    def __init__(
        self, sparsity: float | Mapping[str, float | str] | None, steppers: MakeSteppers | None, options: dict[str, Any]
    ) -> None:
        if sparsity is None and options:
            raise ValueError(f"{', '.join(options)}: options of prune_, which needs a sparsity; give sparsity=, too")
        if steppers is not None and not callable(steppers):
            raise ValueError(
                f"steppers is {steppers!r}; it must be a function of the model and the number of steps that gives "
                "steppers"
            )
        self.sparsity, self.options = sparsity, options
        self.steppers: list[Stepper] = []
        self._make_steppers = steppers
        self._pruned: nn.Module | None = None
        self._stepped: nn.Module | None = None

    def prune(self, model: nn.Module) -> None:
        """Prune the model, if a sparsity was given and it was not done yet."""
        if self.sparsity is None or model is self._pruned:
            return
        for name in masked_layers(model):
            raise ValueError(f"{name!r} is masked already; leave out sparsity= to search further, or give a new model")
        prune_(model, self.sparsity, **self.options)
        # Every rank draws the same weights, so DistributedDataParallel need not broadcast them before each pass.
        masked = [name for name, _ in model.named_buffers() if ".parametrizations." in f".{name}"]
        model._ddp_params_and_buffers_to_ignore = cast(Any, masked)
        self._pruned = model

    def require_masked(self, model: nn.Module) -> dict[str, MaskedLayer]:
        """The masked tensors of the model, which must have some."""
        layers = masked_layers(model)
        if not layers:
            raise ValueError(
                f"{type(model).__name__} has no masked layer; give the callback sparsity=, or call prune_ on it first"
            )
        return layers

    def begin(self, model: nn.Module, count_steps: Callable[[], float]) -> None:
        """Make the steppers; a model that is trained further keeps its own. Steps are counted only if needed."""
        if model is self._stepped:
            return
        layers = self.require_masked(model).values()
        if self._make_steppers is None and any(one.parametrization.settings.mask == "gem_miner" for one in layers):
            raise ValueError("masks of GEM-Miner need ScoreFreezing and a schedule; give the callback steppers=")
        recommended = self.options.get("preset") == "recommended"
        if self._make_steppers is None and not recommended:
            existing = any(layer.parametrization.is_existing for layer in layers)
            self.steppers = [] if existing else [IterativeRandomization(model)]
        else:
            steps = count_steps()
            if not 1 <= steps < math.inf:
                raise ValueError(f"the trainer runs for {steps} steps, which says nothing; give it max_steps")
            make = self._make_steppers or (lambda model, steps: recommended_steppers(model, steps=steps))
            self.steppers = list(make(model, int(steps)))
        self._stepped = model

    def step(self) -> None:
        """Count one optimizer step."""
        for stepper in self.steppers:
            stepper.step()
