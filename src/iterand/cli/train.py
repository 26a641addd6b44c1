"""``iterand train``, ``evaluate`` and ``recipes``."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from iterand.cli import options
from iterand.cli.console import ProgressObserver, err, out, print_json, progress_bar, say, write
from iterand.errors import IterandError
from iterand.lab.report.formatting import size

if TYPE_CHECKING:
    from iterand.lab.training.distributed import Ranks

_complete = options.completing(options.recipes)

Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
DataDir = Annotated[Path | None, typer.Option(help="Where data sets lie.")]
Compile = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="On a GPU: compile the network; if not said, in long runs on ImageNet.",
        show_default=False,
    ),
]
Graph = Annotated[bool, typer.Option(help="On a GPU: record a step as a CUDA graph.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def train(
    recipe: Annotated[
        str, typer.Argument(help="Name of a recipe, or path of a .toml file.", autocompletion=_complete)
    ] = "digits",
    settings: Settings = None,
    folder: Annotated[Path | None, typer.Option("--out", help="Folder of the run (runs/NAME-DIGEST).")] = None,
    device: Device = "auto",
    data_dir: DataDir = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew instead of going on.")] = False,
    compile: Compile = None,
    graph: Graph = True,
    json: Json = False,
) -> None:
    """Train a network by a recipe. The same command again goes on where a broken run stopped.

    On several GPUs or machines: torchrun --nproc-per-node N -m iterand train RECIPE.
    """
    from iterand.lab.experiments.library import find_recipe
    from iterand.lab.training.environment import choose_device
    from iterand.lab.training.folder import TICKET, RunFolder, default_path
    from iterand.lab.training.run import run
    from iterand.lab.training.steps import Execution

    with _joined() as ranks:
        settled = find_recipe(recipe, settings or [])
        where = RunFolder(folder or default_path(settled))
        with progress_bar() as progress:
            record = run(
                settled,
                where,
                device=ranks.device(choose_device(device)),
                data_dir=data_dir,
                fresh=fresh,
                observer=ProgressObserver(progress, settled.name) if ranks.first else None,
                execution=Execution(compile=compile, graph=graph),
                ranks=ranks,
            )
    result = record["result"]
    if json:
        print_json({"run": str(where.path), "name": settled.name, "seed": settled.seed, **result})
        return
    trained = "all trained" if settled.method.trains_weights else "none ever trained"
    out.print(f"test accuracy  [bold]{result['test_accuracy']:.2f} %[/]  (loss {result['test_loss']:.4f})")
    if "tested_epoch" in result:
        out.print(f"epoch          {result['tested_epoch']}, of the lowest validation loss")
    out.print(f"weights        {result['kept']:,} of {result['weights']:,} kept, {trained}")
    if "ticket_bytes" in result:
        ticket, dense = result["ticket_bytes"], result["float32_bytes"]
        say(f"ticket         {size(ticket)} beside {size(dense)} as float32: {where.path / TICKET}")
    say(f"run            {where.path}")


@contextmanager
def _joined() -> Iterator["Ranks"]:
    """Join the other ranks, if there are any; only the first one talks, unless another has the news."""
    from iterand.lab.training.distributed import ReportedByOtherRank, joined

    try:
        with joined() as ranks:
            out.quiet = err.quiet = not ranks.first
            yield ranks
    except ReportedByOtherRank:
        raise typer.Exit(1) from None
    except (IterandError, ValueError, OSError):
        err.quiet = False
        raise


def evaluate(
    path: Annotated[Path, typer.Argument(metavar="RUN_OR_TICKET", help="Folder of a run, or a ticket file.")],
    device: Device = "auto",
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Test a trained network on the test part of its data."""
    if not path.exists():
        raise ValueError(f"there is no run folder or ticket {str(path)!r}")
    from iterand.lab.training.environment import choose_device
    from iterand.lab.training.run import evaluate_run

    measured = evaluate_run(path, device=choose_device(device), data_dir=data_dir)
    if json:
        print_json(measured)
    else:
        out.print(
            f"test accuracy  [bold]{measured['test_accuracy']:.2f} %[/]  "
            f"(loss {measured['test_loss']:.4f}, {measured['examples']:,} examples)"
        )


def recipes(
    name: Annotated[str | None, typer.Argument(help="Recipe to print in full.", autocompletion=_complete)] = None,
    settings: Settings = None,
    json: Json = False,
) -> None:
    """List the recipes, or print one with all its settings."""
    from iterand.lab.experiments.library import find_recipe, recipe_names
    from iterand.lab.training import recipe_file

    if name is not None:
        settled = find_recipe(name, settings or [])
        if json:
            print_json(recipe_file.as_dict(settled))
        else:
            write(recipe_file.to_toml(settled))
        return
    if settings:
        raise ValueError("--set changes a recipe; say which, for instance iterand recipes digits --set rate=0.2")
    found = {entry: find_recipe(entry).description for entry in recipe_names()}
    if json:
        print_json(found)
        return
    table = Table("recipe", "what it is", box=None, header_style="bold")
    for entry, description in found.items():
        table.add_row(entry, description)
    out.print(table)
