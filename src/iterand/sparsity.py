"""How much is pruned: allocation of a sparsity over layers, and schedule over time. Plain arithmetic."""

import itertools
import math
from collections.abc import Mapping, Sequence

from iterand import selection

ALLOCATIONS = ("uniform", "erk")
SCHEDULES = ("constant", "linear", "cubic")


def allocate(shapes: Mapping[str, Sequence[int]], sparsity: float, allocation: str = "uniform") -> dict[str, float]:
    """The sparsity of every layer, so that the network as a whole has this one.

    ``uniform``: the same everywhere (the paper). ``erk``: Erdős-Rényi-Kernel (Evci et al., 2020), density in
    proportion to Σ dims / Π dims, so that small layers keep more; a layer that would keep more than all is dense.
    """
    if allocation not in ALLOCATIONS:
        raise ValueError(f"allocation is {allocation!r}; it must be one of {', '.join(ALLOCATIONS)}")
    if allocation == "uniform":
        return dict.fromkeys(shapes, sparsity)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    weight = {name: sum(shape) / max(sizes[name], 1) for name, shape in shapes.items()}
    dense: set[str] = set()
    budget = (1 - sparsity) * sum(sizes.values())
    while True:
        free = budget - sum(sizes[name] for name in dense)
        share = sum(weight[name] * sizes[name] for name in shapes if name not in dense)
        factor = free / share if share else 0.0
        full = {name for name in shapes if name not in dense and factor * weight[name] >= 1}
        if not full:
            break
        dense |= full
    return {name: 0.0 if name in dense else min(1.0, max(0.0, 1 - factor * weight[name])) for name in shapes}


def split_kept(sizes: Sequence[int], sparsity: float) -> list[int]:
    """Shares of the kept weights for layers ranked together; they add up to exactly n − round(p·n) of all n."""
    totals = [selection.kept_count(end, sparsity) for end in itertools.accumulate(sizes)]
    return [total - before for total, before in zip(totals, [0, *totals])]


def progress(schedule: str, done: float) -> float:
    """How much of the way to the final sparsity is gone when this share of the steps is done."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}; it must be one of {', '.join(SCHEDULES)}")
    done = min(max(done, 0.0), 1.0)
    if schedule == "linear":
        return done
    if schedule == "cubic":
        return 1 - (1 - done) ** 3
    return 1.0
