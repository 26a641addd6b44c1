"""Finding the cuts of all layers at once on the device, without a host sync."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from iterand.backend.triton.bracket import collect, compare
from iterand.backend.triton.layers import (
    BLOCK,
    COLUMNS,
    EXACT,
    MISSES,
    Layers,
    addresses,
    launching_on,
    pointers,
    remembered,
    to_device_async,
)
from iterand.backend.triton.radix_select import count_digits, settle

CANDIDATES = 8192
"""How many scores may lie in a bracket."""
_WANTED = 512  # scores that a bracket is made for
_AT_FIRST = 4  # times as many after a miss, when it is not known how far thresholds go
_PARTS = 4  # blocks that a program counts at a time
_TILE = 32  # candidates that a program compares with all, so many at a time:
_OTHERS = 128
_DIGITS = 2048
_ROUNDS = 6
_PROGRAMS = 528  # of a round that usually has nothing to do


class FindCuts:
    """The cuts of several tensors of scores (float32): each on its own, or all ranked as one.

    ``kept`` are 0-dimensional tensors, one for each tensor of scores; of tensors ranked as one their sum counts. Only
    the addresses of the tensors are kept here, so the caller must keep the tensors alive.
    ``thresholds`` and ``lasts`` hold the result: the numbers of a ``Cut`` for every tensor.
    """

    def __init__(
        self,
        scores: Sequence[Tensor],
        kept: Sequence[Tensor],
        *,
        together: bool = False,
        magnitude: bool = False,
        before: "FindCuts | None" = None,
    ) -> None:
        layers = Layers(scores)
        device, count = layers.device, len(scores)
        self.layers = layers
        self._wide = Layers(scores, BLOCK * _PARTS)
        self.scores, self._kept = pointers(scores), pointers(kept)
        self.thresholds = torch.zeros(count, dtype=torch.float32, device=device)
        self.lasts = torch.zeros(count, dtype=torch.int64, device=device)
        self.magnitude = magnitude
        self._before = before
        sizes = [sum(layers.sizes)] if together else layers.sizes
        ranges = [(0, count)] if together else [(i, 1) for i in range(count)]
        offsets = [sum(layers.sizes[:i]) if together else 0 for i in range(count)]
        group = [0] * count if together else list(range(count))
        self._members = to_device_async(torch.tensor(list(zip(group, offsets))), device)
        self._ranges = to_device_async(torch.tensor(ranges), device)
        self._groups = len(sizes)
        widths = [torch.inf if size <= _WANTED else 0.0 for size in sizes]
        self._bracket = to_device_async(torch.tensor([(0.0, width, torch.nan, 0.0) for width in widths]), device)
        self._numbers = torch.zeros(self._groups, int(COLUMNS.value), dtype=torch.int64, device=device)
        self._any_failed = torch.zeros(1, dtype=torch.int32, device=device)
        self._keys = torch.empty(self._groups, CANDIDATES, dtype=torch.int32, device=device)
        self._places = torch.empty(self._groups, CANDIDATES, dtype=torch.int64, device=device)
        self._digits = torch.zeros(self._groups, _ROUNDS, _DIGITS, dtype=torch.int32, device=device)

    def run(self) -> None:
        """Find the cuts of the scores as they are now."""
        with launching_on(self.layers.device):
            self._find()

    def _find(self) -> None:
        layers, before = self.layers, self._before
        places = (layers.owner, layers.table, self.scores, self._members)
        first = (before.thresholds, before.lasts) if before else (self.thresholds, self.lasts)
        options = {"BLOCK": BLOCK, "MAGNITUDE": self.magnitude, "FIRST": before is not None, **EXACT}
        collect[(self._wide.blocks,)](
            self._wide.owner, self._wide.table, *places[2:], *first, self._ranges, self._bracket, self._numbers,
            self._keys, self._places, CANDIDATES=CANDIDATES, PARTS=_PARTS, **options,
        )  # fmt: skip
        results = (self.thresholds, self.lasts)
        compare[(self._groups, CANDIDATES // _TILE)](
            self._wide.owner, self._wide.table, self._members, self._ranges, self._kept, self._bracket, self._numbers,
            self._any_failed, self._keys, self._places, *results,
            CANDIDATES=CANDIDATES, WANTED=_WANTED, TILE=_TILE, OTHERS=_OTHERS, BLOCK=BLOCK * _PARTS,
            num_warps=8, **EXACT,
        )  # fmt: skip
        programs = min(_PROGRAMS, layers.blocks)
        for number in range(_ROUNDS):
            count_digits[(programs,)](
                *places, *first, self._ranges, self._kept, self._numbers, self._any_failed, self._digits,
                layers.blocks, number, INDICES=number >= 3, ROUNDS=_ROUNDS, DIGITS=_DIGITS, **options,
            )  # fmt: skip
        settle[(self._groups,)](
            self._members, self._ranges, self._kept, self._bracket, self._numbers, self._any_failed, self._digits,
            *results, ROUNDS=_ROUNDS, DIGITS=_DIGITS, WANTED=_AT_FIRST * _WANTED, CANDIDATES=CANDIDATES, **EXACT,
        )  # fmt: skip

    def misses(self) -> Tensor:
        """How often, for every group, the cut was not in the bracket."""
        return self._numbers[:, int(MISSES.value)]


class _FindCutsAboveFloors(FindCuts):
    """Tensors ranked as one, each keeping at least its floor (``reference.cut_together``)."""

    def __init__(self, scores: Sequence[Tensor], kept: Sequence[Tensor], floors: Sequence[int], **options: Any) -> None:
        self._counts = to_device_async(torch.tensor(floors), scores[0].device)
        self._own = FindCuts(scores, self._counts.unbind(), **options)
        super().__init__(scores, kept, together=True, before=self._own, **options)

    def run(self) -> None:
        """Find each tensor's floor, then the cut of all, and take the wider of both."""
        self._own.run()
        super().run()
        own, both = self._own, (self.thresholds, self.lasts)
        wider = (own.thresholds < both[0]) | ((own.thresholds == both[0]) & (own.lasts > both[1]))
        both[0].copy_(torch.where(wider, own.thresholds, both[0]))
        both[1].copy_(torch.where(wider, own.lasts, both[1]))


def prepare(
    scores: Sequence[Tensor],
    kept: Sequence[Tensor],
    *,
    together: bool = False,
    floors: Sequence[int] = (),
    magnitude: bool = False,
) -> FindCuts:
    """The operation on these tensors, made once and used again for the same addresses in memory."""

    def make() -> FindCuts:
        if together and any(floors):
            return _FindCutsAboveFloors(scores, kept, floors, magnitude=magnitude)
        return FindCuts(scores, kept, together=together, magnitude=magnitude)

    key = (together, magnitude, tuple(floors) if together else (), *addresses(scores), *addresses(kept))
    return remembered(key, make)
