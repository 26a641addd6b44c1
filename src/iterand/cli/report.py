"""``iterand report``: our records beside the paper's numbers."""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iterand.cli import options
from iterand.cli.console import say, warn, write
from iterand.files import atomic_write

if TYPE_CHECKING:
    from iterand.lab.report.assembly import Report


class Format(StrEnum):
    """How the report is written."""

    HTML = "html"
    MD = "md"
    JSON = "json"


_PAGE = Path("report.html")


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with runs or with records of runs.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write (report.html; md and json: stdout).")
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="One page, Markdown tables, or JSON.")] = Format.HTML,
    profile: Annotated[
        str,
        typer.Option(help="Whose settings: paper, text or best.", autocompletion=options.completing(options.PROFILES)),
    ] = "paper",
    scale: Annotated[
        str,
        typer.Option(help="full, or tiny for a page of dry runs.", autocompletion=options.completing(options.SCALES)),
    ] = "full",
) -> None:
    """Set results beside the paper's numbers, as one page."""
    from iterand.lab.report.assembly import read_report

    written = _form(form)
    found = read_report(folder, profile=profile, scale=scale)
    text = written(found)
    for sentence in found.damaged:
        warn(f"damaged record {sentence}")
    if output is None and form is not Format.HTML:
        write(text)
        return
    atomic_write(output or _PAGE, text.encode())
    say(f"{output or _PAGE}: {_what(found)}")


def _form(form: Format) -> "Callable[[Report], str]":
    """What writes a report in this form."""
    from iterand.lab.report.formats import as_html, as_json, as_markdown

    return {Format.HTML: as_html, Format.MD: as_markdown, Format.JSON: as_json}[form]


def _what(found: "Report") -> str:
    said = f"{len(found.runs)} runs in {len(found.started)} of {len(found.outcomes)} experiments"
    if found.dry:
        said += f"; {sum(len(outcome.runs) for outcome in found.dry)} dry runs left out (--scale tiny shows them)"
    if found.unmatched:
        said += f"; {len(found.unmatched)} records belong to no cell of profile {found.profile}"
    return said
