"""The installed command, killed and started again: it must end as if nothing had happened."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

import forked

ARGUMENTS = ["train", "digits", "--device", "cpu", "--set", "epochs=8"]


def start(folder, **options):
    return forked.Command(*ARGUMENTS, "--out", folder, folder=folder.with_name(f"{folder.name}-printed"), **options)


def start_alone(folder):
    """The same from nothing, as a user starts it."""
    command = [sys.executable, "-m", "iterand", *ARGUMENTS, "--out", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def interrupt(folder, number):
    """Start the command, which gets a signal after its third epoch."""
    process = start(folder, prepare=partial(forked.signalled, 3, number))
    _, err = process.communicate()
    assert process.returncode == 130
    assert "run the same command to resume" in err
    assert "Traceback" not in err


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
    for begin in (start_alone, start):
        process = begin(tmp_path)
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
    process = start(tmp_path, prepare=partial(forked.limited, limit))
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
