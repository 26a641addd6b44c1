"""Checkpoints: the state of a run in one safetensors file, checked when read; the one before is kept too."""

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

NAME = "checkpoint.safetensors"
PREVIOUS = "checkpoint.previous.safetensors"
NEW = f"{NAME}.new"
"""Until it gets its name."""


@dataclass(frozen=True)
class Checkpoint:
    """Tensors, and a state that JSON can hold."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]


def snapshot(checkpoint: Checkpoint) -> Checkpoint:
    """A copy in the host's memory that later steps do not change."""
    # Tied tensors share memory, which the format does not hold: each gets its own.
    tensors = {
        name: (tensor.cpu() if tensor.is_cuda else tensor.detach().clone()).contiguous()
        for name, tensor in checkpoint.tensors.items()
    }
    return Checkpoint(tensors, json.loads(json.dumps(checkpoint.state)))


def write(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a snapshot; until it is whole on the disk, the ones before stay as they are."""
    tensors, state = checkpoint.tensors, json.dumps(checkpoint.state)
    # The library that makes the bytes ends the process where it gets no memory for them.
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    memory.require(size, "writing the checkpoint", "make the network smaller, or free some")
    data = save(tensors, metadata={"state": state, "sha256": _digest(tensors, state)})
    current, previous = folder / NAME, folder / PREVIOUS
    beside = folder / NEW
    try:
        atomic_write(beside, data)
        if current.exists():
            current.replace(previous)
        beside.replace(current)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise CheckpointError(
            f"cannot write the checkpoint to {folder}: {error.strerror}; "
            "the one before is intact: make room and start the same command again"
        ) from error


def read(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole; none if there is none at all."""
    found = [path for path in (folder / NAME, folder / PREVIOUS) if path.exists()]
    for path in found:
        memory.require(path.stat().st_size, f"reading {path}", "free some, or start anew with --fresh")
        try:
            return _read(path)
        except (CheckpointError, SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            warnings.warn(f"{path} is damaged ({error}); trying the checkpoint before it", stacklevel=2)
    if found:
        raise CheckpointError(f"no checkpoint in {folder} can be read; start anew with --fresh")
    return None


def _read(path: Path) -> Checkpoint:
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
