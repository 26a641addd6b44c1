"""How a run of several ranks ends when something goes wrong: every rank ends, and one of them says why."""

import hashlib
import signal
import threading
import time

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from iterand.errors import IterandError

_GRACE = 3.0  # seconds a rank has to say what happened to it; torchrun gives the others 30


class AlreadySaid(IterandError):
    """Another rank says what went wrong; this one only has to end."""


def farewell(store: Store, number: int, count: int, error: Exception) -> Exception:
    """What this rank should raise in place of an error, so that it is said once.

    The store is torchrun's, so that it is there whoever is gone.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the others once one has ended: we are ending
    try:
        if _is_lost_contact(error):
            return _name_the_lost(store, number, count, error)
        said = f"said/{hashlib.sha256(str(error).encode()).hexdigest()}"
        store.set(f"ended/{number}", "with an error of its own")
        if number == 0:
            store.set(said, "")
        elif _wait_for(store, [said]):  # the same error as on the first rank
            return AlreadySaid()
    except dist.DistError:
        return IterandError(f"rank {number} lost contact with torchrun, which was killed; start the same command again")
    if number == 0 or not isinstance(error, IterandError | ValueError | OSError):
        return error
    return IterandError(f"rank {number}: {error}")


def _is_lost_contact(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _name_the_lost(store: Store, number: int, count: int, error: Exception) -> Exception:
    """The ranks that neither reported an error nor noticed one are those that are gone."""
    store.set(f"ended/{number}", "")
    _wait_for(store, [f"ended/{rank}" for rank in range(count)])
    ended = [rank for rank in range(count) if store.check([f"ended/{rank}"])]
    if any(store.get(f"ended/{rank}") for rank in ended) or number != min(ended):
        return AlreadySaid()
    gone = [rank for rank in range(count) if rank not in ended]
    what = f"the ranks lost contact with each other ({str(error).splitlines()[0]})"
    if gone:
        names = f"rank {gone[0]}" if len(gone) == 1 else f"ranks {', '.join(map(str, gone))}"
        what = f"{names} ended without a word: killed, out of memory, or cut off"
    return IterandError(
        f"{what}; start the same command again, or give torchrun --max-restarts: it goes on from the last checkpoint"
    )


def _wait_for(store: Store, keys: list[str]) -> bool:
    deadline = time.monotonic() + _GRACE
    while not (found := all(store.check([key]) for key in keys)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found
