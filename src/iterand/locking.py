"""A lock between processes: a file that one of them holds at a time."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def locked(path: Path, refusal: Exception) -> Iterator[None]:
    """Hold the lock file ``path``; raise ``refusal`` if another process does.

    The lock ends with the process, however that ends. The file is removed at the end of the block.
    """
    file = _held(path, refusal)
    try:
        yield
    finally:
        if sys.platform == "win32":  # which removes no file that is open, here or in another process
            file.close()
            _remove(path)
        else:
            _remove(path)
            file.close()


def _held(path: Path, refusal: Exception) -> IO[bytes]:
    while True:
        file = path.open("ab")
        try:
            _take(file)
            if _is_at(file, path):
                return file
        except BlockingIOError:
            file.close()
            raise refusal from None
        except BaseException:
            file.close()
            raise
        file.close()


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Whether the file still has this name: the process that held it before may have removed it."""
    try:
        return sys.platform == "win32" or os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _take(file: IO[bytes]) -> None:
    if sys.platform == "win32":
        import msvcrt

        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            raise BlockingIOError(*error.args) from None
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
