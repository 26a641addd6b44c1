"""``iterand reproduce``: the experiments."""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from iterand.cli.console import ProgressObserver, err, out, print_json, progress_bar, size
from iterand.cli.train import DataDir, Device, Json
from iterand.experiments.catalog import Cell, Experiment, experiment_names, find_experiment
from iterand.experiments.sweep import CellResult, run_experiment
from iterand.training.environment import choose_device, describe
from iterand.training.recipe import Recipe


def reproduce(
    experiment: Annotated[str | None, typer.Argument(help="Which one; without it they are listed.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each cell.")] = None,
    folder: Annotated[Path, typer.Option("--out", help="Folder of the runs.")] = Path("runs"),
    device: Device = "auto",
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Run an experiment: what is missing of it, that is, since complete runs are kept."""
    if experiment is None:
        _list(json)
        return
    found, where = find_experiment(experiment), choose_device(device)
    with progress_bar() as progress:
        watch = _Watch(progress, found, seeds or found.seeds)
        cells = run_experiment(found, folder, device=where, data_dir=data_dir, seeds=seeds, observe=watch)
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
    """One bar for all runs of an experiment, and one for the run that goes on."""

    def __init__(self, progress: Progress, experiment: Experiment, seeds: int) -> None:
        self.progress = progress
        self.whole = progress.add_task(experiment.name, total=len(experiment.cells) * seeds, note="runs")
        self.current: ProgressObserver | None = None

    def __call__(self, cell: Cell, recipe: Recipe) -> ProgressObserver:
        if self.current is not None:
            self.current.close()
            self.progress.advance(self.whole)
        self.current = ProgressObserver(self.progress, f"  {cell.label}, seed {recipe.seed}")
        return self.current


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
