"""A file that is written beside its place, if need be in several tries, by one process at a time."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from iterand.errors import DataError

PART = ".part"


@contextlib.contextmanager
def only_one(file: IO[bytes], part: Path, doing: str) -> Iterator[None]:
    """Keep others away from the same file; the lock goes with the process, however it ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(f"{part} is being {doing} by another process; wait for it") from None
    try:
        yield
    except DataError:
        if not os.fstat(file.fileno()).st_size:
            part.unlink(missing_ok=True)
        raise


def unwritable(part: Path, error: OSError) -> DataError:
    """The error for a file the system will not write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DataError(f"the disk is full while writing {part}; make room, and the same command goes on")
    return DataError(f"cannot write {part}: {error.strerror or error}")
