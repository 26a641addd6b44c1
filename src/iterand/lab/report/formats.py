"""A report as JSON, as Markdown or as an HTML page."""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from iterand.errors import extra
from iterand.lab.experiments.experiment import Cell
from iterand.lab.report import formatting, layout
from iterand.lab.report.assembly import CellOutcome, Outcome, Report, Unmatched, gpu_seconds, measure
from iterand.lab.report.formatting import LIMIT
from iterand.lab.report.layout import Styles, axes, position
from iterand.lab.report.records import Record
from iterand.lab.training.recipe import SECTIONS, Recipe

FORMAT = "iterand report 1"
_PACKAGE = "iterand.lab.report"
_FOLDER = "template"
_LABELS = ("name", "description", "seed")  # settings that do not tell cells apart


def as_json(report: Report) -> str:
    """Everything but the training curves, which are in the records."""
    return json.dumps(as_dict(report), indent=2) + "\n"


def as_dict(report: Report) -> dict[str, Any]:
    """The report as plain values."""
    return {
        "format": FORMAT,
        "profile": report.profile,
        "scale": report.scale,
        "dates": {
            "first": report.dates[0] if report.dates else None,
            "last": report.dates[-1] if report.dates else None,
            "runs_without": len(report.runs) - len(report.dates),
        },
        "experiments": [_experiment(outcome) for outcome in report.outcomes],
        "dry_runs": {outcome.experiment.name: len(outcome.runs) for outcome in report.dry},
        "unmatched": [_other(entry) for entry in report.unmatched],
        "superseded": [{"path": str(old.record.path), "newer": str(old.newer.path)} for old in report.superseded],
        "damaged": list(report.damaged),
    }


def _other(entry: Unmatched) -> dict[str, Any]:
    recipe = entry.record.recipe
    return {
        "path": str(entry.record.path),
        "recipe": recipe.name,
        "settings": entry.settings,
        "seed": recipe.seed,
        "test_accuracy": float(entry.record.result["test_accuracy"]),
        "profiles": entry.profiles,
    }


def _experiment(outcome: Outcome) -> dict[str, Any]:
    experiment = outcome.experiment
    return {
        "name": experiment.name,
        "title": experiment.title,
        "where": experiment.where,
        "measure": measure(experiment).title,
        "missing": {"runs": len(outcome.missing), "gpu_seconds": gpu_seconds(outcome.missing)},
        "cells": [_cell(outcome, cell) for cell in outcome.cells],
    }


def _cell(outcome: Outcome, cell: CellOutcome) -> dict[str, Any]:
    summary, comparison, paper = cell.summary, cell.comparison, cell.cell.paper
    value = measure(outcome.experiment).of
    return {
        "label": cell.cell.label,
        "axes": dict(cell.cell.axes),
        "n": summary.n if summary else 0,
        "mean": summary.mean if summary else None,
        "std": summary.std if summary else None,
        "paper": {"mean": paper.mean, "std": paper.std, "where": paper.where} if paper else None,
        "difference": comparison.difference if comparison else None,
        "deviation": comparison.deviation if comparison else None,
        "verdict": comparison.verdict if comparison else None,
        "weights": cell.mean("weights"),
        "kept": cell.mean("kept"),
        "ticket_bytes": cell.mean("ticket_bytes"),
        "times": [asdict(time) for time in cell.times],
        "runs": [{"seed": run.recipe.seed, "value": value(run), "path": str(run.path)} for run in cell.runs],
    }


def as_markdown(report: Report) -> str:
    """A table for each experiment with results, and one of what is left."""
    return "\n".join(_lines(report)) + "\n"


_TIMES = "Other runs may have shared the GPU; `iterand reproduce overhead --jobs 1` on an idle one measures times."


def _lines(report: Report) -> Iterator[str]:
    if report.scale == "tiny":
        yield from ("> **Dry run.** Data and epochs are cut down to test the machinery; these are not results.", "")
    yield f"Mean ± standard deviation over n runs. “As the paper”: within {LIMIT} deviations of its mean."
    if report.dates:
        yield f"Dates of the runs: {formatting.span(report.dates)}."
    for outcome in report.started:
        experiment = outcome.experiment
        where = f" ({_escape(experiment.where)})" if experiment.where else ""
        yield from ("", f"### {_escape(experiment.title)}{where}", "")
        yield from _table(outcome)
        if experiment.measure == "seconds":
            yield from ("", _TIMES)
    if report.unmatched:
        yield from ("", "### Records that match no cell", "")
        yield _row(["recipe", "settings", "seed", "test accuracy (%)", "counts in profile", "record"])
        yield "|---|---|---:|---:|---|---|"
        for one in map(_other, report.unmatched):
            settings, profiles = ", ".join(one["settings"]), ", ".join(one["profiles"]) or "none"
            accuracy = f"{one['test_accuracy']:.2f}"
            yield _row([one["recipe"], settings, str(one["seed"]), accuracy, profiles, one["path"]])
    if report.unfinished:
        yield from ("", "### What is left", "")
        yield _row(["experiment", "cells without a run", "missing runs", "GPU time (rough)"])
        yield "|---|---:|---:|---:|"
        for entry in report.unfinished:
            cells = f"{len(entry.open)} of {len(entry.cells)}"
            yield _row([report.command(entry), cells, str(len(entry.missing)), gpu_time(entry.missing)])
        yield _row(["all, each run once", "", str(len(report.missing)), gpu_time(report.missing)])


def gpu_time(recipes: Sequence[Recipe]) -> str:
    """The estimated time of these runs in words, if it is known."""
    seconds = gpu_seconds(recipes)
    return "" if seconds is None else formatting.duration(seconds)


def _table(outcome: Outcome) -> Iterator[str]:
    names = axes(outcome.experiment)
    head = [formatting.axis(name) for name in names] or [""]
    compared = any(cell.cell.paper for cell in outcome.cells)
    yield _row([*head, measure(outcome.experiment).title, *(["paper", "difference", ""] if compared else [])])
    yield "|" + "---|" * len(head) + "---:|" + ("---:|---:|---|" if compared else "")
    for cell in (*outcome.finished, *outcome.open):
        entries = (position(cell, name) for name in names)
        head = ["" if entry is None else formatting.value(entry) for entry in entries] or [cell.cell.label]
        yield _row([*head, formatting.ours(cell.summary), *(_paper(cell) if compared else [])])


def _paper(cell: CellOutcome) -> list[str]:
    paper, comparison = cell.cell.paper, cell.comparison
    number = formatting.plus_minus(paper.mean, paper.std) if paper else ""
    if comparison is None:
        return [number, "", ""]
    return [number, formatting.difference(comparison), formatting.VERDICTS[comparison.verdict]]


def _row(entries: Sequence[str]) -> str:
    return "| " + " | ".join(_escape(entry) for entry in entries) + " |"


def _escape(text: str) -> str:
    """Escape what Markdown would read as markup: tags, links, columns."""
    return re.sub(r"([\\`*_\[\]|<>#~$&])", r"\\\1", " ".join(text.split()))


def as_html(report: Report) -> str:
    """The page. The same records give the same bytes."""
    with extra("lab", "the HTML report"):
        from jinja2 import Environment, PackageLoader, StrictUndefined

        from iterand.lab.report.figures import draw
    styles = Styles()
    script = _text("page.js")
    environment = Environment(
        loader=PackageLoader(_PACKAGE, _FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        report=report,
        machines=Machines(report.runs),
        drawings={outcome.experiment.name: draw(outcome, styles) for outcome in report.started},
        style=_text("page.css"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        limit=LIMIT,
        format=formatting,
        layout=layout,
        common_settings=common_settings,
        own_settings=own_settings,
        measure=measure,
        gpu_time=gpu_time,
        version=version("iterand"),
    )


def _text(name: str) -> str:
    return (files(_PACKAGE) / _FOLDER / name).read_text(encoding="utf-8")


def flat_settings(recipe: Recipe) -> dict[str, str]:
    """All settings but name, description and seed, as ``key: value``."""
    settings: dict[str, str] = {}
    for key, value in asdict(recipe).items():
        if key in SECTIONS:
            settings |= {f"{key}.{name}": _words(entry) for name, entry in value.items()}
        elif key not in _LABELS:
            settings[key] = _words(value)
    return settings


def common_settings(cells: Iterable[Cell]) -> dict[str, str]:
    """The settings that all cells of an experiment share."""
    all_settings = [flat_settings(cell.recipe) for cell in cells]
    first = all_settings[0]
    return {key: value for key, value in first.items() if all(other[key] == value for other in all_settings)}


def own_settings(recipe: Recipe, base: dict[str, str]) -> dict[str, str]:
    """The settings of a recipe that are not among the common ones."""
    return {key: value for key, value in flat_settings(recipe).items() if key not in base}


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Machine:
    """The hardware, versions, commit and command of some runs."""

    number: int
    device: str
    versions: str
    commit: str
    command: str


class Machines:
    """The machines of the given runs, numbered, with the number of runs on each."""

    def __init__(self, runs: Iterable[Record]) -> None:
        self._known: dict[tuple[str, ...], Machine] = {}
        self._runs: dict[Machine, int] = {}
        for run in runs:
            self._runs[self.of(run)] = self._runs.get(self.of(run), 0) + 1

    def of(self, run: Record) -> Machine:
        """The machine of a run."""
        key = _describe(run.environment)
        return self._known.setdefault(key, Machine(len(self._known) + 1, *key))

    def __iter__(self) -> Iterator[tuple[Machine, int]]:
        return iter(self._runs.items())


def _describe(environment: Mapping[str, Any]) -> tuple[str, str, str, str]:
    def entry(key: str) -> str:
        return str(environment.get(key) or "unknown")

    known = (f"{name} {environment[name]}" for name in ("iterand", "torch", "python") if environment.get(name))
    versions = ", ".join((*known, entry("platform")))
    return formatting.machine(environment), versions, entry("commit"), entry("command")
