"""``iterand data``: list, download, check and pack data sets."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from iterand.cli import options
from iterand.cli.console import Bars, err, out, print_json, progress_bar, say
from iterand.cli.options import DataDir, Json
from iterand.errors import DataError
from iterand.lab.report.formatting import size

if TYPE_CHECKING:
    from iterand.lab.data.catalog import Status

app = typer.Typer(no_args_is_help=True, help="List, download, check and pack data sets.")

_complete = options.completing(options.DATASETS)

Name = Annotated[
    str | None,
    typer.Argument(help=f"One of {', '.join(options.DATASETS)}; without it, all.", autocompletion=_complete),
]


@app.command()
def status(name: Name = None, data_dir: DataDir = None, json: Json = False) -> None:
    """List the data sets: where they are, or how to get them."""
    from iterand.lab.data import catalog
    from iterand.lab.data.dataset import data_folder

    root = data_folder(data_dir)
    found = [catalog.status(entry, root) for entry in _names(name)]
    if json:
        print_json({"data_dir": str(root), "sets": {entry.name: _as_json(entry) for entry in found}})
        return
    table = Table("name", "what it is", "there", box=None, header_style="bold")
    table.add_column("where, or how to get it", overflow="fold")
    for entry in found:
        where = f"{entry.located.path} ({entry.located.layout})" if entry.located else entry.advice
        table.add_row(entry.name, entry.title, "[green]yes[/]" if entry.located else "[red]no[/]", escape(where))
    out.print(table)


@app.command()
def fetch(name: Name = None, data_dir: DataDir = None, json: Json = False) -> None:
    """Download data sets that are freely available. Their checksums are verified."""
    from iterand.lab.data import catalog
    from iterand.lab.data.dataset import data_folder
    from iterand.lab.data.download import ARCHIVES

    root = data_folder(data_dir)
    fetched = {}
    for entry in [name] if name else ARCHIVES:
        with _download_bar(entry) as advance:
            fetched[entry] = str(catalog.fetch(entry, root, advance))
        if not json:
            say(f"{entry}: {fetched[entry]}")
    if json:
        print_json({"data_dir": str(root), "sets": fetched})


@app.command()
def check(name: Name = None, data_dir: DataDir = None, json: Json = False) -> None:
    """Read data sets completely. They are compared with what was published."""
    from iterand.lab.data import catalog
    from iterand.lab.data.dataset import data_folder

    root = data_folder(data_dir)
    results: dict[str, dict[str, str | bool]] = {}
    names = [name] if name else [each for each in _names(None) if catalog.status(each, root).located]
    if not names:
        raise DataError(f"no data set is in {root}; 'iterand data status' says how to get them")
    for entry in names:
        try:
            with _images_bar(entry) as advance:
                results[entry] = {"right": True, "found": catalog.check(entry, root, advance)}
        except DataError as error:
            results[entry] = {"right": False, "found": str(error)}
        if not json:
            where = out if results[entry]["right"] else err
            say(f"{entry}: {results[entry]['found']}", to=where)
    if json:
        print_json({"data_dir": str(root), "sets": results})
    if not all(result["right"] for result in results.values()):
        raise typer.Exit(1)


@app.command()
def pack(
    name: Annotated[
        str, typer.Argument(help="Name of a data set of many files.", autocompletion=_complete)
    ] = "imagenet",
    data_dir: DataDir = None,
    short_side: Annotated[
        int | None,
        typer.Option(
            help="Scale larger images to this short side: faster to read, other pixels (default: files unchanged)."
        ),
    ] = None,
    quality: Annotated[int, typer.Option(help="JPEG quality of scaled images.")] = options.QUALITY,
    json: Json = False,
) -> None:
    """Pack the images of each split into one file. It is faster to read; an interrupted pack resumes."""
    from iterand.lab.data import catalog
    from iterand.lab.data.dataset import data_folder
    from iterand.lab.data.packs import Scaling

    scaling = None if short_side is None else Scaling(short_side, quality)
    with _images_bar(name) as advance:
        packs = catalog.pack(name, data_folder(data_dir), scaling, advance)
    if json:
        print_json({"packs": {part: {"path": str(path), "bytes": path.stat().st_size} for part, path in packs.items()}})
        return
    for part, path in packs.items():
        say(f"{name} {part}: {path}, {size(path.stat().st_size)}")


def _names(name: str | None) -> list[str]:
    return list(options.DATASETS) if name is None else [name]


def _as_json(entry: "Status") -> dict[str, object]:
    return {
        "title": entry.title,
        "there": entry.located is not None,
        "path": str(entry.located.path) if entry.located else None,
        "layout": entry.located.layout if entry.located else None,
        "advice": entry.advice,
    }


@contextmanager
def _download_bar(label: str) -> Iterator[Callable[[int, int | None], None]]:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    hidden = not err.is_terminal
    with Bars(*columns, TimeRemainingColumn(), console=err, transient=True, disable=hidden) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def _images_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    with progress_bar() as progress:
        task = progress.add_task(label, total=None, note="")
        yield lambda done, total: progress.update(task, completed=done, total=total)
