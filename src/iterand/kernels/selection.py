"""The cut of all layers on the device, exact and without a wait: find it near the last one, or digit by digit.

Scores move little between two steps, so the cut lies close to where it was, or rather to where it was going. One pass
over the scores counts those above a bracket around that and collects the few inside; comparing these with each other
gives the cut. Where the counts say that the cut is not inside, it is found from the bits of the scores, eleven at a
time, and of the indices where scores are equal. Either way the cut is the same: the bracket only decides how long it
takes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from iterand.kernels.bracket import collect, compare
from iterand.kernels.digits import count_digits, settle
from iterand.kernels.layers import BLOCK, EXACT, Layers, launching_on, pointers, sent
from iterand.kernels.ranking import COLUMNS, MISSES

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


class Selection:
    """The cuts of several tensors of scores (float32): each on its own, or all ranked as one.

    ``kept`` are 0-dimensional tensors, one for each tensor of scores; of tensors ranked as one their sum counts. Only
    the addresses of the tensors are kept here, so whoever asks for cuts must keep the tensors.
    ``thresholds`` and ``lasts`` hold the result: the numbers of a ``Cut`` for every tensor.
    """

    def __init__(
        self,
        scores: Sequence[Tensor],
        kept: Sequence[Tensor],
        *,
        together: bool = False,
        magnitude: bool = False,
        before: "Selection | None" = None,
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
        self._members = sent(torch.tensor(list(zip(group, offsets))), device)
        self._ranges = sent(torch.tensor(ranges), device)
        self._groups = len(sizes)
        widths = [torch.inf if size <= _WANTED else 0.0 for size in sizes]
        self._bracket = sent(torch.tensor([(0.0, width, torch.nan, 0.0) for width in widths]), device)
        self._numbers = torch.zeros(self._groups, int(COLUMNS.value), dtype=torch.int64, device=device)
        self._any_failed = torch.zeros(1, dtype=torch.int32, device=device)
        self._keys = torch.empty(self._groups, CANDIDATES, dtype=torch.int32, device=device)
        self._places = torch.empty(self._groups, CANDIDATES, dtype=torch.int64, device=device)
        self._digits = torch.zeros(self._groups, _ROUNDS, _DIGITS, dtype=torch.int32, device=device)

    def find(self) -> None:
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
