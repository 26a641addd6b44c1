"""Where data sets come from, and downloading them with resume and checksums."""

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


@dataclass(frozen=True)
class Archive:
    """A published file and its MD5 checksum."""

    url: str
    md5: str

    @property
    def name(self) -> str:
        """What the file is called."""
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

BY_HAND = {
    "imagenet": "ILSVRC2012 is given to registered users of https://image-net.org only; unpack its images into {folder}"
    "/train/CLASS/ and {folder}/val/CLASS/",
    "digits": "it comes with scikit-learn: pip install 'iterand[lab]'",
}


def missing(name: str, root: Path) -> DataError:
    """The error for a data set that is not there: what to do."""
    if name in ARCHIVES:
        return DataError(
            f"{name} is not in {root}; bring it with 'iterand data fetch {name} --data-dir {root}', or download "
            f"{ARCHIVES[name].url} and put the file there as it is"
        )
    return DataError(f"{name} is not in {root}; {by_hand(name, root)}")


def by_hand(name: str, root: Path) -> str:
    """How to get what cannot be fetched."""
    return BY_HAND[name].format(folder=root / name)


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


Progress = Callable[[int, int | None], None]
"""Told how many bytes are there, and of how many if the server says so."""

_CHUNK = 1 << 18
_RETRIES = 2


def download(archive: Archive, folder: Path, progress: Progress) -> Path:
    """Bring the archive into the folder and check it; one that is there already is only checked."""
    path = folder / archive.name
    with alone(path, "downloaded"):
        if not path.exists():
            work = folder / f".{archive.name}{PART}"
            try:
                _fetch(archive, work, progress).replace(path)
            finally:
                shutil.rmtree(work, ignore_errors=True)  # with what a process that was killed has left in it
        elif md5(path) != archive.md5:
            raise DataError(f"{path} has another MD5 than the published {archive.md5}; remove it and fetch it again")
    return path


def md5(path: Path) -> str:
    """The MD5 checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _fetch(archive: Archive, work: Path, progress: Progress) -> Path:
    """The archive, downloaded into a folder that is not used for anything else."""
    with extra("lab", "downloading data"):
        import pooch
        import requests

    pooch.get_logger().setLevel("WARNING")  # the caller shows the progress
    bar = _Bar(work.parent / archive.name, progress)

    def downloader(url: str, output: str, caller: pooch.Pooch) -> None:
        Path(output).unlink()  # pooch has made it for this user alone; made again, it has the usual permissions
        with ExitStack() as answers:

            def opened(answer: requests.Response, **_: Any) -> None:
                answers.callback(answer.close)

            options = {"headers": {"Accept-Encoding": "identity"}, "hooks": {"response": opened}}  # as it is published
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
    """What the innermost of the errors says that led to this one."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class _Bar:
    """A progress bar as pooch uses one: it sets the total of each try, and counts the last chunk as a whole one."""

    def __init__(self, path: Path, progress: Progress) -> None:
        self._path = path
        self._progress = progress
        self._total = self._done = 0

    @property
    def total(self) -> int:
        """How many bytes the server says there are; 0 if it does not say."""
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
        """So many bytes more are there."""
        done = self._done + count
        self._done = min(done, self._total) if self._total else done
        self._progress(self._done, self._total or None)

    def reset(self) -> None:
        """Count again; only pooch does, to end with the total."""
        self._done = 0 if self._total else self._done

    def close(self) -> None:
        """The file is there."""
