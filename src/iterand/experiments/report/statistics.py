"""Mean and deviation over runs, and how far a mean is from the paper's."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from iterand.experiments.experiment import PaperNumber

LIMIT = 2
"""How many deviations two means may be apart and still be called the same."""

Verdict = Literal["same", "above", "below", "unknown"]


@dataclass(frozen=True)
class Summary:
    """What several runs measured."""

    n: int
    mean: float
    std: float | None
    """The standard deviation of a sample (divided by n − 1), as the paper's; none for a single run."""


@dataclass(frozen=True)
class Comparison:
    """Our mean against the paper's."""

    difference: float
    deviation: float | None
    """How far single runs spread: the root mean square of our deviation and the paper's, or the one that is known."""
    verdict: Verdict


def summarize(values: Sequence[float]) -> Summary | None:
    """Mean ± standard deviation; nothing for no runs."""
    if not values:
        return None
    return Summary(len(values), statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def compare(ours: Summary, paper: PaperNumber) -> Comparison:
    """The difference, and whether it is within two deviations."""
    difference = ours.mean - paper.mean
    known = [std for std in (ours.std, paper.std) if std is not None]
    if not known:
        return Comparison(difference, None, "unknown")
    deviation = math.sqrt(statistics.fmean(std * std for std in known))
    if abs(difference) <= LIMIT * deviation:
        return Comparison(difference, deviation, "same")
    return Comparison(difference, deviation, "above" if difference > 0 else "below")
