"""A lock file: one holder at a time, whatever becomes of it."""

import errno
import subprocess
import sys
from types import SimpleNamespace

import pytest

from iterand import files
from iterand.files import locked

TAKEN = RuntimeError("taken")


def fake_msvcrt():
    """Windows' locks, made of those that are here."""
    fcntl = pytest.importorskip("fcntl")

    def lock(handle, mode, count):
        assert (mode, count) == ("do not wait", 1)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PermissionError(errno.EACCES, "Permission denied") from None

    return SimpleNamespace(locking=lock, LK_NBLCK="do not wait")


@pytest.fixture(params=["here", "windows"], autouse=True)
def platform(request, monkeypatch):
    if request.param == "windows":
        monkeypatch.setattr(files, "sys", SimpleNamespace(platform="win32"))
        monkeypatch.setitem(sys.modules, "msvcrt", fake_msvcrt())
        monkeypatch.setitem(sys.modules, "fcntl", None)
    return request.param


def test_one_holder_at_a_time(tmp_path):
    path = tmp_path / "lock"
    for _ in range(2):
        with locked(path, TAKEN):
            for _ in range(2):
                with pytest.raises(RuntimeError, match="taken"), locked(path, TAKEN):
                    raise AssertionError("held twice")
            assert path.exists()
        assert not path.exists()


def test_an_error_ends_it(tmp_path):
    with pytest.raises(KeyError), locked(tmp_path / "lock", TAKEN):
        raise KeyError
    with locked(tmp_path / "lock", TAKEN):
        pass


def test_an_error_of_the_holder_is_not_taken_for_a_lock(tmp_path):
    with pytest.raises(BlockingIOError), locked(tmp_path / "lock", TAKEN):
        raise BlockingIOError


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError), locked(tmp_path / "none" / "lock", TAKEN):
        pass


HOLD = """
import sys
from pathlib import Path
from iterand.files import locked
with locked(Path(sys.argv[1]), RuntimeError("taken")):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_it_ends_with_a_process_that_is_killed(tmp_path, platform):
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline().strip() == b"held"
        with pytest.raises(RuntimeError, match="taken"), locked(path, TAKEN):
            raise AssertionError("held twice")
        process.kill()
    assert path.exists()
    with locked(path, TAKEN):
        pass
    assert not path.exists()


def test_a_file_that_its_holder_removes_meanwhile_is_no_lock(tmp_path, monkeypatch, platform):
    """Between opening and locking it, another process may end and a third one begin."""
    if "win" in (platform[:3], sys.platform[:3]):
        pytest.skip("an open file cannot be removed there")
    path, take, seen = tmp_path / "lock", files._try_lock, []

    def late(file):
        if not seen:
            path.unlink()
        if len(seen) == 1:
            path.unlink()
            path.touch()
        seen.append(take(file))

    monkeypatch.setattr(files, "_try_lock", late)
    with locked(path, TAKEN):
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match="taken"), locked(path, TAKEN):
            raise AssertionError("held twice")
    assert len(seen) == 3
