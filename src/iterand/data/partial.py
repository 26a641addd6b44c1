"""A file that appears under its name only once it is whole, written by one process at a time."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from iterand.errors import DataError
from iterand.locking import locked

PART = ".part"


@contextlib.contextmanager
def alone(path: Path, doing: str) -> Iterator[None]:
    """Make the folder of a file and keep other processes from writing the same; ``doing`` is what is done with it."""
    taken = DataError(f"{path} is being {doing} by another process; wait for it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(f".{path.name}.lock"), taken):
            yield
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> DataError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DataError(f"the disk is full while writing {path}; make room and start the same command again")
    return DataError(f"cannot write {error.filename or path}: {error.strerror or error}")
