"""Numbers and names as people read them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iterand.experiments.report.statistics import Comparison, Summary

VERDICTS = {"same": "as the paper", "above": "above", "below": "below", "unknown": "no deviation"}

_AXES = {
    "width": "width ρ",
    "period": "Kₚₑᵣ",
    "rate": "r",
    "sparsity": "sparsity p",
}


def axis(name: str) -> str:
    """An axis of a table or a plot, with the paper's symbol."""
    return _AXES.get(name, name)


def value(entry: str | float) -> str:
    """A place on an axis."""
    return entry if isinstance(entry, str) else f"{entry:g}"


def plus_minus(mean: float, std: float | None) -> str:
    """``92.61 ± 0.17``, or the mean alone."""
    return f"{mean:.2f}" + ("" if std is None else f" ± {std:.2f}")


def ours(summary: "Summary | None") -> str:
    """Our result with its number of runs."""
    return "open" if summary is None else f"{plus_minus(summary.mean, summary.std)} (n = {summary.n})"


def difference(comparison: "Comparison") -> str:
    """The difference to the paper, with its sign."""
    return f"{comparison.difference:+.2f}".replace("-", "−")


def duration(seconds: float) -> str:
    """A time span."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def size(count: float) -> str:
    """A number of bytes."""
    if count < 1000:
        return f"{count:.0f} B"
    return f"{count / 1e3:.1f} kB" if count < 1e6 else f"{count / 1e6:.2f} MB"


def count(number: float) -> str:
    """A number of parameters, as the paper writes it."""
    return f"{number / 1e6:.2f}M" if number >= 1e6 else f"{number / 1e3:.1f}k" if number >= 1e3 else f"{number:g}"


def machine(environment: Mapping[str, Any]) -> str:
    """The device that did the work."""
    hardware = environment.get("hardware")
    hardware = hardware if isinstance(hardware, dict) else {}
    return str(hardware.get("gpu") or hardware.get("cpu") or environment.get("device") or "unknown")
