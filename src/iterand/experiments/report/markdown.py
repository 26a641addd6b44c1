"""The report as Markdown tables, for a README or an issue."""

import re
from collections.abc import Iterator, Sequence

from iterand.experiments.report import formatting
from iterand.experiments.report.assembly import CellOutcome, Outcome, Report
from iterand.experiments.report.layout import axes, place
from iterand.experiments.report.measures import measure
from iterand.experiments.report.statistics import LIMIT


def as_markdown(report: Report) -> str:
    """A table for each experiment with results, and a list of those without."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    if report.scale == "tiny":
        yield from ("> **Dry run.** Data and epochs are cut down to test the machinery; these are not results.", "")
    yield f"Mean ± standard deviation over n runs. “As the paper”: within {LIMIT} deviations of its mean."
    for outcome in report.started:
        experiment = outcome.experiment
        where = f" ({_escape(experiment.where)})" if experiment.where else ""
        yield from ("", f"### {_escape(experiment.title)}{where}", "")
        yield from _table(outcome)
    if report.open:
        yield from ("", "### Open", "")
        yield from (f"- {_escape(entry.experiment.name)}: {_escape(entry.experiment.title)}" for entry in report.open)


def _table(outcome: Outcome) -> Iterator[str]:
    names = axes(outcome.experiment)
    head = [formatting.axis(name) for name in names] or [""]
    compared = any(cell.cell.paper for cell in outcome.cells)
    yield _row([*head, measure(outcome.experiment).title, *(["paper", "difference", ""] if compared else [])])
    yield "|" + "---|" * len(head) + "---:|" + ("---:|---:|---|" if compared else "")
    for cell in outcome.cells:
        where = [_place(place(cell, name)) for name in names] or [cell.cell.label]
        yield _row([*where, formatting.ours(cell.summary), *(_paper(cell) if compared else [])])


def _paper(cell: CellOutcome) -> list[str]:
    paper, comparison = cell.cell.paper, cell.comparison
    number = formatting.plus_minus(paper.mean, paper.std) if paper else ""
    if comparison is None:
        return [number, "", ""]
    return [number, formatting.difference(comparison), formatting.VERDICTS[comparison.verdict]]


def _place(entry: str | float | None) -> str:
    return "" if entry is None else formatting.value(entry)


def _row(entries: Sequence[str]) -> str:
    return "| " + " | ".join(_escape(entry) for entry in entries) + " |"


def _escape(text: str) -> str:
    """Text that Markdown takes as text: no tags, no links, no new columns."""
    return re.sub(r"([\\`*_\[\]|<>#~$&])", r"\\\1", " ".join(text.split()))
