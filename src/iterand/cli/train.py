"""``iterand train``, ``evaluate`` and ``recipes``."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from iterand.checks import counted
from iterand.cli import options
from iterand.cli.console import ProgressObserver, err, out, print_json, progress_bar, say, write
from iterand.cli.options import DataDir, Json
from iterand.errors import IterandError
from iterand.lab.report.formatting import size

if TYPE_CHECKING:
    from iterand.lab.networks.external import UserCode
    from iterand.lab.training.distributed import Ranks
    from iterand.lab.training.recipe import Recipe

_complete = options.completing(options.recipes)

Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; repeatable.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Compile = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="On a GPU: compile the network (default: in long runs on ImageNet).",
        show_default=False,
    ),
]
Graph = Annotated[bool, typer.Option(help="On a GPU: capture a step as a CUDA graph.")]


def train(
    recipe: Annotated[
        str, typer.Argument(help="Name of a recipe, or path of a .toml file.", autocompletion=_complete)
    ] = "digits",
    settings: Settings = None,
    folder: Annotated[
        Path | None,
        typer.Option("--out", callback=options.named, help="Folder of the run (default: runs/NAME-DIGEST)."),
    ] = None,
    device: Device = "auto",
    data_dir: DataDir = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start again instead of resuming.")] = False,
    compile: Compile = None,
    graph: Graph = True,
    json: Json = False,
) -> None:
    """Train a network by a recipe. Run the same command again to resume an interrupted run.

    On several GPUs or machines: torchrun --nproc-per-node N -m iterand train RECIPE.
    """
    from iterand.lab.training.environment import choose_device
    from iterand.lab.training.folder import TICKET, RunFolder, default_path
    from iterand.lab.training.run import run
    from iterand.lab.training.steps import Execution

    with redirect_stdout(sys.stderr), _join_ranks() as ranks:  # what the user's code prints is no result
        chosen, code = _find_recipe(recipe, settings)
        run_folder = RunFolder(folder or default_path(chosen))
        with progress_bar() as progress:
            record = run(
                chosen,
                run_folder,
                device=ranks.device(choose_device(device)),
                data_dir=data_dir,
                fresh=fresh,
                observer=ProgressObserver(progress, chosen.name) if ranks.first else None,
                execution=Execution(compile=compile, graph=graph),
                ranks=ranks,
                code=code,
            )
    result = record["result"]
    if json:
        print_json({"run": str(run_folder.path), "name": chosen.name, "seed": chosen.seed, **result})
        return
    trained = "all trained" if chosen.method.trains_weights else "none ever trained"
    out.print(f"test accuracy  [bold]{result['test_accuracy']:.2f} %[/]  (loss {result['test_loss']:.4f})")
    if "tested_epoch" in result:
        out.print(f"epoch          {result['tested_epoch']}, with the lowest validation loss")
    out.print(f"weights        {result['kept']:,} of {result['weights']:,} kept, {trained}")
    if "ticket_bytes" in result:
        ticket, dense = result["ticket_bytes"], result["float32_bytes"]
        say(f"ticket         {size(ticket)}, {size(dense)} as float32: {run_folder.path / TICKET}")
    say(f"run            {run_folder.path}")


def _find_recipe(name_or_path: str, settings: list[str] | None) -> tuple["Recipe", "UserCode | None"]:
    """The recipe with the digests of the user's images and network, and the user's code, if it names some.

    Only here, where the user types the name of the recipe, may code be named; no other command runs it.
    """
    from iterand.lab.experiments.library import find_recipe, pin
    from iterand.lab.networks.external import UserCode, names_code
    from iterand.lab.training.recipe_file import refuse_without_effect

    recipe = find_recipe(name_or_path, settings or [])
    refuse_without_effect(recipe, settings or [])
    code = UserCode(recipe.network.name) if names_code(recipe.network.name) else None
    return pin(recipe, code), code


@contextmanager
def _join_ranks() -> Iterator["Ranks"]:
    """Join the other ranks, if there are any; only the first one prints, and the one that reports an error."""
    from iterand.lab.training.distributed import joined
    from iterand.lab.training.rank_errors import ReportedByOtherRank

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
    """Evaluate a trained network on the test split of its data."""
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
            f"(loss {measured['test_loss']:.4f}, {counted(measured['examples'], 'example')})"
        )


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(help="Recipe to print with its settings, or path of a .toml file.", autocompletion=_complete),
    ] = None,
    settings: Settings = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """List the recipes, or print one with all its settings. Images and networks of your own are checked first."""
    from iterand.lab.experiments.library import find_recipe, recipe_names
    from iterand.lab.training import recipe_file
    from iterand.lab.training.network import check_names

    if name is not None:
        with redirect_stdout(sys.stderr):  # what the user's code prints is no result
            recipe, code = _find_recipe(name, settings)
            if check_names(recipe):
                from iterand.lab.training.run import check_run

                with err.status("checking"):
                    check_run(recipe, data_dir=data_dir, code=code)
        if json:
            print_json(recipe_file.as_dict(recipe))
        else:
            write(recipe_file.to_toml(recipe))
        return
    if settings:
        raise ValueError("--set changes a recipe; say which, for instance iterand recipes digits --set rate=0.2")
    found = {entry: find_recipe(entry).description for entry in recipe_names()}
    if json:
        print_json(found)
        return
    table = Table("recipe", "description", box=None, header_style="bold")
    for entry, description in found.items():
        table.add_row(entry, description)
    out.print(table)
