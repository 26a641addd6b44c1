"""The rounds of randomization that the draws of a masked tensor come from.

A ticket stores draws together with these rounds. ``AveragedModel`` copies the draws of a model into a copy of it, but
only buffers. So a tensor and its copies share the rounds of all of them, as branches, and one more buffer, the mark,
says which rounds of which branch the draws come from.
"""

from dataclasses import dataclass
from typing import Any

from iterand.settings import Settings

Runs = list[tuple[int, int]]
"""Rounds, run-length coded: (coin threshold of a round, how many rounds in a row had it)."""

_ROUNDS = 1 << 32
"""A mark is the number of a branch times this, plus a number of rounds."""


@dataclass
class _Branch:
    """The rounds of one tensor. It begins another branch when it loads a state, and a copy when it is randomized."""

    settings: Settings
    runs: Runs


class BranchedHistory:
    """The rounds of a masked tensor so far. A copy begins with those of the original."""

    def __init__(self, settings: Settings) -> None:
        self.runs: Runs = []
        self.mark = 0
        self._branches = [_Branch(settings, self.runs)]  # also those of all copies
        self._is_own = True  # whether the branch of the mark grows with this history

    def __deepcopy__(self, memo: dict[int, Any]) -> "BranchedHistory":
        copied = BranchedHistory.__new__(BranchedHistory)
        copied.runs, copied.mark = list(self.runs), self.mark
        copied._branches, copied._is_own = self._branches, False
        return copied

    @property
    def rounds(self) -> int:
        """How many rounds there were."""
        return sum(count for _, count in self.runs)

    def add(self, threshold: int, settings: Settings) -> None:
        """Add a round with this coin, under these settings."""
        if not self._is_own:
            self.replace(self.runs, settings)
        if self.runs and self.runs[-1][0] == threshold:
            self.runs[-1] = (threshold, self.runs[-1][1] + 1)
        else:
            self.runs.append((threshold, 1))
        self._branches[self.mark // _ROUNDS].settings = settings
        self.mark += 1

    def replace(self, runs: Runs, settings: Settings) -> None:
        """Begin another branch, with these rounds so far."""
        self.runs = list(runs)
        self.mark = len(self._branches) * _ROUNDS + self.rounds
        self._branches.append(_Branch(settings, self.runs))
        self._is_own = True

    def follow(self, mark: int) -> Settings | None:
        """Become the history of draws with this mark. Returns their settings, or None if the branch is unknown."""
        branch, rounds = divmod(mark, _ROUNDS)
        if branch >= len(self._branches):
            return None
        self.runs = _first(self._branches[branch].runs, rounds)
        self.mark, self._is_own = mark, False
        return self._branches[branch].settings


def _first(runs: Runs, rounds: int) -> Runs:
    """The first of these rounds."""
    found = []
    for threshold, count in runs:
        if rounds > 0:
            found.append((threshold, min(count, rounds)))
        rounds -= count
    return found
