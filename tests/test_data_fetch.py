"""Downloads from a server on this machine that breaks, lies, or is not there."""

import contextlib
import errno
import hashlib
import http.server
import shutil
import threading
from collections import namedtuple
from pathlib import Path

import pooch
import pytest

from iterand.errors import DataError
from iterand.lab.data import catalog
from iterand.lab.data import download as downloading
from iterand.lab.data.download import ARCHIVES, Archive, download

CONTENT = bytes(hashlib.shake_128(b"a data set").digest(1_000_000))
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves CONTENT; ``cuts`` says after how many bytes each of the next answers breaks off."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.cuts = []
        self.asked = []
        self.lengths = True
        self.status = None

    @property
    def archive(self):
        return Archive(f"http://127.0.0.1:{self.server_address[1]}/files/set.tar.gz", MD5)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.asked.append(dict(self.headers))
        if server.status:
            self.send_error(server.status)
            return
        self.send_response(200)
        if server.lengths:
            self.send_header("Content-Length", str(len(server.content)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the other side may hang up
            self.wfile.write(server.content[: server.cuts.pop(0)] if server.cuts else server.content)

    def log_message(self, *arguments):
        pass


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    """Between one try and the next."""
    monkeypatch.setattr(pooch.core.time, "sleep", lambda seconds: None)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def seen():
    return []


@pytest.fixture
def progress(seen):
    return lambda done, total: seen.append((done, total))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_whole_download(server, tmp_path, progress, seen):
    path = download(server.archive, tmp_path / "new" / "folder", progress)
    assert path == tmp_path / "new" / "folder" / "set.tar.gz"
    assert path.read_bytes() == CONTENT
    assert names(path.parent) == ["set.tar.gz"]
    assert seen[0] == (0, len(CONTENT))
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_permissions_are_those_of_an_ordinary_file(server, tmp_path, progress):
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    assert download(server.archive, tmp_path, progress).stat().st_mode == ordinary.stat().st_mode


def test_the_file_is_asked_for_as_it_is(server, tmp_path, progress):
    download(server.archive, tmp_path, progress)
    assert [headers["Accept-Encoding"] for headers in server.asked] == ["identity"]


def test_nothing_is_printed_or_logged(server, tmp_path, progress, capfd):
    download(server.archive, tmp_path, progress)
    assert capfd.readouterr() == ("", "")


def test_a_connection_that_breaks_is_tried_again(server, tmp_path, progress, seen):
    server.cuts = [1000, 500_000]
    assert download(server.archive, tmp_path, progress).read_bytes() == CONTENT
    assert len(server.asked) == 3
    assert [done for done, _ in seen].count(0) == 3
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert names(tmp_path) == ["set.tar.gz"]


def test_what_a_killed_process_left_is_removed(server, tmp_path, progress):
    left = tmp_path / ".set.tar.gz.part"
    left.mkdir()
    (left / "tmpabcd").write_bytes(CONTENT[:1000])
    (tmp_path / ".set.tar.gz.lock").touch()
    assert download(server.archive, tmp_path, progress).read_bytes() == CONTENT
    assert names(tmp_path) == ["set.tar.gz"]


def test_a_server_that_does_not_say_how_long_it_is(server, tmp_path, progress, seen):
    server.lengths = False
    assert download(server.archive, tmp_path, progress).read_bytes() == CONTENT
    assert {total for _, total in seen} == {None}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] >= len(CONTENT)


def test_a_connection_that_always_breaks_is_given_up(server, tmp_path, progress):
    server.cuts = [200, 100, 150]
    with pytest.raises(
        DataError, match=r"cannot reach 127\.0\.0\.1 \(.*150 bytes read.*\); try again, or download http.* put the f"
    ):
        download(server.archive, tmp_path, progress)
    assert len(server.asked) == 3
    assert names(tmp_path) == []


def test_a_wrong_checksum(server, tmp_path, progress):
    server.content = CONTENT[:-1] + b"?"
    with pytest.raises(
        DataError, match=rf"set\.tar\.gz was not kept: .* expected md5:{MD5} but got [0-9a-f]{{32}}; try again$"
    ):
        download(server.archive, tmp_path, progress)
    assert names(tmp_path) == []


def test_a_wrong_file_that_was_there_before_is_left_alone(server, tmp_path, progress):
    (tmp_path / "set.tar.gz").write_bytes(b"mine")
    with pytest.raises(
        DataError, match=r"set\.tar\.gz has another MD5 than the published .*; remove it and fetch it again"
    ):
        download(server.archive, tmp_path, progress)
    assert (tmp_path / "set.tar.gz").read_bytes() == b"mine"
    assert server.asked == []


def test_a_right_file_is_not_downloaded_again(server, tmp_path, progress):
    (tmp_path / "set.tar.gz").write_bytes(CONTENT)
    assert download(server.archive, tmp_path, progress) == tmp_path / "set.tar.gz"
    assert server.asked == []


@pytest.mark.parametrize("status", [403, 404, 500])
def test_an_error_of_the_server(server, tmp_path, progress, status):
    server.status = status
    with pytest.raises(
        DataError, match=rf"set\.tar\.gz answers {status} .*; get set\.tar\.gz \(MD5 {MD5}\) elsewhere"
    ) as e:
        download(server.archive, tmp_path, progress)
    assert str(tmp_path) in str(e.value)
    assert names(tmp_path) == []


def test_nobody_there(tmp_path, progress, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    archive = Archive("http://127.0.0.1:1/set.tar.gz", MD5)
    with pytest.raises(
        DataError, match=r"cannot reach 127\.0\.0\.1 \(.*refused\); try again, or download http.* put the f"
    ):
        download(archive, tmp_path, progress)
    assert names(tmp_path) == []


def test_not_enough_room(server, tmp_path, progress, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 5000))
    with pytest.raises(DataError, match=r"set\.tar\.gz needs 1 MB, but only 0 MB are free there; make room"):
        download(server.archive, tmp_path, progress)
    assert names(tmp_path) == []


def test_the_disk_fills_up(server, tmp_path):
    def full(done, total):
        if done > 600_000:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DataError, match=r"the disk is full while writing .*set\.tar\.gz; make room and start the same"):
        download(server.archive, tmp_path, full)
    assert names(tmp_path) == []
    assert download(server.archive, tmp_path, lambda done, total: None).read_bytes() == CONTENT


def test_a_folder_that_cannot_be_made(server, tmp_path, progress):
    (tmp_path / "data").write_text("a file")
    with pytest.raises(DataError, match=r"cannot write .*data/deeper: Not a directory"):
        download(server.archive, tmp_path / "data" / "deeper", progress)


def test_two_at_once(server, tmp_path):
    refused = []

    def again(done, total):
        if not refused:
            with pytest.raises(DataError, match="is being downloaded by another process; wait for it") as caught:
                download(server.archive, tmp_path, lambda done, total: None)
            refused.append(caught)

    assert download(server.archive, tmp_path, again).read_bytes() == CONTENT
    assert refused


class TestByName:
    def test_what_is_there_is_not_fetched(self, tmp_path, progress):
        (tmp_path / "cifar-10-batches-py").mkdir()
        assert catalog.fetch("cifar10", tmp_path, progress) == tmp_path / "cifar-10-batches-py"

    def test_an_archive_that_is_there_is_checked(self, tmp_path, progress):
        (tmp_path / "imdb").mkdir()
        (tmp_path / "imdb" / "aclImdb_v1.tar.gz").write_bytes(b"not it")
        with pytest.raises(DataError, match=r"imdb/aclImdb_v1\.tar\.gz has another MD5 than the published 7c2ac02c0"):
            catalog.fetch("imdb", tmp_path, progress)

    def test_fetched_from_where_it_is_published(self, server, tmp_path, progress, monkeypatch):
        monkeypatch.setitem(ARCHIVES, "imdb", server.archive)
        assert catalog.fetch("imdb", tmp_path, progress) == tmp_path / "set.tar.gz"

    def test_imagenet_is_not_free(self, tmp_path, progress):
        with pytest.raises(DataError, match=r"imagenet cannot be fetched; .*image-net\.org .*/imagenet/train/CLASS/"):
            catalog.fetch("imagenet", tmp_path, progress)

    def test_the_canonical_addresses(self):
        assert {name: (archive.url, archive.md5) for name, archive in ARCHIVES.items()} == {
            "cifar10": (
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "c32a1d4ab5d03f1284b67883e8d87530",
            ),
            "imdb": (
                "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
                "7c2ac02c03563afcf9b574c7e56c153a",
            ),
        }


def test_the_checksum_of_a_file(tmp_path):
    path = Path(tmp_path / "file")
    path.write_bytes(b"abc")
    assert downloading.md5(path) == "900150983cd24fb0d6963f7d28e17f72"
