"""The sparsity over time, as a stepper."""

from typing import Any

from torch import nn

from iterand import sparsity as sparsities
from iterand.checks import check_int
from iterand.masking import require_masked_layers, require_whole_rankings, set_kept_
from iterand.selection import check_sparsity


class SparsitySchedule:
    """Raise the sparsity from ``start`` to its final value over ``steps`` steps; call ``step()`` once an iteration.

    ``linear``, or ``cubic`` (Zhu and Gupta, 2017: fast first, slow at the end). Each layer goes as far as its own
    final sparsity. A global ranking has one sparsity, so all its layers must be in the model.
    """

    def __init__(self, model: nn.Module, schedule: str = "cubic", *, steps: int, start: float = 0.0) -> None:
        sparsities.progress(schedule, 0)
        layers = require_masked_layers(model)
        require_whole_rankings(model, layers)
        self.model = model
        self._masks = [layer.parametrization for layer in layers.values()]
        self.schedule = schedule
        self.steps = check_int("steps", steps, "a number of iterations, at least 1", low=1)
        self.start = check_sparsity(start, "start")
        self.iteration = 0
        self._apply()

    @property
    def final(self) -> float:
        """The highest final sparsity of any layer; a state that the model loads may bring another."""
        return max(mask.settings.sparsity for mask in self._masks)

    def step(self) -> None:
        """Count one iteration and set the sparsity it calls for."""
        self.iteration += 1
        if self.iteration <= self.steps:
            self._apply()

    def state_dict(self) -> dict[str, Any]:
        """The count of iterations."""
        return {"iteration": self.iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.iteration = int(state["iteration"])
        self._apply()

    def _apply(self) -> None:
        gone = sparsities.progress(self.schedule, self.iteration / self.steps)
        final = self.final
        start = min(self.start, final)
        between = start * (1 - gone) + final * gone
        set_kept_(self._masks, min(max(between, start), final))  # rounding may lead out of the interval
