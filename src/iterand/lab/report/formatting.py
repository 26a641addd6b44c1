"""Means, standard deviations and comparisons with the paper, and how numbers are written."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from iterand.lab.experiments.experiment import PaperNumber

LIMIT = 2
"""How many deviations apart two means may be to count as the same."""
Verdict = Literal["same", "above", "below", "unknown"]
VERDICTS = {"same": "as the paper", "above": "above", "below": "below", "unknown": "no deviation"}
SHARING_MARKS = {"cpu": "", "unknown": "?", "shared": "shared"}
"""The marks beside times of runs that shared their GPU, or whose records do not say."""

_AXES = {
    "width": "width ρ",
    "period": "Kₚₑᵣ",
    "rate": "r",
    "sparsity": "sparsity p",
}


@dataclass(frozen=True)
class Summary:
    """The measurements of several runs."""

    n: int
    mean: float
    std: float | None
    """The sample standard deviation (divided by n − 1), as in the paper; None for a single run."""


def summarize(values: Sequence[float]) -> Summary | None:
    """Mean and standard deviation; None for no runs."""
    if not values:
        return None
    return Summary(len(values), statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True)
class Comparison:
    """Our mean against the paper's."""

    difference: float
    deviation: float | None
    """The spread of single runs: the root mean square of our deviation and the paper's, or the one that is known."""
    verdict: Verdict


def compare(ours: Summary, paper: PaperNumber) -> Comparison:
    """The difference of the means, and whether it is within two deviations."""
    difference = ours.mean - paper.mean
    known = [std for std in (ours.std, paper.std) if std is not None]
    if not known:
        return Comparison(difference, None, "unknown")
    deviation = math.sqrt(statistics.fmean(std * std for std in known))
    if abs(difference) <= LIMIT * deviation:
        return Comparison(difference, deviation, "same")
    return Comparison(difference, deviation, "above" if difference > 0 else "below")


def axis(name: str) -> str:
    """An axis of a table or a plot, with the paper's symbol."""
    return _AXES.get(name, name)


def value(entry: str | float) -> str:
    """A position on an axis."""
    return entry if isinstance(entry, str) else f"{entry:g}"


def plus_minus(mean: float, std: float | None) -> str:
    """``92.61 ± 0.17``, or the mean alone."""
    return f"{mean:.2f}" + ("" if std is None else f" ± {std:.2f}")


def ours(summary: Summary | None) -> str:
    """Our result with its number of runs."""
    return "open" if summary is None else f"{plus_minus(summary.mean, summary.std)} (n = {summary.n})"


def difference(comparison: Comparison) -> str:
    """The difference to the paper, with its sign."""
    return f"{comparison.difference:+.2f}".replace("-", "−")


def duration(seconds: float) -> str:
    """A time span."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def span(dates: Sequence[str]) -> str:
    """The first and the last of some dates in order."""
    return dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"


def size(count: float) -> str:
    """A number of bytes."""
    if count < 1000:
        return f"{count:.0f} B"
    return f"{count / 1e3:.1f} kB" if count < 1e6 else f"{count / 1e6:.2f} MB"


def count(number: float) -> str:
    """A number of parameters, as the paper writes it."""
    return f"{number / 1e6:.2f}M" if number >= 1e6 else f"{number / 1e3:.1f}k" if number >= 1e3 else f"{number:g}"


def machine(environment: Mapping[str, Any]) -> str:
    """The name of the GPU or CPU of a run."""
    hardware = environment.get("hardware")
    hardware = hardware if isinstance(hardware, dict) else {}
    return str(hardware.get("gpu") or hardware.get("cpu") or environment.get("device") or "unknown")
