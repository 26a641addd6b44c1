"""The installed command, killed and started again: it must end as if nothing had happened."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest

COMMAND = [sys.executable, "-m", "iterand", "train", "digits", "--device", "cpu"]
SETTINGS = ["--set", "epochs=8"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


# The same command, which gets a signal after its third epoch.
SIGNALLED = """
import os, sys
from iterand.cli import main, train

class Observer(train.ProgressObserver):
    def epoch(self, session, metrics):
        super().epoch(session, metrics)
        if metrics["epoch"] == 3:
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))

train.ProgressObserver = Observer
main.main()
"""


def start(folder, *extra, **options):
    return subprocess.Popen(
        [*COMMAND, *SETTINGS, "--out", str(folder), *extra],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        **options,
    )


def interrupt(folder, number):
    """Start the command and interrupt it."""
    command = [sys.executable, "-c", SIGNALLED, *COMMAND[3:], *SETTINGS, "--out", str(folder)]
    process = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT | {"SIGNAL": str(int(number))})
    assert process.returncode == 130
    assert "run the same command to resume" in process.stderr
    assert "Traceback" not in process.stderr


def finish(process):
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out


def wait_for(path, process):
    while not path.exists():
        assert process.poll() is None or path.exists(), process.communicate()
        time.sleep(0.02)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The unbroken run."""
    folder = tmp_path_factory.mktemp("whole")
    finish(start(folder))
    return outcome(folder)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """The folder of a run that Ctrl-C has stopped."""
    folder = tmp_path_factory.mktemp("interrupted")
    interrupt(folder, signal.SIGINT)
    return folder


def outcome(folder):
    return (folder / "metrics.jsonl").read_text(), json.loads((folder / "record.json").read_text())["result"]


def compare(folder, whole):
    assert outcome(folder) == whole


def test_sigkill_at_any_moment(tmp_path, whole):
    moments = random.Random(0)
    for _ in range(2):
        process = start(tmp_path)
        wait_for(tmp_path / "checkpoint.safetensors", process)
        time.sleep(moments.uniform(0.0, 1.0))
        process.kill()
        process.communicate()
    finish(start(tmp_path))
    compare(tmp_path, whole)
    assert not list(tmp_path.glob(".*.part"))


def test_sigterm_saves_and_says_how_to_go_on(tmp_path, whole):
    interrupt(tmp_path, signal.SIGTERM)
    finish(start(tmp_path))
    compare(tmp_path, whole)


def test_full_disk_while_saving_leaves_the_old_checkpoint(tmp_path, interrupted, whole):
    """In the end it is resumed as if Ctrl-C alone had stopped it."""
    shutil.copytree(interrupted, tmp_path, dirs_exist_ok=True)
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    limit = len(before) // 2  # room for the logs, not for a checkpoint
    process = start(tmp_path, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    _, err = process.communicate()
    assert process.returncode == 1
    assert "cannot write the checkpoint" in err
    assert "Traceback" not in err
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before
    finish(start(tmp_path))
    compare(tmp_path, whole)


def test_a_damaged_checkpoint_costs_time_only(tmp_path, interrupted, whole):
    shutil.copytree(interrupted, tmp_path, dirs_exist_ok=True)
    shutil.copy(tmp_path / "checkpoint.safetensors", tmp_path / "checkpoint.previous.safetensors")
    with (tmp_path / "checkpoint.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    process = start(tmp_path)
    _, err = process.communicate()
    assert process.returncode == 0
    assert "warning:" in err
    assert "is damaged" in err
    compare(tmp_path, whole)
