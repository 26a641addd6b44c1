"""How many workers may decode at the same time."""

import os

from iterand.errors import DataError

VARIABLE = "ITERAND_WORKERS"


def chosen_workers(given: int | None) -> int | None:
    """The given number of worker processes, else $ITERAND_WORKERS; none if neither says one."""
    text = os.environ.get(VARIABLE)
    if given is not None or not text:
        return given
    if not text.isascii() or not text.isdigit():
        raise DataError(f"${VARIABLE} is {text!r}; it is a number of worker processes, or 0 for threads")
    return int(text)


def processors() -> int:
    """How many processors this process may use; those of a machine are shared by the ranks torchrun starts on it."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, here // max(1, int(ranks))) if ranks.isdigit() else here
