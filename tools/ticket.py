"""Size of tickets beside their entropy bound and other ways to store a network; where the time of writing one goes.

    python tools/ticket.py --output results/records/benchmarks/ticket.json [--only sizes|speed|table|draws]

The networks are searched by moving their scores at random, not by training: what a ticket costs depends on how many
weights are kept and how often they were redrawn, not on what the network has learned. ``zstandard`` is needed for the
table only.
"""

import argparse
import cProfile
import importlib.metadata
import json
import os
import platform
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import iterand
from iterand.lab.benchmarks.ticket import searched
from iterand.lab.networks import build_network
from iterand.lab.training.environment import compute_settings
from iterand.summarizing import entropy
from iterand.ticket.inspect import cost

SHAPES = {"conv6": 0.5, "resnet18_cifar": 0.6, "resnet50_imagenet": 0.7}
WIDTHS = {"conv6": (0.25, 0.5), "resnet18_cifar": (0.25, 0.5)}  # besides 1
SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
# Stage → the functions it is made of: (file, name). None of them calls another.
WRITING = {
    "masks from scores, kept weights": [("encode.py", "_mask_layers")],
    "levels or draws, checked": [("encode.py", "_stored_symbols")],
    "entropy coding": [("codec.py", "encode")],
    "digest of the weights": [("draws.py", "update")],
    "header, checksum": [("format.py", "pack"), ("header.py", "to_json"), ("header.py", "from_json")],
    "to disk": [("files.py", "atomic_write")],
}
LOADING = {
    "read, checksum, header": [("read.py", "read_ticket")],
    "network laid out": [("load.py", "_build_network")],
    "entropy decoding": [("codec.py", "decode")],
    "digest of the weights": [("draws.py", "update")],
}


def measured(model: nn.Module, name: str, width: float = 1.0) -> dict[str, Any]:
    """What the ticket of a model costs, and that it gives the model back."""
    recipe = {"network": {"name": name, "width_factor": width}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.ticket"
        seconds = {"write": _timed(lambda: iterand.save_ticket(model, path, recipe=recipe))}
        seconds["load"] = _timed(lambda: iterand.load_ticket(path))
        plain = iterand.load_ticket(path).state_dict()
        costs = cost(iterand.read_ticket(path))
    folded = iterand.fold_(model).state_dict()
    if not all(torch.equal(folded[key], plain[key]) for key in folded):
        raise SystemExit(f"{name} did not come back")
    weights, kept = sum(layer.weights for layer in costs.layers), sum(layer.kept for layer in costs.layers)
    masks = sum(entropy([layer.kept, layer.weights - layer.kept]) for layer in costs.layers)
    return {
        "network": name,
        "width_factor": width,
        "weights": weights,
        "kept": kept,
        "stored": sorted({layer.stored for layer in costs.layers}),
        "float32_bytes": costs.float32,
        "ticket_bytes": costs.file,
        "bits_a_weight": 8 * costs.file / weights,
        "mask_entropy_bytes": masks / 8,
        "mask_and_one_bit_bytes": (masks + kept) / 8,
        "other_tensor_bytes": costs.other_tensors,
        "entropy_bound_bytes": costs.bound,
        "over_bound_percent": 100 * (costs.file / costs.bound - 1),
        "over_mask_and_one_bit_percent": 100 * (costs.file / ((masks + kept) / 8 + costs.other_tensors) - 1),
        "kept_redrawn_percent": _share(sum(layer.redrawn or 0 for layer in costs.layers), kept, costs.layers),
        "seconds": seconds,
    }


def sizes() -> list[dict[str, Any]]:
    """The paper's networks, SC, redrawn so often that signs are the cheaper thing to store."""
    rows = []
    for name, p in SHAPES.items():
        for width in (*WIDTHS.get(name, ()), 1.0):
            model = searched(build_network(name, width_factor=width), p, "signed_constant", 3, 0.9, 2.0)
            rows.append(measured(model, name, width) | {"sparsity": p})
    return rows


def draws() -> list[dict[str, Any]]:
    """KU after 117 rounds at r = .1, p = .6, as in the paper's CIFAR-10 runs, on the weights of Conv6.

    From masks that hardly move to masks that are drawn anew every round.
    """
    rows = []
    for step in (0.1, None):
        model = searched(build_network("conv6"), 0.6, "kaiming_uniform", 117, 0.1, step)
        rows.append(measured(model, "conv6") | {"sparsity": 0.6, "rounds": 117, "rate": 0.1, "step": step})
    return rows


def table() -> list[dict[str, Any]]:
    """Conv6, SC, at many sparsities, beside other ways to store it."""
    import zstandard

    rows = []
    for p in SPARSITIES:
        model = searched(build_network("conv6"), p, "signed_constant", 3, 0.9, 2.0)
        row = measured(model, "conv6")
        state = model.state_dict()  # measured folded it
        dense = b"".join(tensor.numpy().tobytes() for tensor in state.values())
        row["float16_bytes"] = len(dense) // 2
        row["zstd_float32_bytes"] = len(zstandard.ZstdCompressor(level=19).compress(dense))
        rows.append(row | {"sparsity": p})
    return rows


def speed(repeats: int = 5) -> dict[str, Any]:
    """Write and load a ResNet50-shaped ticket on one core: the first time, the median, and the share of each stage."""
    name = "resnet50_imagenet"
    model = searched(build_network(name), SHAPES[name], "signed_constant", 3, 0.9, 2.0)
    with tempfile.TemporaryDirectory() as folder, compute_settings(threads=1):
        path = Path(folder) / "a.ticket"

        def write() -> None:
            iterand.save_ticket(model, path, recipe={"network": {"name": name}})

        def load() -> None:
            iterand.load_ticket(path)

        return {
            "network": name,
            "threads": torch.get_num_threads(),
            "write": _stages(write, WRITING, repeats),
            "load": _stages(load, LOADING, repeats),
        }


def _stages(action: Callable[[], None], stages: dict[str, list[tuple[str, str]]], repeats: int) -> dict[str, Any]:
    first = _timed(action)
    times = [_timed(action) for _ in range(repeats)]
    profile = cProfile.Profile()
    profile.runcall(action)
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    total = max(entry[3] for entry in stats.values())
    called = {(Path(file).name, function) for file, _, function in stats}
    if missing := {part for parts in stages.values() for part in parts} - called:
        raise SystemExit(f"not called, so they are no part of a stage: {missing}")
    shares = {
        stage: round(100 * sum(entry[3] for (file, _, function), entry in stats.items()
                               if (Path(file).name, function) in parts) / total, 1)
        for stage, parts in stages.items()
    }  # fmt: skip
    return {
        "first_seconds": round(first, 3),
        "median_seconds": round(statistics.median(times), 3),
        "share_percent": shares | {"the rest": round(100 - sum(shares.values()), 1)},
    }


def _timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _share(redrawn: int, kept: int, layers: Any) -> float | None:
    return None if any(layer.redrawn is None for layer in layers) else 100 * redrawn / kept


def main() -> None:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", choices=("sizes", "speed", "table", "draws"), action="append")
    arguments = parser.parse_args()
    record: dict[str, Any] = {}
    if arguments.output and arguments.output.exists():
        record = json.loads(arguments.output.read_text())
    record["machine"] = {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "numpy")},
    }
    for part in (speed, sizes, table, draws):
        if arguments.only is None or part.__name__ in arguments.only:
            record[part.__name__] = part()
            print(json.dumps({part.__name__: record[part.__name__]}, indent=1))
            if arguments.output:
                arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
