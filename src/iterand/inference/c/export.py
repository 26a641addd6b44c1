"""``export_c``: a folder with the network of a ticket as C, which any compiler builds without this package."""

import os
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from iterand.errors import IterandError
from iterand.inference.c.emitter import Source, emit
from iterand.inference.c.library import Library, build, find_compiler
from iterand.inference.graph import trace
from iterand.inference.models import evaluating
from iterand.inference.nodes import Graph
from iterand.inference.quantization import Activations, calibrate, check_difference, check_sample, relative_difference
from iterand.ticket import Ticket, read_ticket
from iterand.ticket.load import check_loaded

# Allowed difference to torch, relative to the largest output: sums are taken in another order.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class CExport:
    """Result of an export."""

    bytes: int
    """Of constant data: weights, scales and shifts."""
    arena: int
    """Bytes of memory that the network needs while it runs."""
    weights: int
    """Bytes of memory for weights that are decoded from the ticket; 0 if they are constant data."""
    difference: float | None
    """Largest difference to torch's outputs, relative to the largest output; None without a compiler to check it."""


def export_c(
    model: nn.Module,
    example: Tensor,
    folder: str | os.PathLike[str],
    *,
    activations: Activations = "float32",
    ticket: str | os.PathLike[str] | Ticket | None = None,
) -> CExport:
    """Write ``network.h``, ``network.c``, ``example.c`` and a README, and compare the network's outputs with torch's.

    Args:
        model: The network, from ``load_ticket``.
        example: A batch of inputs. For "int8" a hundred or more, from which the range of every value is chosen.
        folder: The folder to write; a missing one is created. Files of an earlier export are replaced; a README of your
            own stays, and other files of these names are refused.
        activations: "float32", or "int8": values between layers are bytes.
        ticket: The ticket of the network, or its file. Its coded masks and signs become the constant data, and
            the program decodes them once, into memory. Without it, kept weights are constant data of a byte each.
    """
    sample = check_sample(activations, None if activations == "float32" else example)
    if isinstance(example, Tensor) and not len(example):
        raise ValueError(f"example has shape {tuple(example.shape)}; it must have at least one input")
    if isinstance(example, Tensor) and not example.isfinite().all():
        raise ValueError("example has NaN or infinity; give inputs prepared as in training")
    graph = trace(model, example)
    ranges = None if sample is None else calibrate(graph, sample)
    source = plain = emit(graph, coded=True, activations=ranges)
    if ticket is not None:
        ticket = ticket if isinstance(ticket, Ticket) else read_ticket(ticket)
        check_loaded(ticket, model)
        source = emit(graph, coded=True, activations=ranges, ticket=ticket)
    difference = _difference(source, model, example)
    if difference is not None and sample is not None:
        check_difference(difference)
    elif difference is not None and not difference <= _TOLERANCE:
        raise IterandError(f"the outputs in C differ from torch's by {difference:g} of the largest; nothing is written")
    example_c = resources.files("iterand.inference.c").joinpath("example.c").read_text(encoding="utf-8")
    files = {"network.h": source.header, "network.c": source.code, "example.c": example_c}
    _write(Path(folder), files | {"README.md": _readme(graph, source, plain)})
    return CExport(source.data, source.arena, source.weights, difference)


def _difference(source: Source, model: nn.Module, example: Tensor) -> float | None:
    compiler = find_compiler()
    if compiler is None:
        return None
    batch = np.ascontiguousarray(example.detach().cpu().numpy(), dtype=np.float32)
    with tempfile.TemporaryDirectory(prefix="iterand-", ignore_cleanup_errors=True) as folder:
        found = torch.from_numpy(Library(build(source, compiler, Path(folder)), source)(batch, 1))
    with torch.no_grad(), torch.autocast("cpu", enabled=False), evaluating(model):
        expected = model(example).cpu().reshape(found.shape)
    return relative_difference(found, expected)


def _write(folder: Path, files: dict[str, str]) -> None:
    """Write all files beside the folder first, so that it never has half of them."""
    if folder.exists() and not folder.is_dir():
        raise IterandError(f"{folder} is a file; give the name of a folder")
    if folder.parent.exists() and not folder.parent.is_dir():
        raise IterandError(f"{folder.parent} is a file, so there can be no folder {folder}")
    if not _is_exported(folder / "network.h", files["network.h"]):
        for path in (folder / name for name in files if name != "README.md"):
            if path.exists():
                raise IterandError(f"{path} is not from an export, which would replace it; choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    if (folder / "README.md").exists() and not _is_exported(folder / "README.md", files["README.md"]):
        del files["README.md"]
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        for name, text in files.items():
            (Path(temporary) / name).write_text(text, encoding="utf-8")
        folder.mkdir(exist_ok=True)
        for name in files:
            (Path(temporary) / name).replace(folder / name)


def _is_exported(path: Path, text: str) -> bool:
    """Whether a file begins with the first line of this text, as one of an earlier export does."""
    return path.is_file() and path.read_bytes().startswith(text.partition("\n")[0].encode())


def _readme(graph: Graph, source: Source, plain: Source) -> str:
    shape = " × ".join(map(str, graph.input.shape))
    init = "    if (network_init(arena)) return 1; /* once */\n" if source.weights else ""
    weights = _DECODED.format(weights=source.weights, plain=plain.data) if source.weights else _CONSTANT
    return _README.format(
        inputs=source.inputs, shape=shape, outputs=source.outputs, arena=source.arena, data=source.data, init=init,
        weights=weights,
    )  # fmt: skip


_CONSTANT = """\
- Weights of ±c are added and subtracted; weights that were pruned take neither time nor space."""

_DECODED = """\
- The constant data has the coded masks and signs of the ticket. `network_init` decodes them into {weights:,} bytes of
  memory of its own (`NETWORK_WEIGHTS`). With `--weights offsets` the constant data has {plain:,} bytes, and
  needs no such memory. The outputs are the same, bit for bit.
- Weights of ±c are added and subtracted; weights that were pruned take no time."""

_README = """\
# A network as C

`network.c` and `network.h` are C99 without dependencies: no libraries, no `malloc`, no files.

    cc -std=c99 -O3 -march=native -ffp-contract=off -o example example.c network.c
    ./example < input.f32

`example.c` reads one input as {inputs} floats ({shape}, row by row, prepared as in training) and prints the {outputs}
outputs.

    static float arena[NETWORK_ARENA / sizeof(float)];
{init}    network_run(input, output, arena);

- Constant data: {data:,} bytes. Memory while it runs: {arena:,} bytes (`NETWORK_ARENA`), of which nothing has to be
  kept.
{weights}
- The compiler's vectors are used (`-march=native`, or `-mcpu=...`); `-DITERAND_VECTOR=1` is plain C. With
  `-ffp-contract=off` all of them give the same bits.
- Threads may call `network_run` at the same time, each with an arena of its own.
"""
