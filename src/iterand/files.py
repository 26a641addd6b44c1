"""Write a file so that a crash leaves the old one or the new one, never half of either."""

import contextlib
import math
import os
import re
import tempfile
from pathlib import Path

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
