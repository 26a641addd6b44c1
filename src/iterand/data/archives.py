"""The files inside a folder or a tar archive; nothing is ever unpacked to the disk."""

import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from iterand.errors import DataError


def members(path: Path, patterns: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Name and content of every file that matches one of the patterns, such as ``train/pos/*.txt``.

    The name has as many parts as its pattern: what an archive calls its outermost folder does not matter.
    """
    found = _in_folder(path, patterns) if path.is_dir() else _in_tar(path, patterns)
    try:
        yield from found
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise damaged(path, error) from None
    except OSError as error:
        raise damaged(path, error) if error.errno is None else unreadable(path, error) from None


def damaged(path: Path, error: Exception) -> DataError:
    """The error for a file that is cut short or changed."""
    return DataError(f"{path} is cut short or damaged ({error}); remove it and fetch it again")


def unreadable(path: Path, error: OSError) -> DataError:
    """The error for a file the system will not give."""
    return DataError(f"cannot read {error.filename or path}: {error.strerror or error}")


def _in_folder(folder: Path, patterns: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    for pattern in patterns:
        for file in sorted(folder.glob(pattern)):
            if _wanted(PurePosixPath(file), pattern):
                yield file.relative_to(folder).as_posix(), file.read_bytes()


def _in_tar(path: Path, patterns: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(path, "r|*") as archive:
        for member in archive:
            name = PurePosixPath(member.name)
            pattern = next((pattern for pattern in patterns if _wanted(name, pattern)), None)
            content = archive.extractfile(member) if pattern and member.isfile() else None
            if pattern and content:
                yield "/".join(name.parts[-len(PurePosixPath(pattern).parts) :]), content.read()


def _wanted(name: PurePosixPath, pattern: str) -> bool:
    return name.match(pattern) and not name.name.startswith(".")  # some systems put shadow files beside real ones
