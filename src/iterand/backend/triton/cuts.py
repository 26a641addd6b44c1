"""``FindCuts``: the cuts of all layers at once, on the device, without a host sync.

Thresholds change little from step to step. So the scores near the previous threshold (a bracket) are collected and
ranked, two launches (``bracket``). If the cut is not among them, radix selection finds it (``radix_select``); its
launches return at once otherwise.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from iterand.backend.triton.bracket import collect, compare
from iterand.backend.triton.layers import (
    BLOCK,
    COLUMNS,
    EXACT,
    Layers,
    addresses,
    cached,
    launching_on,
    pointers,
    to_device_async,
)
from iterand.backend.triton.radix_select import count_digits, finish

CANDIDATES = 8192
"""Maximum number of scores inside a bracket."""
_WANTED = 512  # target number of scores inside a bracket
_AFTER_MISS = 4  # multiple of _WANTED after a miss, when the drift of the threshold is unknown
_PARTS = 4  # blocks per program of ``collect``
_TILE = 32  # candidates per program of ``compare``
_OTHERS = 128  # candidates that these are compared with per step
_DIGITS = 2048  # values of an 11-bit digit
_ROUNDS = 6  # rounds of radix selection: three digits of the key, three of the index
_PROGRAMS = 528  # programs per round


class FindCuts:
    """``reference.find_cuts`` for all layers, without floors: each layer ranked separately, or all together.

    ``scores`` are float32. ``kept`` has a 0-dimensional int64 tensor for each of them; with ``together``, their sum
    counts. ``before`` are cuts whose kept scores rank first. The results are in ``thresholds`` and ``lasts``: a ``Cut``
    for each layer. Only the addresses of the tensors are stored, so the caller must keep the tensors alive.
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
        self._positions = torch.empty(self._groups, CANDIDATES, dtype=torch.int64, device=device)
        self._digits = torch.zeros(self._groups, _ROUNDS, _DIGITS, dtype=torch.int32, device=device)

    def run(self) -> None:
        """Find the cuts of the current scores."""
        with launching_on(self.layers.device):
            self._find()

    def _find(self) -> None:
        layers, before = self.layers, self._before
        inputs = (layers.block_layer, layers.table, self.scores, self._members)
        first = (before.thresholds, before.lasts) if before else (self.thresholds, self.lasts)
        options = {"BLOCK": BLOCK, "MAGNITUDE": self.magnitude, "FIRST": before is not None, **EXACT}
        collect[(self._wide.blocks,)](
            self._wide.block_layer, self._wide.table, *inputs[2:], *first, self._ranges, self._bracket, self._numbers,
            self._keys, self._positions, CANDIDATES=CANDIDATES, PARTS=_PARTS, **options,
        )  # fmt: skip
        results = (self.thresholds, self.lasts)
        compare[(self._groups, CANDIDATES // _TILE)](
            self._wide.block_layer, self._wide.table, self._members, self._ranges, self._kept, self._bracket,
            self._numbers, self._any_failed, self._keys, self._positions, *results,
            CANDIDATES=CANDIDATES, WANTED=_WANTED, TILE=_TILE, OTHERS=_OTHERS, BLOCK=BLOCK * _PARTS,
            num_warps=8, **EXACT,
        )  # fmt: skip
        programs = min(_PROGRAMS, layers.blocks)
        for number in range(_ROUNDS):
            count_digits[(programs,)](
                *inputs, *first, self._ranges, self._kept, self._numbers, self._any_failed, self._digits,
                layers.blocks, number, INDICES=number >= 3, ROUNDS=_ROUNDS, DIGITS=_DIGITS, **options,
            )  # fmt: skip
        finish[(self._groups,)](
            self._members, self._ranges, self._kept, self._bracket, self._numbers, self._any_failed, self._digits,
            *results, ROUNDS=_ROUNDS, DIGITS=_DIGITS, WANTED=_AFTER_MISS * _WANTED, CANDIDATES=CANDIDATES, **EXACT,
        )  # fmt: skip


class _FindCutsAboveFloors(FindCuts):
    """``reference.cut_together`` with floors: layers ranked together, each keeping at least its floor."""

    def __init__(self, scores: Sequence[Tensor], kept: Sequence[Tensor], floors: Sequence[int], **options: Any) -> None:
        self._floors = to_device_async(torch.tensor(floors), scores[0].device)
        self._floor_cuts = FindCuts(scores, self._floors.unbind(), **options)
        super().__init__(scores, kept, together=True, before=self._floor_cuts, **options)

    def run(self) -> None:
        """Find the cut of each floor, then the cut of all layers, and take the wider of the two."""
        self._floor_cuts.run()
        super().run()
        floor, both = self._floor_cuts, (self.thresholds, self.lasts)
        wider = (floor.thresholds < both[0]) | ((floor.thresholds == both[0]) & (floor.lasts > both[1]))
        both[0].copy_(torch.where(wider, floor.thresholds, both[0]))
        both[1].copy_(torch.where(wider, floor.lasts, both[1]))


def prepare(
    scores: Sequence[Tensor],
    kept: Sequence[Tensor],
    *,
    together: bool = False,
    floors: Sequence[int] = (),
    magnitude: bool = False,
) -> FindCuts:
    """The operation for these tensors, cached by their addresses."""

    def make() -> FindCuts:
        if together and any(floors):
            return _FindCutsAboveFloors(scores, kept, floors, magnitude=magnitude)
        return FindCuts(scores, kept, together=together, magnitude=magnitude)

    key = (together, magnitude, tuple(floors) if together else (), *addresses(scores), *addresses(kept))
    return cached(key, make)
