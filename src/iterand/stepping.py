"""The iteration counts of steppers, which are part of the model's state dict.

A stepper is called once an iteration. The masks that it steps hold its count, and save and load it with their other
state. So checkpoints of any trainer have the counts, without a hook.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

Counts = dict[str, list["IterationCount"]]
"""Kind of stepper → the counts of the steppers of this kind, in the order in which these were made."""


class IterationCount:
    """How many iterations a stepper has counted; shared by the stepper and all masks that it steps."""

    def __init__(self, value: int, stepper: object | None = None) -> None:
        self.value = value
        self._stepper = None if stepper is None else weakref.ref(stepper)

    @property
    def is_free(self) -> bool:
        """Whether it was loaded or copied and no stepper has it yet."""
        return self._stepper is None

    @property
    def is_left(self) -> bool:
        """Whether its stepper is gone."""
        return self._stepper is not None and self._stepper() is None

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return IterationCount, (self.value,)  # a copy belongs to no stepper


class Stepped(Protocol):
    """What a stepper steps: a masked tensor."""

    iterations: Counts
    """Empty without a stepper, and once it is folded."""


class CountingStepper:
    """A stepper whose count of iterations is saved and loaded with the model.

    If the model has loaded a count that no stepper of this kind has yet, the new stepper continues there. Otherwise it
    begins at 0. A count that the model loads later becomes the stepper's.
    """

    kind: str
    """The name of the count in the model's state."""

    def __init__(self, masks: Iterable[Stepped]) -> None:
        self._stepped = masks = list(masks)
        loaded = [count for mask in masks for count in mask.iterations.get(self.kind, ()) if count.is_free]
        self._count = IterationCount(loaded[0].value if loaded else 0, self)
        for mask in masks:
            counts = [count for count in mask.iterations.get(self.kind, ()) if not count.is_left]
            place = next((n for n, count in enumerate(counts) if count.is_free), len(counts))
            counts[place : place + 1] = [self._count]
            mask.iterations[self.kind] = counts

    @property
    def iteration(self) -> int:
        """How many iterations were counted."""
        return self._count.value

    @iteration.setter
    def iteration(self, value: int) -> None:
        self._count.value = value

    def _advance(self) -> None:
        """Count one iteration; refused if all masks were folded, after which nothing would change."""
        if not any(mask.iterations for mask in self._stepped):
            raise ValueError(f"the masks of this {type(self).__name__} were folded; make a new one after prune_")
        self.iteration += 1

    def state_dict(self) -> dict[str, Any]:
        """The count of iterations, which is also in the state dict of the model."""
        return {"iteration": self.iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state."""
        self.iteration = int(state["iteration"])


def save_counts(counts: Counts) -> dict[str, list[int]]:
    """The counts of the steppers that exist, as numbers; if none of a kind does any more, of those that did."""
    return {
        kind: [count.value for count in [count for count in held if not count.is_left] or held]
        for kind, held in counts.items()
    }


def load_counts(counts: Counts, saved: Mapping[str, Sequence[int]]) -> None:
    """Give saved numbers to the steppers that exist, in order, and keep the others for those made later."""
    for kind, values in saved.items():
        held = [count for count in counts.get(kind, ()) if not count.is_left]
        for count, value in zip(held, values):
            count.value = value
        counts[kind] = held + [IterationCount(value) for value in values[len(held) :]]
