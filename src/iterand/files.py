"""Atomic writes (``atomic_write``), new folders (``new_folder``), the cache (``user_cache``), locks (``locked``)."""

import errno
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

# Atomic writes.

_STALE = 3600.0  # seconds after which a temporary file is taken to be left by a killed process


def atomic_write(path: str | os.PathLike[str], data: bytes | bytearray | memoryview) -> None:
    """Write ``data`` to a temporary file in the same folder, sync it to disk, and rename it to ``path``.

    Creates missing folders. A symbolic link is followed and kept. Errors name ``path``, not the temporary file.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the name of a file")
    if target.exists() and not target.is_file():  # a device or a pipe, which the rename would replace
        raise OSError(f"{path} is not a regular file; give the name of one")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _errors_name(path):
        _write(target, data)
    _sync_folder(target.parent)


def _write(target: Path, data: bytes | bytearray | memoryview) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            remove_unfinished(target, before=os.fstat(file.fileno()).st_mtime - _STALE)  # clock of the file system
            file.write(data)
            file.flush()
            Path(temporary).chmod(_permissions(target))
            os.fsync(file.fileno())
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def _errors_name(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let errors of the operating system in this block name ``path``."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def remove_unfinished(path: str | os.PathLike[str], *, before: float = math.inf) -> None:
    """Remove temporary files of killed writers of ``path``, if last modified earlier than ``before``.

    Without ``before``, no other process may be writing ``path``.
    """
    target = Path(os.path.realpath(path))
    unfinished = re.compile(rf"\.{re.escape(target.name)}\.[a-z0-9_]{{8}}\.part")
    try:
        found = [entry for entry in target.parent.iterdir() if unfinished.fullmatch(entry.name)]
    except OSError:  # write permission without read permission
        return
    for entry in found:
        with suppress(OSError):  # removed by another process meanwhile
            if entry.stat().st_mtime < before:
                entry.unlink()


def _permissions(target: Path) -> int:
    """The permissions of the existing file, or those of a new file under the umask."""
    try:
        return target.stat().st_mode & 0o777
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask


def _sync_folder(folder: Path) -> None:
    # The rename is durable once the folder is synced. Some file systems cannot sync folders.
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# Folders.


@contextmanager
def new_folder(path: Path) -> Iterator[None]:
    """Create a folder and its parents where they are missing; after the block, remove those of them that are empty."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for folder in missing:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def require_writable(folder: Path) -> None:
    """Raise an OSError that names the folder if no file can be created in it; nothing is left there."""
    with new_folder(folder), _errors_name(folder), tempfile.TemporaryFile(dir=folder):
        pass


def concerns(error: OSError, path: Path) -> bool:
    """Whether an error of the operating system is about ``path`` or a file in it.

    An error that names no file is of one that is open for writing, or of tempfile, which finds no folder.
    """
    if error.filename is None:
        return error.errno != errno.ENOENT
    named = Path(os.fsdecode(error.filename)).absolute()
    return path.absolute() in (named, *named.parents)


def user_cache() -> Path | None:
    """The folder of this package among the caches of the user; None if the user has no home."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return base / "iterand" if base.is_absolute() else None


# Lock files.


@contextmanager
def locked(path: Path, refusal: Exception) -> Iterator[None]:
    """Hold the lock file ``path`` during the block. Raises ``refusal`` if another process holds it.

    The operating system releases the lock when the process ends, even if killed. The file is removed after the block.
    """
    file = _acquire(path, refusal)
    try:
        yield
    finally:
        if sys.platform == "win32":  # Windows cannot remove an open file
            file.close()
            _remove(path)
        else:
            _remove(path)
            file.close()


def _acquire(path: Path, refusal: Exception) -> IO[bytes]:
    while True:
        file = path.open("ab")
        try:
            _try_lock(file)
            if _is_same_file(file, path):
                return file
        except BlockingIOError:
            file.close()
            raise refusal from None
        except BaseException:
            file.close()
            raise
        file.close()


def _try_lock(file: IO[bytes]) -> None:
    if sys.platform == "win32":
        import msvcrt

        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            raise BlockingIOError(*error.args) from None
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_same_file(file: IO[bytes], path: Path) -> bool:
    """Whether the open file is still the one at ``path``: the previous holder may have removed it."""
    try:
        return sys.platform == "win32" or os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
