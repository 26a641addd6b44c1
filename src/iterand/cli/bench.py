"""``iterand bench``: the speed of training, tickets and inference on this machine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from iterand.checks import counted
from iterand.cli import options
from iterand.cli.console import out, print_json, progress_bar, warn
from iterand.cli.options import Json
from iterand.errors import IterandError
from iterand.lab.report.formatting import machine

_BENCHMARKS = {  # of options that not all benchmarks have
    "--network": ("step", "loop", "select", "randomize", "epoch", "ticket", "tasks", "inference"),
    "--execution": ("step", "loop", "inference"),
    "--batch-size": ("step", "loop", "augment", "epoch", "inference"),
    "--precision": ("step", "epoch"),
    "--size": ("select",),
    "--examples": ("augment", "epoch"),
    "--device cuda": ("step", "loop", "select", "randomize", "augment", "epoch"),
    "--data-dir": ("epoch",),
}
_MOST = 10**12  # more than any memory holds, and few enough that torch can count their bytes


def bench(
    name: Annotated[
        str | None,
        typer.Argument(
            help=f"{', '.join(options.BENCHMARKS)}; without a name, a short version of all.",
            autocompletion=options.completing(options.BENCHMARKS),
        ),
    ] = None,
    network: Annotated[
        list[str] | None,
        typer.Option(
            help="For all but augment: recipe whose network is measured, such as conv6; for loop and tasks also "
            "timm:NAME, bert and minilm; for inference also timm:NAME and a ticket's file; repeatable.",
            autocompletion=options.completing(options.recipes),
        ),
    ] = None,
    execution: Annotated[
        list[str] | None,
        typer.Option(
            help="For step: eager, or on a GPU 'graph', 'compiled graph' and others; for loop: eager, compiled or "
            "make_step; for inference: iterand, onnxruntime (both also with -int8), torch or compiled; repeatable."
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=_MOST,
            help="For step, loop, augment, epoch and inference: examples per step (default: 128; inference: 1 and 32).",
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="For step and epoch: float32 or bfloat16 (default: that of the recipe; on a CPU float32)."),
    ] = None,
    size: Annotated[
        list[int] | None, typer.Option(min=1, max=_MOST, help="For select: number of scores; repeatable.")
    ] = None,
    examples: Annotated[
        int | None,
        typer.Option(min=1, max=_MOST, help="For augment and epoch: number of examples (default: all; on a CPU few)."),
    ] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="How many times each is measured.")] = None,
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda or cuda:N; ticket, tasks and inference are measured on a CPU.")
    ] = "auto",
    data_dir: Annotated[Path | None, typer.Option(help="For epoch: folder of the data sets.")] = None,
    json: Json = False,
) -> None:
    """Measure the speed of training, tickets and inference on this machine."""
    from iterand.lab.benchmarks import catalog
    from iterand.lab.benchmarks.table import FAILED, Options
    from iterand.lab.training.environment import choose_device
    from iterand.lab.training.recipe import PRECISIONS

    chosen = [catalog.find(each) for each in ([name] if name is not None else catalog.BENCHMARKS)]
    if name is not None:
        given = {
            "--network": network,
            "--execution": execution,
            "--batch-size": batch_size,
            "--precision": precision,
            "--size": size,
            "--examples": examples,
            "--device cuda": device.startswith("cuda"),
            "--data-dir": data_dir,
        }
        _check_options(name, given)
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}")
    options = Options(
        device=choose_device(device),
        networks=tuple(network or ()),
        executions=tuple(execution or ()),
        batch_size=batch_size,
        precision=precision,
        repeats=repeats,
        sizes=tuple(size or ()),
        examples=examples,
        data_dir=data_dir,
        short=name is None,
    )
    with progress_bar() as progress:
        task = progress.add_task("measuring", total=None, note="")
        found = catalog.run(chosen, options, lambda now: progress.update(task, note=now))
    if json:
        print_json(found)
    else:
        _print(found)
    failed = [FAILED in row for result in found["benchmarks"].values() for row in result["rows"]]
    if all(failed):
        raise IterandError("nothing could be measured; the table says why")
    if any(failed):
        warn("some could not be measured; the table says why")


def _check_options(name: str, given: Mapping[str, object]) -> None:
    """Refuse options that the benchmark does not have."""
    for option, value in given.items():
        if value and name not in _BENCHMARKS[option]:
            raise ValueError(f"{option} is for {' or '.join(_BENCHMARKS[option])}, not for {name}; leave it out")


def _print(found: dict[str, Any]) -> None:
    environment = found["environment"]
    for name, result in found["benchmarks"].items():
        _print_table(name, result["rows"])
        for note in result["notes"]:
            out.print(note, highlight=False, style="dim")
        out.print()
    if found["targets"]:
        _print_table("targets", found["targets"])
        out.print()
    threads = counted(environment["hardware"]["threads"], "thread")
    out.print(
        f"{machine(environment)}, {threads}, torch {environment['torch']}, "
        f"Python {environment['python']}, iterand {environment['iterand']}; median (10th–90th percentile)",
        highlight=False,
    )


def _print_table(title: str, rows: list[dict[str, Any]]) -> None:
    """A table; or a block of lines for each row, where the columns do not fit without breaking words."""
    from iterand.lab.benchmarks.table import FAILED, NOTE, cell, columns, heading, is_number

    names = columns(rows)
    cells = [[cell(column, row.get(column)) for column in names] for row in rows]
    widths = []
    for column, found in zip(names, zip(*cells)):
        unbroken = " ".join(found).split() if column in (NOTE, FAILED) else found  # remarks are sentences
        widths.append(max(map(len, [*heading(column).split(), *unbroken])))
    if sum(widths) + 2 * len(widths) > out.width:
        out.print(title, style="bold", highlight=False)
        for row in cells:
            lines = Table.grid(padding=(0, 2))
            for column, value in zip(names, row):
                lines.add_row(f"[dim]{heading(column)}[/]", escape(value))
            out.print(lines)
            out.print()
        return
    table = Table(title=title, title_justify="left", box=None, header_style="bold", title_style="bold")
    for column, width in zip(names, widths):
        right = any(is_number(row.get(column)) for row in rows)
        table.add_column(heading(column), justify="right" if right else "left", min_width=width)
    for row in cells:
        table.add_row(*map(escape, row))
    out.print(table)
