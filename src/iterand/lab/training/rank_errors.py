"""Errors of a run of several ranks: every rank ends, and one of them reports it."""

import hashlib
import signal
import threading
import time

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from iterand.errors import IterandError, first_line

_GRACE_SECONDS = 3.0  # that a rank has to report its error; torchrun gives the others 30


class ReportedByOtherRank(IterandError):
    """Another rank reports the error; this one only has to end."""


def error_to_raise(store: Store, number: int, count: int, error: Exception) -> Exception:
    """What this rank should raise in place of an error, so that it is reported once.

    The store belongs to torchrun, so it outlives any rank.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends all ranks once one has ended; this one is ending
    try:
        if _is_lost_contact(error):
            return _name_the_lost(store, number, count, error)
        reported = f"reported/{hashlib.sha256(str(error).encode()).hexdigest()}"
        store.set(f"ended/{number}", "with an error of its own")
        if number == 0:
            store.set(reported, "")
        elif _wait_for(store, [reported]):  # the same error as on the first rank
            return ReportedByOtherRank()
    except dist.DistError:
        return IterandError(f"rank {number} lost contact with torchrun, which was killed; start the same command again")
    if number == 0 or not isinstance(error, IterandError | ValueError | OSError):
        return error
    return IterandError(f"rank {number}: {error}")


def _is_lost_contact(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _name_the_lost(store: Store, number: int, count: int, error: Exception) -> Exception:
    """The ranks that neither reported an error nor noticed one are lost."""
    store.set(f"ended/{number}", "")
    _wait_for(store, [f"ended/{rank}" for rank in range(count)])
    ended = [rank for rank in range(count) if store.check([f"ended/{rank}"])]
    if any(store.get(f"ended/{rank}") for rank in ended) or number != min(ended):
        return ReportedByOtherRank()
    lost = [rank for rank in range(count) if rank not in ended]
    what = f"the ranks lost contact with each other ({first_line(error)})"
    if lost:
        names = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))}"
        what = f"{names} ended without a word: killed, out of memory, or cut off"
    return IterandError(
        f"{what}; start the same command again, or give torchrun --max-restarts: it resumes from the last checkpoint"
    )


def _wait_for(store: Store, keys: list[str]) -> bool:
    deadline = time.monotonic() + _GRACE_SECONDS
    while not (found := all(store.check([key]) for key in keys)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found
