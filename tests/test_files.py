import errno
import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from iterand.files import atomic_write, concerns, new_folder, remove_unfinished, require_writable


def test_the_file_holds_the_data_and_nothing_lies_beside_it(tmp_path):
    path = tmp_path / "deep" / "folder" / "file.bin"
    atomic_write(path, b"first")
    atomic_write(path, bytearray(b"second, longer"))
    assert path.read_bytes() == b"second, longer"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.bin"]


@pytest.mark.parametrize(("owner", "step"), [(os, "fsync"), (Path, "replace")])
def test_a_crash_at_any_step_leaves_the_old_file(tmp_path, monkeypatch, owner, step):
    path = tmp_path / "file.bin"
    atomic_write(path, b"old")

    def crash(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, step, crash)
    with pytest.raises(KeyboardInterrupt):
        atomic_write(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("owner", "step"), [(tempfile, "mkstemp"), (os, "fsync"), (Path, "replace")])
def test_an_error_at_any_step_names_the_file(tmp_path, monkeypatch, owner, step):
    def fail(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), ".file.bin.abcd1234.part")

    monkeypatch.setattr(owner, step, fail)
    with pytest.raises(OSError, match="No space left on device") as caught:
        atomic_write(tmp_path / "file.bin", b"data")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "file.bin"))
    assert list(tmp_path.iterdir()) == []


def test_data_reaches_the_disk_before_the_name_does(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append("fsync"), fsync(handle)))
    monkeypatch.setattr(Path, "replace", lambda *names: (order.append("replace"), replace(*names)))
    atomic_write(tmp_path / "file.bin", b"data")
    assert order == ["fsync", "replace", "fsync"]


def test_rights_are_those_of_an_ordinary_file_or_of_the_old_one(tmp_path):
    ordinary, ours = tmp_path / "ordinary", tmp_path / "ours"
    ordinary.write_bytes(b"")
    atomic_write(ours, b"")
    assert stat.S_IMODE(ours.stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)
    ours.chmod(0o640)
    atomic_write(ours, b"again")
    assert stat.S_IMODE(ours.stat().st_mode) == 0o640


def test_a_link_keeps_pointing_where_it_did(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    atomic_write(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_what_is_no_file_is_not_replaced_by_one(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="pipe is not a regular file; give the name of one"):
        atomic_write(pipe, b"data")
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_folder_in_the_way_is_named(tmp_path):
    with pytest.raises(OSError, match=f"^{tmp_path} is a folder; give the name of a file$"):
        atomic_write(tmp_path, b"data")
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from iterand.files import atomic_write
os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
atomic_write(sys.argv[1], b"half of it")
"""


@pytest.fixture
def left(tmp_path):
    """What a writer that was killed leaves."""
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "file.bin")], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    (path,) = tmp_path.iterdir()
    assert path.name.endswith(".part")
    return path


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such signal")
def test_what_a_killed_writer_left_is_removed_by_a_later_one(tmp_path, left):
    now = left.stat().st_mtime
    os.utime(left, (now - 3000, now - 3000))
    atomic_write(tmp_path / "file.bin", b"whole")
    assert left.exists()  # its writer may be alive
    os.utime(left, (now - 4000, now - 4000))
    atomic_write(tmp_path / "file.bin", b"whole")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.bin"]


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such signal")
def test_what_a_killed_writer_left_is_removed_at_once_by_one_who_is_alone(tmp_path, left):
    remove_unfinished(tmp_path / "file.bin")
    assert not left.exists()
    remove_unfinished(tmp_path / "nowhere" / "file.bin")


def test_nothing_else_is_removed(tmp_path):
    names = [
        ".file.bin.abcd1234.part",
        ".file.bin.new.abcd1234.part",
        ".file.binx.abcd1234.part",
        ".xfile.bin.abcd1234.part",
    ]
    names += ["file.bin.abcd1234.part", ".file.bin.abcd1234.party", ".fileXbin.abcd1234.part", ".file.bin.part"]
    for name in names:
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (0, 0))
    atomic_write(tmp_path / "file.bin", b"data")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(["file.bin", *names[1:]])


def test_a_new_folder_that_stays_empty_is_removed_with_its_new_parents(tmp_path):
    (tmp_path / "old").mkdir()
    with pytest.raises(ValueError, match="refused"), new_folder(tmp_path / "old" / "new" / "run"):
        raise ValueError("refused")
    assert list(tmp_path.rglob("*")) == [tmp_path / "old"]
    with new_folder(tmp_path / "old"):
        pass
    assert (tmp_path / "old").is_dir()


def test_a_new_folder_that_holds_something_stays(tmp_path):
    with new_folder(tmp_path / "runs" / "one"):
        (tmp_path / "runs" / "other").mkdir()
    assert list(tmp_path.rglob("*")) == [tmp_path / "runs", tmp_path / "runs" / "other"]
    with new_folder(tmp_path / "runs" / "one"):
        (tmp_path / "runs" / "one" / "file").write_text("kept")
    assert (tmp_path / "runs" / "one" / "file").read_text() == "kept"


def test_a_folder_in_which_nothing_can_be_created_is_named(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "tmpabcd1234")

    require_writable(tmp_path / "runs")
    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    with pytest.raises(OSError, match="Read-only file system") as caught:
        require_writable(tmp_path / "runs")
    assert caught.value.filename == str(tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "yes"),
    [
        (OSError(errno.ENOSPC, "full"), True),  # of a file that is open for writing
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found"), False),
        (PermissionError(errno.EACCES, "denied", "runs/a"), True),
        (PermissionError(errno.EACCES, "denied", b"runs/a/b/c"), True),
        (PermissionError(errno.EACCES, "denied", str(Path("runs/a/b").absolute())), True),
        (PermissionError(errno.EACCES, "denied", "runs/abc"), False),
        (PermissionError(errno.EACCES, "denied", "runs"), False),
    ],
)
def test_errors_that_concern_a_folder(error, yes):
    assert concerns(error, Path("runs/a")) is yes
