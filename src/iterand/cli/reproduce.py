"""``iterand reproduce``: run the experiments of the paper, several runs at a time."""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich import box
from rich.table import Table

from iterand.checks import counted
from iterand.cli import options
from iterand.cli.console import err, out, print_json, warn
from iterand.cli.options import DataDir, Json
from iterand.cli.runs_table import watching
from iterand.cli.train import Compile, Device, Graph
from iterand.lab.report.formatting import plus_minus, size
from iterand.lab.training.environment import Interrupted

if TYPE_CHECKING:
    from iterand.lab.experiments.experiment import Experiment
    from iterand.lab.experiments.local import Task
    from iterand.lab.experiments.sweep import CellResult, Engine

_OWN_COLUMNS = ("trained", "test accuracy (%)", "weights kept", "float32", "ticket")
_RANDOMIZATION = "a randomization (ms)"
_LABEL = 24  # the least width of labels


def reproduce(
    experiment: Annotated[
        str | None,
        typer.Argument(
            help="Name of an experiment; without it, all are listed.",
            autocompletion=options.completing(options.EXPERIMENTS),
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Run all experiments.")] = False,
    profile: Annotated[
        str,
        typer.Option(
            help="Settings: paper (the authors'), text (those of the appendix), best (ours).",
            autocompletion=options.completing(options.PROFILES),
        ),
    ] = "paper",
    patterns: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="PATTERN",
            help="Run only cells (numbers of a table) whose EXPERIMENT/LABEL matches (* and ? are wildcards); LABEL "
            "alone is enough if an experiment is named. Repeatable.",
        ),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(help="full, or tiny for a dry run on a CPU.", autocompletion=options.completing(options.SCALES)),
    ] = "full",
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs per cell (default: as many as in the paper).")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time (default: 1 on a GPU, one per core on a CPU).")
    ] = None,
    engine: Annotated[str, typer.Option(help="local, or ray for a cluster.")] = "local",
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="With Ray: address of a cluster, or auto for that of this machine (default: start one here).",
        ),
    ] = None,
    gpus_per_run: Annotated[
        float | None, typer.Option(help="With Ray: share of a GPU per run (default: 1, or less if --jobs needs it).")
    ] = None,
    folder: Annotated[Path, typer.Option("--out", callback=options.named, help="Folder of the runs.")] = Path("runs"),
    device: Device = "auto",
    data_dir: DataDir = None,
    compile: Compile = None,
    graph: Graph = True,
    json: Json = False,
) -> None:
    """Run the experiments of the paper, and ours. Complete runs are not repeated, and interrupted ones resume."""
    if experiment is not None and everything:
        raise ValueError(f"--all runs every experiment, and {experiment!r} is one of them; give one of the two")
    from iterand.lab.experiments.catalog import experiment_names, find_experiment
    from iterand.lab.experiments.sweep import Sweep, only
    from iterand.lab.training.steps import Execution

    chosen = [experiment] if experiment is not None else experiment_names()
    found = [find_experiment(name, profile=profile, scale=scale) for name in chosen]
    if experiment is None and not everything and not patterns:
        _list(found, json)
        return
    if patterns:
        found = only(found, *patterns)
    sweep: Sweep | None = None
    try:
        with _place(engine, device, jobs, address, gpus_per_run) as place:
            execution = Execution(compile=compile, graph=graph)
            sweep = Sweep(
                found, folder, device=place.device, data_dir=data_dir, seeds=seeds, execution=execution
            )  # fmt: skip
            with watching(sweep.tasks) as watch:
                sweep.run(place.jobs or len(sweep), watch, place.engine)
    except (KeyboardInterrupt, Interrupted):
        if sweep is None or not any(map(_is_saved, sweep.tasks)):
            raise KeyboardInterrupt from None  # nothing was saved
        raise Interrupted from None
    if json:
        cells = {name: [cell.summary() for cell in cells] for name, cells in sweep.results.items()}
        entries: list[dict[str, Any]] = [{"experiment": name, "cells": rows} for name, rows in cells.items()]
        shown = entries[0] if experiment is not None else {"experiments": entries}
        print_json({"environment": place.environment, "profile": profile, "scale": scale, **shown})
    else:
        for entry in found:
            table = _table(entry, sweep.results[entry.name], scale)
            least = out.measure(table, options=out.options.update(width=1000)).minimum
            if least > out.width:
                table.width = least  # lines run over: what is cut off could not be read
            out.print(table, crop=False)
    for error, (first, *others) in sweep.failures.items():
        more = f" and {counted(len(others), 'more run')}" if others else ""
        warn(f"{first.label}{more}: {error}", "[red]failed:[/]")
    if sweep.failures:
        raise typer.Exit(1)


def _is_saved(task: "Task") -> bool:
    """Whether a run can be resumed, or is complete."""
    from iterand.lab.training.checkpoint import CHECKPOINT
    from iterand.lab.training.folder import RECORD

    return any((task.folder / name).exists() for name in (CHECKPOINT, RECORD))


class _Place(NamedTuple):
    """Where runs are executed: the device, how many at a time (None: as many as fit), the engine."""

    device: str
    jobs: int | None
    engine: "Engine | None"
    environment: dict[str, Any]


@contextmanager
def _place(
    engine: str,
    device: str,
    jobs: int | None,
    address: str | None,
    gpus_per_run: float | None,
) -> Iterator[_Place]:
    import torch

    from iterand.lab.experiments.cluster import connected
    from iterand.lab.experiments.local import run_tasks
    from iterand.lab.training.environment import choose_device, describe
    from iterand.lab.training.folder import require_writers

    if engine not in ("local", "ray"):
        raise ValueError(f"unknown engine {engine!r}; it must be local or ray")
    if engine == "ray":
        # Ray prints its messages to stdout, which is for results.
        with redirect_stdout(sys.stderr), connected(address, jobs) as cluster:
            where = cluster.device(device)
            gpus = cluster.gpus_per_run(gpus_per_run, where, jobs)
            # Each record describes its own machine; this is the one that runs the command.
            environment = describe(torch.device("cpu")) | {"device": where}
            try:
                yield _Place(where, jobs, partial(cluster.run_tasks, gpus=gpus), environment)
            except Interrupted:
                err.print("stopping: checkpoints of the running runs are being saved")
                raise
        return
    for option, value in (("--address", address), ("--gpus-per-run", gpus_per_run)):
        if value is not None:
            raise ValueError(f"{option} {value} says something to Ray only; add --engine ray, or leave it out")
    require_writers()
    chosen = choose_device(device)
    at_a_time = jobs or (1 if chosen.type == "cuda" else os.cpu_count() or 1)
    with _sigterm_as_ctrl_c():
        yield _Place(str(chosen), at_a_time, run_tasks, describe(chosen))


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Let SIGTERM stop the runs as Ctrl-C does; they would continue without this process."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _list(experiments: Sequence["Experiment"], json: bool) -> None:
    from iterand.lab.experiments.sweep import distinct_runs, gpu_minutes

    runs = {entry.name: distinct_runs([entry]) for entry in experiments}
    if json:
        print_json(
            {
                entry.name: {
                    "title": entry.title,
                    "where": entry.where,
                    "cells": len(entry.cells),
                    "runs": len(runs[entry.name]),
                    "gpu_minutes": gpu_minutes(runs[entry.name]),
                }
                for entry in experiments
            }
        )
        return
    table = Table(box=None, header_style="bold")
    for column in ("experiment", "runs", "GPU time (rough)", "in the paper", "what it shows"):
        table.add_column(column, justify="right" if column in ("runs", "GPU time (rough)") else "left")
    for entry in experiments:
        cost = _duration(gpu_minutes(runs[entry.name]))
        table.add_row(entry.name, str(len(runs[entry.name])), cost, entry.where, entry.title)
    together = distinct_runs(experiments)
    table.add_row("--all", str(len(together)), _duration(gpu_minutes(together)), "", "every run once")
    out.print(table)


def _duration(minutes: float) -> str:
    if minutes < 1:
        return "< 1 min"
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:,.0f} h"


def _table(experiment: "Experiment", cells: list["CellResult"], scale: str) -> Table:
    from iterand.lab.report.assembly import measure

    table = Table(title=experiment.title, title_justify="left", box=box.SIMPLE)
    if scale != "full":
        table.caption = f"{scale}: a dry run, the numbers mean nothing"
    measured = measure(experiment).title
    rows = [cell.summary() for cell in cells]
    columns = list(_OWN_COLUMNS)
    if not experiment.where and scale == "full":
        counts = sorted({row["n"] for row in rows if row["n"]})
        table.caption = f"mean ± standard deviation, n = {' to '.join(map(str, counts[:1] + counts[1:][-1:]))}"
    if experiment.where:  # cells of the paper
        columns = [measured, "n", "paper", "ticket", _RANDOMIZATION]
        if not any(row["paper"] for row in rows):
            columns.remove("paper")
        if experiment.measure != "seconds":
            columns.remove(_RANDOMIZATION)
    longest = max((len(row["label"]) for row in rows), default=0)
    table.add_column("cell" if experiment.where else "method", min_width=min(longest, _LABEL))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)  # where lines are short, labels wrap and numbers do not
    for row in rows:
        if not row["n"]:
            table.add_row(row["label"], "failed")
            continue
        milliseconds = row["randomization_milliseconds"]
        texts = {
            "trained": "yes" if row["trains_weights"] else "never",
            measured: plus_minus(row["mean"], row["std"]),
            "n": str(row["n"]),
            _RANDOMIZATION: f"{milliseconds:.2f}" if milliseconds else "—",
            "paper": plus_minus(row["paper"]["mean"], row["paper"]["std"]) if row["paper"] else "",
            "weights kept": f"{row['kept']:,} / {row['weights']:,}",
            "float32": size(row["float32_bytes"]),
            "ticket": size(row["ticket_bytes"]) if row["ticket_bytes"] else "—",
        }
        table.add_row(row["label"], *(texts[column] for column in columns))
    for numbers in table.columns[1:]:
        numbers.min_width = max(map(len, map(str, (numbers.header, *numbers.cells))))
    return table
