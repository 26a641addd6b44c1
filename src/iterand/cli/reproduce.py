"""``iterand reproduce``: the experiments."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, TaskID
from rich.table import Table

from iterand.cli.console import err, out, print_json, progress_bar, size
from iterand.cli.train import DataDir, Device, Json
from iterand.experiments.catalog import Experiment, experiment_names, find_experiment
from iterand.experiments.local import Event, Task
from iterand.experiments.sweep import CellResult, run_experiment
from iterand.training.environment import choose_device, describe


def reproduce(
    experiment: Annotated[str | None, typer.Argument(help="Which one; without it they are listed.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each cell.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time [1 on a GPU, else one a core].")] = None,
    folder: Annotated[Path, typer.Option("--out", help="Folder of the runs.")] = Path("runs"),
    device: Device = "auto",
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Run an experiment: what is missing of it, that is, since complete runs are kept."""
    if experiment is None:
        _list(json)
        return
    found = find_experiment(experiment)
    where = choose_device(device)
    jobs = jobs or (1 if where.type == "cuda" else os.cpu_count() or 1)
    with progress_bar() as progress:
        watch = _Watch(progress, found, seeds or found.seeds)
        cells = run_experiment(
            found, folder, device=str(where), jobs=jobs, data_dir=data_dir, seeds=seeds, listen=watch
        )  # fmt: skip
    if json:
        print_json(
            {
                "experiment": found.name,
                "environment": describe(where),
                "cells": [cell.summary() for cell in cells],
            }
        )
    else:
        out.print(_table(found, cells))
    errors = [error for cell in cells for error in cell.errors]
    for error in errors:
        err.print(f"[red]failed:[/] {error}")
    if errors:
        raise typer.Exit(1)


class _Watch:
    """One bar for all runs of an experiment, and one for each that goes on."""

    def __init__(self, progress: Progress, experiment: Experiment, seeds: int) -> None:
        self.progress = progress
        self.total = len(experiment.cells) * seeds
        self.whole = progress.add_task(experiment.name, total=self.total, note="runs")
        self.bars: dict[Task, TaskID] = {}
        self.ended = 0

    def __call__(self, event: Event) -> None:
        if event.kind == "started":
            self.bars[event.task] = self.progress.add_task(f"  {event.task.label}", total=None, note="")
        elif event.kind == "progress":
            value = event.value
            note = f"loss {value['loss']:.3f}"
            self.progress.update(self.bars[event.task], total=value["total"], completed=value["done"], note=note)
        else:
            self.ended += 1
            self.progress.remove_task(self.bars.pop(event.task))
            self.progress.advance(self.whole)
            if not err.is_terminal:
                err.print(
                    f"{self.ended}/{self.total} {event.task.label}: {_outcome(event)}", highlight=False, soft_wrap=True
                )


def _outcome(event: Event) -> str:
    if event.kind == "failed":
        return str(event.value["error"])
    return f"test accuracy {event.value['result']['test_accuracy']:.2f} %"


def _list(json: bool) -> None:
    experiments = [find_experiment(name) for name in experiment_names()]
    if json:
        runs = {entry.name: {"title": entry.title, "runs": len(entry.cells) * entry.seeds} for entry in experiments}
        print_json(runs)
        return
    table = Table("experiment", "runs", "what it shows", box=None, header_style="bold")
    for entry in experiments:
        table.add_row(entry.name, str(len(entry.cells) * entry.seeds), entry.title)
    out.print(table)


def _table(experiment: Experiment, cells: list[CellResult]) -> Table:
    table = Table(title=experiment.title)
    table.add_column("method")
    for column in ("weights trained", "test accuracy", "weights kept", "as float32", "as a ticket"):
        table.add_column(column, justify="right")
    for cell in cells:
        row = cell.summary()
        if not row["n"]:
            table.add_row(cell.label, "", "failed")
            continue
        spread = "" if row["test_accuracy_std"] is None else f" ± {row['test_accuracy_std']:.2f}"
        table.add_row(
            cell.label,
            "yes" if row["method"] == "sgd" else "never",
            f"{row['test_accuracy_mean']:.2f}{spread} % (n = {row['n']})",
            f"{row['kept']:,} of {row['weights']:,}",
            size(row["float32_bytes"]),
            size(row["ticket_bytes"]) if row["ticket_bytes"] else "—",
        )
    return table
