"""``export_c``: a folder with the network of a ticket as C, which any compiler builds without this package."""

import os
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor, nn

from iterand.errors import IterandError
from iterand.inference.c.emitter import Source, emit
from iterand.inference.compiled import Library, build, find_compiler
from iterand.inference.graph import Graph, trace

# Allowed difference to torch, relative to the largest output: sums are taken in another order.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class CExport:
    """Result of an export."""

    bytes: int
    """Of constant data: weights, scales and shifts."""
    arena: int
    """Bytes of memory that the network needs while it runs."""
    difference: float | None
    """Largest difference to torch's outputs, relative to the largest output; None without a compiler to check it."""


def export_c(model: nn.Module, example: Tensor, folder: str | os.PathLike[str]) -> CExport:
    """Write ``network.h``, ``network.c``, ``example.c`` and a README, and compare the network's outputs with torch's.

    Args:
        model: The network, from ``load_ticket``.
        example: A batch of inputs.
        folder: The folder to write; a missing one is created.
    """
    graph = trace(model, example)
    source = emit(graph, coded=True)
    difference = _difference(source, model, example)
    if difference is not None and not difference <= _TOLERANCE:
        raise IterandError(f"the outputs in C differ from torch's by {difference:g} of the largest; nothing is written")
    example_c = resources.files("iterand.inference.c").joinpath("example.c").read_text(encoding="utf-8")
    files = {"network.h": source.header, "network.c": source.code, "example.c": example_c}
    _write(Path(folder), files | {"README.md": _readme(graph, source)})
    return CExport(source.data, source.arena, difference)


def _difference(source: Source, model: nn.Module, example: Tensor) -> float | None:
    compiler = find_compiler()
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory(prefix="iterand-", ignore_cleanup_errors=True) as folder:
        found = torch.from_numpy(Library(build(source, compiler, Path(folder)), source)(example.numpy(), 1))
    with torch.no_grad():
        expected = model.eval()(example).reshape(found.shape)
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(torch.finfo(torch.float32).tiny))


def _write(folder: Path, files: dict[str, str]) -> None:
    """Write all files beside the folder first, so that it never has half of them."""
    if folder.exists() and not folder.is_dir():
        raise IterandError(f"{folder} is a file; give the name of a folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        for name, text in files.items():
            (Path(temporary) / name).write_text(text, encoding="utf-8")
        folder.mkdir(exist_ok=True)
        for name in files:
            (Path(temporary) / name).replace(folder / name)


def _readme(graph: Graph, source: Source) -> str:
    shape = " × ".join(map(str, graph.input.shape))
    return _README.format(
        inputs=source.inputs, shape=shape, outputs=source.outputs, arena=source.arena, data=source.data
    )  # fmt: skip


_README = """\
# A network as C

`network.c` and `network.h` are C99 without dependencies: no libraries, no `malloc`, no files.

    cc -std=c99 -O3 -march=native -ffp-contract=off -o example example.c network.c
    ./example < input.f32

`example.c` reads one input as {inputs} floats ({shape}, row by row, prepared as in training) and prints the {outputs}
outputs.

    static float arena[NETWORK_ARENA / sizeof(float)];
    network_run(input, output, arena);

- Constant data: {data:,} bytes. Memory while it runs: {arena:,} bytes (`NETWORK_ARENA`), of which nothing has to be
  kept.
- Weights of ±c are added and subtracted, one byte each; weights that were pruned take neither time nor space.
- The compiler's vectors are used (`-march=native`, or `-mcpu=...`); `-DITERAND_VECTOR=1` is plain C. With
  `-ffp-contract=off` all of them give the same bits.
- Threads may call `network_run` at the same time, each with an arena of its own.
"""
