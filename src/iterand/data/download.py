"""Download a file so that a broken download goes on where it stopped, and only a right one gets its name."""

import hashlib
import http.client
import os
import re
import shutil
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from iterand.data.partial import PART, only_one, unwritable
from iterand.data.sources import Archive
from iterand.errors import DataError

Progress = Callable[[int, int | None], None]
"""Told how many bytes are there, and of how many if the server says so."""

_CHUNK = 1 << 18
_TIMEOUT = 30.0
_TRIES = 3  # connections that break without having brought anything


def download(archive: Archive, folder: Path, progress: Progress) -> Path:
    """Bring the archive into the folder and check it; a ``.part`` file from an earlier try is continued."""
    path = folder / archive.name
    part = folder / (archive.name + PART)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            with part.open("ab") as file, only_one(file, part, "downloaded"):
                if path.exists():  # another process has just brought it
                    return path
                _fill(file, archive, path, progress)
                file.flush()
                os.fsync(file.fileno())
                _verify_new(part, archive)
                part.replace(path)
        elif md5(path) != archive.md5:
            raise DataError(f"{path} has another MD5 than the published {archive.md5}; remove it and fetch it again")
    except OSError as error:
        raise unwritable(part, error) from None
    return path


def md5(path: Path) -> str:
    """The MD5 checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _verify_new(part: Path, archive: Archive) -> None:
    found = md5(part)
    if found != archive.md5:
        part.unlink()  # going on with it would never end well
        raise DataError(f"{archive.url} came with MD5 {found}, expected {archive.md5}, and was thrown away; try again")


def _fill(file: IO[bytes], archive: Archive, path: Path, progress: Progress) -> None:
    """Ask for what is missing until it is all there."""
    most, fruitless = file.tell(), 0
    while True:
        try:
            if _continue(file, path, archive.url, progress):
                return
            reason = "the connection broke"
        except urllib.error.HTTPError as error:
            error.close()
            raise DataError(
                f"{archive.url} answers {error.code} {error.reason}; get {archive.name} (MD5 {archive.md5}) elsewhere "
                f"and put it into {path.parent}"
            ) from None
        except urllib.error.URLError as error:
            reason = str(error.reason)
        except (http.client.HTTPException, TimeoutError, ConnectionError, ssl.SSLError) as error:
            reason = str(error) or type(error).__name__
        fruitless = 0 if file.tell() > most else fruitless + 1
        most = max(most, file.tell())
        if fruitless == _TRIES:
            raise DataError(
                f"cannot reach {urlsplit(archive.url).hostname} ({reason}); try again, or download {archive.url} "
                f"elsewhere and put the file into {path.parent}"
            )


def _continue(file: IO[bytes], path: Path, url: str, progress: Progress) -> bool:
    """One connection: append what it brings; whether the file is whole then."""
    start = file.tell()
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        error.close()
        if _total(error.headers, 0) == start:
            return True  # an earlier try got it all but could not finish
        _restart(file)
        return False
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT or _first(response.headers) != start:
            _restart(file)
        start = file.tell()
        total = _total(response.headers, start)
        _check_room(path, total, start)
        progress(start, total)
        while chunk := response.read(_CHUNK):
            file.write(chunk)
            progress(file.tell(), total)
    return total is None or file.tell() == total


def _restart(file: IO[bytes]) -> None:
    file.truncate(0)
    file.seek(0)


def _first(headers: Any) -> int | None:
    """Where a partial answer begins."""
    found = re.match(r"bytes (\d+)-", headers.get("Content-Range") or "")
    return int(found[1]) if found else None


def _total(headers: Any, start: int) -> int | None:
    """How long the whole file is."""
    found = re.search(r"/(\d+)$", headers.get("Content-Range") or "")
    if found:
        return int(found[1])
    length = headers.get("Content-Length")
    return start + int(length) if length else None


def _check_room(path: Path, total: int | None, have: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if total is not None and total - have > free:
        raise DataError(
            f"{path} needs {(total - have) / 1e6:.0f} MB more, but only {free / 1e6:.0f} MB are free there; "
            "make room, or choose another --data-dir"
        )
