"""The sums of many programs, added up in an order that depends on nothing but their number."""

import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 8
"""Sums that a program adds up: 32 bytes of a row, the least that memory gives."""
_ROWS = 512  # at a time, at most


def add_up(sums: Tensor, result: Tensor) -> None:
    """The sum over the rows of a matrix."""
    parts, count = sums.shape
    _add_up[(triton.cdiv(count, COLUMNS),)](sums, result, parts, count, ROWS=rows_of(parts), COLUMNS=COLUMNS)


def rows_of(parts: int) -> int:
    """How many rows of a matrix with ``parts`` of them are added at a time."""
    return min(_ROWS, int(triton.next_power_of_2(parts)))


@triton.jit
def _add_up(sums, result, parts, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, parts, ROWS):
        part = first + tl.arange(0, ROWS)
        there = (part < parts)[:, None] & (at < count)[None, :]
        total += tl.load(sums + part[:, None] * count + at[None, :], mask=there, other=0.0)
    tl.store(result + at, tl.sum(total, 0).to(result.dtype.element_ty), mask=at < count)
