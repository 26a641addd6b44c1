"""A checkpoint: the whole state of a run in one file, from which it resumes; and the one before it."""

import hashlib
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from iterand import memory
from iterand.errors import CheckpointError
from iterand.files import atomic_write

CHECKPOINT = "checkpoint.safetensors"
_PREVIOUS = "checkpoint.previous.safetensors"
_NEW = f"{CHECKPOINT}.new"  # while it is written
FILES = (CHECKPOINT, _PREVIOUS, _NEW)


@dataclass(frozen=True)
class Checkpoint:
    """Tensors, and a state that can be written as JSON."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]


def snapshot(checkpoint: Checkpoint) -> Checkpoint:
    """A copy in main memory that later steps do not change."""
    # safetensors refuses tensors that share memory, as tied ones do: each gets its own.
    tensors = {
        name: (tensor.cpu() if tensor.is_cuda else tensor.detach().clone()).contiguous()
        for name, tensor in checkpoint.tensors.items()
    }
    return Checkpoint(tensors, json.loads(json.dumps(checkpoint.state)))


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a snapshot; until it is complete on disk, the previous checkpoints are not touched."""
    tensors, state = checkpoint.tensors, json.dumps(checkpoint.state)
    # Out of memory, safetensors would abort the process.
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    memory.require(size, "writing the checkpoint", "make the network smaller, or free some")
    data = save(tensors, metadata={"state": state, "sha256": _digest(tensors, state)})
    current, previous = folder / CHECKPOINT, folder / _PREVIOUS
    beside = folder / _NEW
    try:
        atomic_write(beside, data)
        if current.exists():
            current.replace(previous)
        beside.replace(current)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise CheckpointError(
            f"cannot write the checkpoint to {folder}: {error.strerror}; make room and start the same command again: "
            f"{'the one before is intact' if current.exists() or previous.exists() else 'there is none before it'}"
        ) from error


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is not damaged; None if the folder has no checkpoint."""
    found = [path for path in (folder / CHECKPOINT, folder / _PREVIOUS) if path.exists()]
    for path in found:
        memory.require(path.stat().st_size, f"reading {path}", "free some, or start again with --fresh")
        try:
            return _read_checkpoint(path)
        except (CheckpointError, SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            warnings.warn(f"{path} is damaged ({error}); it is not used", stacklevel=2)
    if found:
        raise CheckpointError(f"no checkpoint in {folder} can be read; start again with --fresh")
    return None


def _read_checkpoint(path: Path) -> Checkpoint:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    if _digest(tensors, metadata["state"]) != metadata["sha256"]:
        raise CheckpointError("its checksum is wrong")
    return Checkpoint(tensors, json.loads(metadata["state"]))


def _digest(tensors: dict[str, Tensor], state: str) -> str:
    digest = hashlib.sha256(state.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
