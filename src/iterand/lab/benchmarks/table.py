"""Options of benchmarks, and the tables of their results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from iterand.errors import first_line
from iterand.lab.benchmarks.timing import Spread, forget
from iterand.lab.report.formatting import size


@dataclass(frozen=True)
class Options:
    """What to measure, and on which device; empty options mean the defaults of each benchmark."""

    device: torch.device
    networks: tuple[str, ...] = ()
    executions: tuple[str, ...] = ()
    batch_size: int | None = None
    precision: str | None = None
    repeats: int | None = None
    sizes: tuple[int, ...] = ()
    examples: int | None = None
    data_dir: Path | None = None
    short: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def little(self) -> bool:
        """Whether to measure small networks only."""
        return self.short and not self.on_gpu

    @property
    def batch(self) -> int:
        """Examples in a step."""
        return self.batch_size or (32 if self.little else 128)

    @property
    def settings(self) -> tuple[str, ...]:
        """Batch size and precision for a recipe; float32 on CPUs, where bfloat16 is slow."""
        precision = self.precision or (None if self.on_gpu else "float32")
        return (f"batch_size={self.batch}", *([f"precision={precision}"] if precision else []))

    def count(self, *, gpu: int, cpu: int, short: int) -> int:
        """How often to measure."""
        return self.repeats or (short if self.short else gpu if self.on_gpu else cpu)


Row = dict[str, Any]
"""Names, numbers, and a ``Spread`` for each value measured several times."""

FAILED = "failed"
"""The column for the reason why a row has no numbers."""

NOTE = "note"
"""The column for remarks."""

Notify = Callable[[str], None]
"""Called with a line that says what is being measured."""


@dataclass
class Table:
    """The result of one benchmark."""

    name: str
    notes: list[str]
    rows: list[Row] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The table as plain values for JSON."""
        rows = [
            {name: asdict(value) if isinstance(value, Spread) else value for name, value in row.items()}
            for row in self.rows
        ]
        return {"notes": self.notes, "rows": rows}


def attempt(row: Row, work: Callable[[], Row], device: torch.device) -> Row:
    """The row with what the work measured, or with the reason why it failed; the other rows are still measured."""
    try:
        return row | work()
    except Exception as error:  # out of memory, or whatever a compiler or a driver may raise
        return row | {FAILED: first_line(error)}
    finally:
        forget(device)


def columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns with a value in some row, in order; remarks come last."""
    found = {name: None for row in rows for name, value in row.items() if value is not None}
    remarks = [name for name in (NOTE, FAILED) if name in found]
    return [name for name in found if name not in remarks] + remarks


def heading(column: str) -> str:
    """The heading of a column in a printed table."""
    return column.removesuffix("_bytes").replace("_", " ")


def is_number(value: Any) -> bool:
    """Whether a value is aligned to the right."""
    return isinstance(value, (int, float, Mapping)) and not isinstance(value, bool)


def cell(column: str, value: Any) -> str:
    """A value in a printed table; a spread is its median with the 10th to the 90th percentile."""
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
    """About four significant digits, without a power of ten."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{3 if value >= 1 else 4}f}" if value < 10 else f"{value:.{2 if value < 100 else 1}f}"
