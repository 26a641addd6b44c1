"""Where data sets are published, and downloading them with checksums."""

import contextlib
import errno
import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from iterand.errors import DataError, extra
from iterand.files import locked

ByteProgress = Callable[[int, int | None], None]
"""Called with the number of bytes that have arrived, and the total if the server gives it."""

PART = ".part"
"""The suffix of a file that is not complete."""

_CHUNK = 1 << 18
_RETRIES = 2


@dataclass(frozen=True)
class Archive:
    """A published file and its MD5 checksum."""

    url: str
    md5: str

    @property
    def name(self) -> str:
        """The name of the file."""
        return PurePosixPath(self.url).name


ARCHIVES = {
    "cifar10": Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
    ),
    "imdb": Archive(
        "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
        "7c2ac02c03563afcf9b574c7e56c153a",
    ),
}

INSTRUCTIONS = {
    "imagenet": "ILSVRC2012 is given to registered users of https://image-net.org only; unpack its images into {folder}"
    "/train/CLASS/ and {folder}/val/CLASS/",
    "image_folder": "these are your own images; data.path of a recipe says where they are",
    "digits": "it comes with scikit-learn: pip install 'iterand[lab]'",
}


def missing(name: str, root: Path) -> DataError:
    """The error for a data set that was not found, with how to get it."""
    if name in ARCHIVES:
        return DataError(
            f"{name} is not in {root}; download it with '{fetch_command(name, root)}', or get "
            f"{ARCHIVES[name].url} yourself and put the file there as it is"
        )
    return DataError(f"{name} is not in {root}; {instructions(name, root)}")


def fetch_command(name: str, root: Path) -> str:
    """The command that downloads a data set into this folder."""
    return f"iterand data fetch {name} --data-dir {root}"


def instructions(name: str, root: Path) -> str:
    """How to get a data set that cannot be downloaded."""
    return INSTRUCTIONS[name].format(folder=root / name)


def download(archive: Archive, folder: Path, progress: ByteProgress) -> Path:
    """Download the archive into the folder and check it; one that is there already is only checked."""
    path = folder / archive.name
    with exclusive(path, "downloaded"):
        if not path.exists():
            work = folder / f".{archive.name}{PART}"
            try:
                _fetch(archive, work, progress).replace(path)
            finally:
                shutil.rmtree(work, ignore_errors=True)  # including what a killed process has left in it
        elif md5(path) != archive.md5:
            raise DataError(f"{path} has another MD5 than the published {archive.md5}; remove it and fetch it again")
    return path


@contextlib.contextmanager
def exclusive(path: Path, doing: str) -> Iterator[None]:
    """Create the folder of a file and lock the file against other processes; ``doing`` is the verb for the error."""
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


def md5(path: Path) -> str:
    """The MD5 checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _fetch(archive: Archive, work: Path, progress: ByteProgress) -> Path:
    """Download the archive into ``work``, a folder for this only."""
    with extra("lab", "downloading data"):
        import pooch
        import requests

    pooch.get_logger().setLevel("WARNING")  # the caller shows the progress
    bar = _Bar(work.parent / archive.name, progress)

    def downloader(url: str, output: str, caller: pooch.Pooch) -> None:
        Path(output).unlink()  # pooch made it readable by this user only; made again, it has the usual permissions
        with ExitStack() as answers:

            def opened(answer: requests.Response, **_: Any) -> None:
                answers.callback(answer.close)

            # "identity": the bytes as they are published.
            options = {
                "headers": {"Accept-Encoding": "identity"},
                "hooks": {"response": opened},
            }
            pooch.HTTPDownloader(progressbar=bar, chunk_size=_CHUNK, **options)(url, output, caller)

    source = pooch.create(
        work.absolute(),
        base_url="",
        registry={archive.name: f"md5:{archive.md5}"},
        urls={archive.name: archive.url},
        retry_if_failed=_RETRIES,
    )
    try:
        return Path(source.fetch(archive.name, downloader=downloader))
    except requests.HTTPError as error:
        answer: Any = error.response
        raise DataError(
            f"{archive.url} answers {answer.status_code} {answer.reason}; get {archive.name} (MD5 {archive.md5}) "
            f"elsewhere and put it into {work.parent}"
        ) from None
    except requests.RequestException as error:
        raise DataError(
            f"cannot reach {urlsplit(archive.url).hostname} ({_reason(error)}); try again, or download {archive.url} "
            f"elsewhere and put the file into {work.parent}"
        ) from None
    except ValueError as error:  # the checksum
        raise DataError(f"{archive.url} was not kept: {str(error).partition('. ')[0]}; try again") from None


def _reason(error: BaseException) -> str:
    """The message of the error that caused this one."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class _Bar:
    """A progress bar for pooch, which sets the total for each attempt and counts the last chunk as a full one."""

    def __init__(self, path: Path, progress: ByteProgress) -> None:
        self._path = path
        self._progress = progress
        self._total = self._done = 0

    @property
    def total(self) -> int:
        """The number of bytes that the server announced; 0 if it did not."""
        return self._total

    @total.setter
    def total(self, total: int) -> None:
        free = shutil.disk_usage(self._path.parent).free
        if total > free:
            raise DataError(
                f"{self._path} needs {total / 1e6:.0f} MB, but only {free / 1e6:.0f} MB are free there; "
                "make room, or choose another --data-dir"
            )
        self._total, self._done = total, 0
        self.update(0)

    def update(self, count: int) -> None:
        """Add ``count`` bytes."""
        done = self._done + count
        self._done = min(done, self._total) if self._total else done
        self._progress(self._done, self._total or None)

    def reset(self) -> None:
        """Start counting again; pooch calls this once at the end, before it adds the total."""
        self._done = 0 if self._total else self._done

    def close(self) -> None:
        """Called by pooch when the file is complete."""
