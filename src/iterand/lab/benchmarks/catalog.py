"""The benchmarks by name, and the targets they are held to."""

import contextlib
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from iterand.checks import unknown
from iterand.lab.benchmarks import epoch, operations, step, ticket
from iterand.lab.benchmarks.operations import CUT_KNOWN
from iterand.lab.benchmarks.table import Notify, Options, Table
from iterand.lab.training.environment import describe

_USUAL = "graph"
_SEARCHES = ("edge_popup", "iterand")


@dataclass(frozen=True)
class Target:
    """No row of a benchmark with these values may be above the limit in this column."""

    benchmark: str
    rows: dict[str, Any]
    column: str
    limit: float
    gpu: str | None = ""
    """A word in the name of the GPU that it is meant for; None for a processor."""

    def fits(self, hardware: Mapping[str, Any]) -> bool:
        """Whether it is meant for this machine."""
        return "gpu" not in hardware if self.gpu is None else "gpu" in hardware and self.gpu in hardware["gpu"]


def _masked(network: str, limit: float, execution: str = _USUAL, gpu: str | None = "") -> Iterator[Target]:
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
    Target("step", {"network": "resnet18", "execution": _USUAL, "method": "sgd"}, "milliseconds", 2.39, "H200"),
    # What a round adds to training: its cut is the one that the next step begins with, found once.
    Target("randomize", {"network": "resnet18", "what": CUT_KNOWN}, "milliseconds", 0.1, "H200"),
    Target("randomize", {"network": "resnet50", "what": CUT_KNOWN}, "milliseconds", 0.2, "H200"),
)


def verdicts(environment: Mapping[str, Any], tables: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each target that was measured here: its limit, what came out (of several times the median), whether it is met."""
    found = []
    for target in TARGETS:
        for row in tables.get(target.benchmark, {}).get("rows", ()) if target.fits(environment["hardware"]) else ():
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


FORMAT = "iterand benchmark 1"

Benchmark = Callable[[Options, Notify], Table]

BENCHMARKS: dict[str, Benchmark] = {
    "step": step.measure,
    "select": operations.measure_select,
    "randomize": operations.measure_randomize,
    "augment": epoch.measure_augment,
    "epoch": epoch.measure_epoch,
    "ticket": ticket.measure,
}


def find(name: str) -> Benchmark:
    """The benchmark of this name."""
    if name not in BENCHMARKS:
        raise ValueError(unknown("benchmark", name, BENCHMARKS))
    return BENCHMARKS[name]


def run(benchmarks: Sequence[Benchmark], options: Options, notify: Notify) -> dict[str, Any]:
    """The record of some benchmarks: all that a reader of the numbers needs."""
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
