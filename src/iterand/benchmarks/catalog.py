"""The benchmarks by name."""

import contextlib
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

import torch

from iterand.benchmarks import augment, epoch, randomize, select, step, ticket
from iterand.benchmarks.options import Options
from iterand.benchmarks.table import Notify, Table
from iterand.benchmarks.targets import verdicts
from iterand.checks import unknown
from iterand.training.environment import describe

FORMAT = "iterand benchmark 1"

Benchmark = Callable[[Options, Notify], Table]

BENCHMARKS: dict[str, Benchmark] = {
    "step": step.measure,
    "select": select.measure,
    "randomize": randomize.measure,
    "augment": augment.measure,
    "epoch": epoch.measure,
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
