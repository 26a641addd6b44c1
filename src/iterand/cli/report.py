"""``iterand report``: compare recorded runs with the numbers of the paper."""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iterand.checks import counted
from iterand.cli import options
from iterand.cli.console import say, warn, write
from iterand.files import atomic_write

if TYPE_CHECKING:
    from iterand.lab.report.assembly import Report


class Format(StrEnum):
    """File formats of the report."""

    HTML = "html"
    MD = "md"
    JSON = "json"


_PAGE = Path("report.html")
_STDOUT = Path("-")


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with run folders or records.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write; - is stdout (default: report.html; for md and json -)."),
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="A web page, Markdown tables, or JSON.")] = Format.HTML,
    profile: Annotated[
        str,
        typer.Option(help="Settings: paper, text or best.", autocompletion=options.completing(options.PROFILES)),
    ] = "paper",
    scale: Annotated[
        str,
        typer.Option(help="full, or tiny for dry runs.", autocompletion=options.completing(options.SCALES)),
    ] = "full",
) -> None:
    """Compare the results of runs with the paper, on one page."""
    from iterand.lab.report.assembly import read_report

    formatted = _formatter(form)
    found = read_report(folder, profile=profile, scale=scale)
    text = formatted(found)
    for sentence in found.damaged:
        warn(f"damaged record {sentence}")
    target = output or (_PAGE if form is Format.HTML else _STDOUT)
    if target == _STDOUT:
        write(text)
        return
    atomic_write(target, text.encode())
    say(f"{target}: {_contents(found)}")


def _formatter(form: Format) -> "Callable[[Report], str]":
    """The function that writes a report in this format."""
    from iterand.lab.report.formats import as_html, as_json, as_markdown

    return {Format.HTML: as_html, Format.MD: as_markdown, Format.JSON: as_json}[form]


def _contents(found: "Report") -> str:
    text = f"{counted(len(found.runs), 'run')} in {len(found.started)} of {len(found.outcomes)} experiments"
    if found.dry:
        text += f"; {counted(len(found.dry_runs), 'dry run')} left out (--scale tiny shows them)"
    if found.unmatched:
        belong = "belongs" if len(found.unmatched) == 1 else "belong"
        text += f"; {counted(len(found.unmatched), 'record')} {belong} to no cell of profile {found.profile}"
    return text
