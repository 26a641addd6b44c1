"""The benchmarks by name, running them, and the targets they must meet."""

import contextlib
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from iterand.checks import unknown
from iterand.lab.benchmarks import epoch, inference, loop, operations, step, tasks, ticket
from iterand.lab.benchmarks.operations import CUT_KNOWN
from iterand.lab.benchmarks.table import Notify, Options, Table
from iterand.lab.training.environment import describe

FORMAT = "iterand benchmark 1"
_EXECUTION = "graph"
_SEARCHES = ("edge_popup", "iterand")

Benchmark = Callable[[Options, Notify], Table]

BENCHMARKS: dict[str, Benchmark] = {
    "step": step.measure,
    "loop": loop.measure,
    "select": operations.measure_select,
    "randomize": operations.measure_randomize,
    "augment": epoch.measure_augment,
    "epoch": epoch.measure_epoch,
    "ticket": ticket.measure,
    "tasks": tasks.measure,
    "inference": inference.measure,
}


def find(name: str) -> Benchmark:
    """The benchmark of this name."""
    if name not in BENCHMARKS:
        raise ValueError(unknown("benchmark", name, BENCHMARKS))
    return BENCHMARKS[name]


def run(benchmarks: Sequence[Benchmark], options: Options, notify: Notify) -> dict[str, Any]:
    """Run some benchmarks: their tables, the environment, and the targets, as one record."""
    with torch.cuda.device(options.device) if options.on_gpu else contextlib.nullcontext():
        measured = [measure(options, notify) for measure in benchmarks]
    environment = describe(options.device) | {"triton": _version("triton")}
    tables = {table.name: table.as_dict() for table in measured}
    return {
        "format": FORMAT,
        "environment": environment,
        "benchmarks": tables,
        "targets": verdicts(environment, tables),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Target:
    """An upper limit for a column of a benchmark, in all rows with these values."""

    benchmark: str
    rows: dict[str, Any]
    column: str
    limit: float
    gpu: str | None = ""
    """A word in the name of the GPU that it applies to; None for CPUs."""

    def applies(self, hardware: Mapping[str, Any]) -> bool:
        """Whether it applies to this machine."""
        return "gpu" not in hardware if self.gpu is None else "gpu" in hardware and self.gpu in hardware["gpu"]


def _masked(network: str, limit: float, execution: str = _EXECUTION, gpu: str | None = "") -> Iterator[Target]:
    for method in _SEARCHES:
        rows = {"network": network, "execution": execution, "method": method, "batch": 128}
        yield Target("step", rows, "ratio_to_dense", limit, gpu)
        if gpu is not None:
            yield Target("step", rows, "memory_ratio", 1.05, gpu)
            yield Target("step", rows, "host_syncs", 0, gpu)


TARGETS = (
    *_masked("conv6", 1.06),
    *_masked("resnet18", 1.03),
    *_masked("resnet50", 1.03),
    *_masked("conv6", 1.10, "eager", None),
    *(
        Target("loop", {"network": network, "execution": "make_step", "method": "masked"}, "ratio_to_dense", 1.05)
        for network in ("timm:resnet18", "timm:resnet50", "timm:vit_tiny_patch16_224", "bert")
    ),
    Target("loop", {"network": "resnet18", "execution": "make_step", "method": "masked"}, "memory_ratio", 1.05),
    Target("loop", {"network": "resnet18", "execution": "eager", "method": "masked"}, "ratio_to_dense", 1.3),
    Target("loop", {"execution": "eager", "method": "masked"}, "ratio_to_dense", 1.15, None),
    Target("step", {"network": "resnet18", "execution": _EXECUTION, "method": "sgd"}, "milliseconds", 2.39, "H200"),
    # The redraw alone.
    Target("randomize", {"network": "resnet18", "what": CUT_KNOWN}, "milliseconds", 0.1, "H200"),
    Target("randomize", {"network": "resnet50", "what": CUT_KNOWN}, "milliseconds", 0.2, "H200"),
)


def verdicts(environment: Mapping[str, Any], tables: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The targets that apply and were measured: limit, measured value (a median), and whether the target is met."""
    found = []
    for target in TARGETS:
        for row in tables.get(target.benchmark, {}).get("rows", ()) if target.applies(environment["hardware"]) else ():
            value = row.get(target.column)
            if value is not None and all(row.get(name) == wanted for name, wanted in target.rows.items()):
                measured = value["median"] if isinstance(value, Mapping) else value
                what = ", ".join(str(wanted) for name, wanted in target.rows.items() if name != "batch")
                found.append(
                    {
                        "benchmark": target.benchmark,
                        "what": what,
                        "column": target.column,
                        "limit": target.limit,
                        "measured": measured,
                        "met": measured <= target.limit,
                    }
                )
    return found
