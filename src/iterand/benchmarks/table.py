"""What a benchmark hands back: rows of named values, and what to know when reading them."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from iterand.benchmarks.timing import Spread, forget

Row = dict[str, Any]
"""Names, numbers, and a ``Spread`` for everything that was measured several times."""

FAILED = "failed"
"""The column that says why a row has no numbers."""

Notify = Callable[[str], None]
"""Is told what is measured now."""


@dataclass
class Table:
    """The result of one benchmark."""

    name: str
    notes: list[str]
    rows: list[Row] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = [
            {name: asdict(value) if isinstance(value, Spread) else value for name, value in row.items()}
            for row in self.rows
        ]
        return {"notes": self.notes, "rows": rows}


def attempt(row: Row, work: Callable[[], Row], device: torch.device) -> Row:
    """The row with what the work measured, or with the reason why it could not, so that the others can go on."""
    try:
        return row | work()
    except Exception as error:  # out of memory, or whatever a compiler or a driver may raise
        return row | {FAILED: reason(error)}
    finally:
        forget(device)


def reason(error: Exception) -> str:
    """An error in a line."""
    return (str(error) or type(error).__name__).splitlines()[0]
