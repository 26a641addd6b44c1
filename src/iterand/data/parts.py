"""Which examples are in which part: the same for every run, machine and version."""

import numpy as np
import torch
from torch import Tensor


def fixed_order(count: int) -> Tensor:
    """One fixed random order of ``range(count)``.

    Sorting raw words of PCG64, since numpy keeps those for ever but may change what its permutations look like.
    """
    words = np.random.PCG64(0).random_raw(count)
    return torch.from_numpy(np.argsort(words, kind="stable"))


def limited(order: Tensor, limit: int | None) -> Tensor:
    """At most ``limit`` of these, evenly spaced: of a part sorted by class, every class has its share."""
    if limit is None or limit >= len(order):
        return order
    return order[torch.arange(limit) * len(order) // limit]
