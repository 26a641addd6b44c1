import errno
import os

import pytest
import torch

from iterand.errors import CheckpointError
from iterand.lab.training.checkpoint import (
    _PREVIOUS,
    CHECKPOINT,
    Checkpoint,
    read_checkpoint,
    snapshot,
    write_checkpoint,
)


def make(number):
    tensors = {
        "floats": torch.full((3, 2), float(number)),
        "half": torch.tensor([number], dtype=torch.bfloat16),
        "flag": torch.tensor(True),
        "empty": torch.empty(0, 4),
    }
    return Checkpoint(tensors, {"number": number, "text": "ρ"})


def same(a, b):
    assert a.state == b.state
    assert a.tensors.keys() == b.tensors.keys()
    return all(torch.equal(a.tensors[name], b.tensors[name]) for name in a.tensors)


def test_round_trip(tmp_path):
    assert read_checkpoint(tmp_path) is None
    write_checkpoint(tmp_path, make(1))
    assert same(read_checkpoint(tmp_path), make(1))


def test_tied_tensors_are_written_twice(tmp_path):
    one = torch.ones(3)
    write_checkpoint(tmp_path, snapshot(Checkpoint({"a": one, "b": one}, {})))
    assert read_checkpoint(tmp_path).tensors["b"].tolist() == [1, 1, 1]


def test_the_one_before_is_kept(tmp_path):
    for number in range(3):
        write_checkpoint(tmp_path, make(number))
    (tmp_path / CHECKPOINT).unlink()
    assert same(read_checkpoint(tmp_path), make(1))


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped tensor", "flipped state", "not safetensors"])
def test_a_damaged_checkpoint_falls_back_with_a_warning(tmp_path, damage):
    write_checkpoint(tmp_path, make(1))
    write_checkpoint(tmp_path, make(2))
    data = bytearray((tmp_path / CHECKPOINT).read_bytes())
    if damage == "truncated":
        data = data[:-5]
    elif damage == "empty":
        data = b""
    elif damage == "flipped tensor":
        data[-1] ^= 1
    elif damage == "flipped state":
        data = data.replace(rb"{\"number\": 2", rb"{\"number\": 7")
        assert rb"\"number\": 7" in data
    else:
        data = b"nonsense" * 100
    (tmp_path / CHECKPOINT).write_bytes(data)
    with pytest.warns(UserWarning, match="is damaged"):
        assert same(read_checkpoint(tmp_path), make(1))


def test_nothing_readable_is_an_error(tmp_path):
    (tmp_path / CHECKPOINT).write_bytes(b"x" * 20)
    (tmp_path / _PREVIOUS).write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(CheckpointError, match="--fresh"):
        read_checkpoint(tmp_path)


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="there is none before it"):
            write_checkpoint(tmp_path, make(1))
    write_checkpoint(tmp_path, make(1))
    before = (tmp_path / CHECKPOINT).read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"No space left on device; make room .* the one before is intact"):
        write_checkpoint(tmp_path, make(2))
    monkeypatch.undo()
    assert (tmp_path / CHECKPOINT).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [CHECKPOINT]


def test_nothing_is_pickled(tmp_path):
    write_checkpoint(tmp_path, make(1))
    data = (tmp_path / CHECKPOINT).read_bytes()
    assert int.from_bytes(data[:8], "little") < len(data)  # a safetensors header, then raw bytes
    assert data[8:9] == b"{"
