"""What the pages say of our results is what the records say, and every record can be looked up."""

import json
import re
from pathlib import Path

import pytest

from iterand.experiments.report.assembly import read_report
from iterand.training import recipe_file
from iterand.training.folder import default_path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
RECORDS = sorted(RESULTS.rglob("*.json"))
REPORT = read_report(RESULTS)


def page(name):
    """A page in which a number has its leading zero, and so looks the same everywhere."""
    return re.sub(r"(?<![\d.])\.(?=\d)", "0.", (ROOT / name).read_text())


def cells(experiment):
    (outcome,) = (outcome for outcome in REPORT.outcomes if outcome.experiment.name == experiment)
    return [cell for cell in outcome.cells if cell.summary and cell.summary.n > 1]


@pytest.mark.parametrize(
    ("name", "experiment"),
    [
        ("README.md", "best"),
        ("README.md", "digits"),
        ("results/README.md", "best"),
        ("results/README.md", "figure2"),
        ("docs/beyond.md", "best"),
        ("docs/beyond.md", "parts"),
    ],
)
def test_a_page_has_the_means_of_the_records(name, experiment):
    text, found = page(name), cells(experiment)
    missing = [cell.cell.label for cell in found if f"{cell.summary.mean:.2f} ± {cell.summary.std:.2f}" not in text]
    assert found
    assert missing == []


def test_no_record_is_damaged_or_counted_twice():
    assert REPORT.damaged == ()
    assert REPORT.set_aside == ()


@pytest.mark.parametrize("path", RECORDS, ids=[str(path.relative_to(RESULTS)) for path in RECORDS])
def test_a_record_is_named_by_its_recipe_and_says_where_it_ran(path):
    record = json.loads(path.read_text())
    recipe = recipe_file.from_dict(record["recipe"])
    assert path.stem.removesuffix("-plain") == default_path(recipe).name
    environment = record["environment"]
    assert environment["command"].startswith("iterand ")
    assert environment["hardware"]["cpu"]
