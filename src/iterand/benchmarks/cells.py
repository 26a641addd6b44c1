"""The rows of a table as text, for a terminal or for Markdown; they are read from the record."""

from collections.abc import Mapping, Sequence
from typing import Any

from iterand.benchmarks.table import FAILED
from iterand.experiments.report.formatting import size

NOTE = "note"


def columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns that some row has a value for, in order; remarks come last."""
    found = {name: None for row in rows for name, value in row.items() if value is not None}
    remarks = [name for name in (NOTE, FAILED) if name in found]
    return [name for name in found if name not in remarks] + remarks


def heading(column: str) -> str:
    """A column's name for people."""
    return column.removesuffix("_bytes").replace("_", " ")


def is_number(value: Any) -> bool:
    """Whether a cell is set to the right."""
    return isinstance(value, (int, float, Mapping)) and not isinstance(value, bool)


def cell(column: str, value: Any) -> str:
    """A value for people: of a spread the median, and the 10th to the 90th percentile behind it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return f"{_number(value['median'])} ({_number(value['p10'])}–{_number(value['p90'])})"
    if column.endswith("_bytes"):
        return size(value)
    if isinstance(value, float):
        return _number(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _number(value: float) -> str:
    """Four digits that count, and no power of ten."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{3 if value >= 1 else 4}f}" if value < 10 else f"{value:.{2 if value < 100 else 1}f}"
