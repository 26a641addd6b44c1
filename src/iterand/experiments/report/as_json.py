"""The report as one JSON object, for scripts."""

import json
from typing import Any

from iterand.experiments.report.assembly import CellOutcome, Outcome, Report
from iterand.experiments.report.measures import measure

FORMAT = "iterand report 1"


def as_json(report: Report) -> str:
    """Everything but the training curves, which are in the records."""
    return json.dumps(as_dict(report), indent=2) + "\n"


def as_dict(report: Report) -> dict[str, Any]:
    """The report as plain values."""
    return {
        "format": FORMAT,
        "profile": report.profile,
        "scale": report.scale,
        "experiments": [_experiment(outcome) for outcome in report.outcomes],
        "dry_runs": {outcome.experiment.name: len(outcome.runs) for outcome in report.dry},
        "strangers": [{"path": str(entry.record.path), "profiles": entry.profiles} for entry in report.strangers],
        "set_aside": [{"path": str(old.record.path), "newer": str(old.newer.path)} for old in report.set_aside],
        "damaged": list(report.damaged),
    }


def _experiment(outcome: Outcome) -> dict[str, Any]:
    experiment = outcome.experiment
    return {
        "name": experiment.name,
        "title": experiment.title,
        "where": experiment.where,
        "measure": measure(experiment).title,
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
        "seconds": cell.seconds,
        "runs": [{"seed": run.recipe.seed, "value": value(run), "path": str(run.path)} for run in cell.runs],
    }
