"""The tests themselves: what ends them, and what they do not depend on."""

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

from conftest import LONGEST

pytest.importorskip("xdist", reason="pytest-xdist is not installed")

ROOT = Path(__file__).parents[1]
PASSING = "def test_one(): pass\n"


def session(folder, code, *options, **variables):
    """Run these tests as ``make test`` does, beside others that pass."""
    (flags,) = re.findall(r"pytest (-n 3 .*)", (ROOT / "Makefile").read_text())
    (folder / "test_code.py").write_text(code)
    (folder / "test_other.py").write_text(PASSING)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *shlex.split(flags), *options, str(folder)]
    with (folder / "said").open("wb") as file:  # not a pipe, which would not end before every process that has it
        done = subprocess.run(command, cwd=folder, stdout=file, stderr=file, env=os.environ | variables)
    return done.returncode, (folder / "said").read_text()


def test_a_worker_that_is_killed_ends_the_session(tmp_path):
    code, said = session(tmp_path, PASSING + "def test_dies(): import os; os.kill(os.getpid(), 9)\n")
    assert code == 1
    assert re.search(r"worker 'gw\d' crashed while running 'test_code\.py::test_dies'", said)
    assert "1 failed" in said  # once: what killed one worker is not given to the next


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_silence_ends_the_session(tmp_path):
    """A forked process has the connection of its worker, so that the end of the worker is not seen."""
    fork = "def test_forks():\n    import os, signal\n    child = os.fork() or signal.pause()\n"
    fork += f"    open({str(tmp_path / 'child')!r}, 'w').write(str(child))\n    os.kill(os.getpid(), 9)\n"
    for seconds in ("10", "60", "600"):  # more than a slow machine needs until the test begins
        places = {"ITERAND_TEST_SILENCE": seconds, "PYTHONPATH": str(Path(__file__).parent)}
        code, said = session(tmp_path, fork, "-p", "silence", **places)
        if (tmp_path / "child").exists():
            os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
            break
    assert code == 1
    assert "Timeout" in said


def test_the_plugin_is_used_and_waits_longer_than_a_test_may_take(request):
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert request.config.pluginmanager.has_plugin("silence")
    assert options["timeout"] < sys.modules["silence"].LONGEST


def test_the_files_that_come_first_are_there():
    assert set(LONGEST) <= {path.stem for path in Path(__file__).parent.rglob("test_*.py")}


@pytest.mark.parametrize("way", ["BLAS gemm: bf16 path", "baddbmm:bf16 path"])
def test_torch_may_do_without_bfloat16(way):
    """What it says where a CPU has none, before it multiplies in another way."""
    warnings.warn(f"mkldnn_matmul failed, switching to {way} needs the cpu support avx512bw", stacklevel=1)
