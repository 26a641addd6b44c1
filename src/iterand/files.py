"""Writing files whole or not at all, and locks between processes."""

import contextlib
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_STALE = 3600.0  # seconds in which a writer that is alive writes something


def atomic_write(path: str | os.PathLike[str], data: bytes | bytearray | memoryview) -> None:
    """Write ``data`` beside ``path``, force it to the disk, and give it its name.

    Folders that are missing are made; a link is followed, so that it keeps pointing where it did.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the name of a file")
    if target.exists() and not target.is_file():  # a device or a pipe, which the new file would replace
        raise OSError(f"{path} is not a regular file; give the name of one")
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            remove_unfinished(target, before=os.fstat(file.fileno()).st_mtime - _STALE)  # by the file system's clock
            file.write(data)
            file.flush()
            Path(beside).chmod(_mode(target))
            os.fsync(file.fileno())
        Path(beside).replace(target)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def remove_unfinished(path: str | os.PathLike[str], *, before: float = math.inf) -> None:
    """Remove what writers of ``path`` left beside it when they were killed, if it was last changed ``before`` then.

    Without a time only for one who knows that nobody else writes this file now.
    """
    target = Path(os.path.realpath(path))
    unfinished = re.compile(rf"\.{re.escape(target.name)}\.[a-z0-9_]{{8}}\.part")
    try:
        found = [entry for entry in target.parent.iterdir() if unfinished.fullmatch(entry.name)]
    except OSError:  # a folder that may be written to, but not looked into
        return
    for entry in found:
        with contextlib.suppress(OSError):  # another removes it too
            if entry.stat().st_mtime < before:
                entry.unlink()


def _mode(target: Path) -> int:
    """The rights of the file that is replaced, or those an ordinary new file would get."""
    try:
        return target.stat().st_mode & 0o777
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask


def _sync_folder(folder: Path) -> None:
    # The new name lives in the folder; a file system that cannot sync one has nothing to add.
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


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
