"""``iterand reproduce``: run the experiments of the paper, several runs at a time."""

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich import box
from rich.console import Group
from rich.live import Live
from rich.progress import TaskID
from rich.table import Table

from iterand.cli import options
from iterand.cli.console import err, out, print_json, progress_bar, say, warn
from iterand.cli.options import DataDir, Json
from iterand.cli.train import Compile, Device, Graph
from iterand.lab.report.formatting import plus_minus, size
from iterand.lab.training.environment import Interrupted

if TYPE_CHECKING:
    from iterand.lab.experiments.experiment import Experiment
    from iterand.lab.experiments.local import Event, Task
    from iterand.lab.experiments.sweep import CellResult, Engine

_OWN_COLUMNS = ("trained", "test accuracy (%)", "weights kept", "float32", "ticket")
_RANDOMIZATION = "a randomization (ms)"
_STATES = ("pending", "running", "done", "failed")
_STATE_AFTER = {"started": "running", "progress": "running", "done": "done", "failed": "failed"}
_MOST_BARS = 12  # the rest of the runs is only counted
_SECONDS_A_LINE = 30.0  # where progress goes to a file instead of a terminal


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
            help="Run only cells (numbers of a table) whose EXPERIMENT/LABEL fits (* and ?); repeatable.",
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
            out.print(_table(entry, sweep.results[entry.name], scale))
    errors = dict.fromkeys(error for cells in sweep.results.values() for cell in cells for error in cell.errors)
    for error in errors:
        warn(error, "[red]failed:[/]")
    if errors:
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
    table.add_column("cell" if experiment.where else "method", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
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
    return table


# Progress of the runs


@contextmanager
def watching(tasks: Sequence["Task"]) -> Iterator["RunsTable"]:
    """A live table of these runs on stderr, updated by calling it with events; lines where stderr is no terminal."""
    table = RunsTable(tasks)
    if not err.is_terminal:
        yield table
        return
    with Live(table, console=err, transient=True):
        yield table


class RunsTable:
    """The state and progress of each run."""

    def __init__(self, tasks: Sequence["Task"]) -> None:
        self.states = dict.fromkeys(tasks, "pending")
        self.progress = progress_bar()
        self.bars: dict[Task, TaskID] = {}
        self._printed = time.monotonic()

    def __call__(self, event: "Event") -> None:
        """Update the table by an event."""
        self.states[event.task] = _STATE_AFTER[event.kind]
        if event.kind == "started":
            self._remove_bar(event.task)  # the run lost its worker and is restarted
            note = f"on {event.value['host']}" if "host" in event.value else ""
            self.bars[event.task] = self.progress.add_task(event.task.label, total=None, note=note)
        elif event.kind == "progress":
            value = event.value
            note = f"loss {value['loss']:.3f}" if "loss" in value else ""
            bar = {"total": value["total"], "completed": value["done"], "note": note}
            self.progress.update(self.bars[event.task], **bar)
        else:
            self._remove_bar(event.task)
        for number, bar_id in enumerate(self.bars.values()):
            self.progress.update(bar_id, visible=number < _MOST_BARS)
        if not err.is_terminal:
            self._print_line(event)

    def __rich__(self) -> Group:
        """A row per experiment, and a bar per run."""
        table = Table("", *_STATES, box=None, header_style="bold")
        for column in table.columns[1:]:
            column.justify = "right"
        of_experiments: dict[str, Counter[str]] = {}
        for task, state in self.states.items():
            of_experiments.setdefault(task.label.partition("/")[0], Counter())[state] += 1
        for name, count in of_experiments.items():
            table.add_row(name, *(str(count[state]) for state in _STATES))
        return Group(table, self.progress)

    def _remove_bar(self, task: "Task") -> None:
        bar = self.bars.pop(task, None)
        if bar is not None:
            self.progress.remove_task(bar)

    def _print_line(self, event: "Event") -> None:
        """A line for each run that ends, and one from time to time."""
        count = Counter(self.states.values())
        if event.kind in ("done", "failed"):
            ended = f"{count['done'] + count['failed']}/{len(self.states)}"
            line = f"{ended} {event.task.label}: {_outcome(event)}"
        elif time.monotonic() - self._printed > _SECONDS_A_LINE:
            line = ", ".join(f"{count[state]} {state}" for state in _STATES)
        else:
            return
        self._printed = time.monotonic()
        say(line, to=err)


def _outcome(event: "Event") -> str:
    if event.kind == "failed":
        return str(event.value["error"])
    return f"test accuracy {event.value['result']['test_accuracy']:.2f} %"
