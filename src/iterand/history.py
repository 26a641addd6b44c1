"""The rounds of randomization that the draws of a masked tensor have gone through.

A ticket stores draws by the rounds that they come from. ``AveragedModel`` copies the draws of a model into a
copy of it, as buffers, and nothing else. So a tensor and its copies share the rounds of all of them, and one more
buffer, the mark, says which of these rounds draws come from.
"""

from dataclasses import dataclass, field
from typing import Any

from iterand.settings import Settings

Runs = list[tuple[int, int]]
"""Rounds, run-length coded: (coin threshold of a round, how many rounds in a row had it)."""

_ROUNDS = 1 << 32
"""Marks are the number of a course times this, plus the number of its rounds so far."""


@dataclass
class _Course:
    """What one tensor went through until it took another course: by going back to a saved state, say."""

    settings: Settings
    runs: Runs = field(default_factory=list)


class History:
    """The rounds of a masked tensor so far; a copy begins with those of the original and then has its own."""

    def __init__(self, settings: Settings) -> None:
        self.runs: Runs = []
        self.mark = 0
        """Which course the rounds are of, and how many of it."""
        self._courses = [_Course(settings, self.runs)]
        self._is_own = True  # the course that the mark is of

    def __deepcopy__(self, memo: dict[int, Any]) -> "History":
        copied = History.__new__(History)
        copied.runs, copied.mark = list(self.runs), self.mark
        copied._courses, copied._is_own = self._courses, False
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
        course = self.mark // _ROUNDS
        self._courses[course].settings = settings
        self.mark = course * _ROUNDS + self.rounds

    def replace(self, runs: Runs, settings: Settings) -> None:
        """Begin another course, with these rounds so far."""
        self.runs = list(runs)
        self.mark = len(self._courses) * _ROUNDS + self.rounds
        self._courses.append(_Course(settings, self.runs))
        self._is_own = True

    def follow(self, mark: int) -> Settings | None:
        """Become the history of draws with this mark. Gives their settings, or None if no relative has this course."""
        course, rounds = divmod(mark, _ROUNDS)
        if course >= len(self._courses):
            return None
        self.runs = _first(self._courses[course].runs, rounds)
        self.mark, self._is_own = mark, False
        return self._courses[course].settings


def _first(runs: Runs, rounds: int) -> Runs:
    found = []
    for threshold, count in runs:
        if rounds > 0:
            found.append((threshold, min(count, rounds)))
        rounds -= count
    return found
