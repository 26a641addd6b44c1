"""What the report says, and in which forms: a page, Markdown, JSON, the command."""

import json
import math
import re
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from iterand.cli.report import report as report_command
from iterand.lab.experiments.experiment import Cell, Experiment, PaperNumber
from iterand.lab.report import formatting
from iterand.lab.report.assembly import read_report
from iterand.lab.report.formats import as_html, as_json, as_markdown
from reporting import as_record, install, recipe, tiny, widths, write, write_runs


def small_report(tmp_path, monkeypatch):
    open_experiment = Experiment("imdb", "Film reviews", (Cell("LSTM", recipe(network="lstm")),), 5, "Table 11")
    install(monkeypatch, widths(), open_experiment)
    write_runs(tmp_path, recipe(width=0.5), 87.8, 88.0, 88.2)
    write_runs(tmp_path, recipe(width=1.0), 91.0)
    write_runs(tmp_path, recipe("sgd", width=0.5), 85.0, 85.0)
    return read_report(tmp_path)


MARKDOWN = """\
Mean ± standard deviation over n runs. “As the paper”: within 2 deviations of its mean.
Dates of the runs: 2026-11-14.

### Varying the width (Table 4)

| method | width ρ | test accuracy (%) | paper | difference |  |
|---|---|---:|---:|---:|---|
| IteRand | 0.5 | 88.00 ± 0.20 (n = 3) | 88.00 ± 0.30 | +0.00 | as the paper |
| IteRand | 1 | 91.00 (n = 1) | 90.00 ± 0.30 | +1.00 | above |
| SGD | 0.5 | 85.00 ± 0.00 (n = 2) | 89.00 ± 0.30 | −4.00 | below |
| SGD | 1 | open | 91.00 ± 0.30 |  |  |

### What is left

| experiment | cells without a run | missing runs | GPU time (rough) |
|---|---:|---:|---:|
| iterand reproduce widths | 1 of 4 | 6 | 0.7 s |
| iterand reproduce imdb | 1 of 1 | 5 | 0.6 s |
| all, each run once |  | 11 | 1.2 s |
"""


class TestForms:
    def test_markdown(self, tmp_path, monkeypatch):
        assert as_markdown(small_report(tmp_path, monkeypatch)) == MARKDOWN

    def test_json(self, tmp_path, monkeypatch):
        found = json.loads(as_json(small_report(tmp_path, monkeypatch)))
        assert found["format"] == "iterand report 1"
        assert [entry["name"] for entry in found["experiments"]] == ["widths", "imdb"]
        assert [entry["missing"]["runs"] for entry in found["experiments"]] == [6, 5]
        step = 2e-3  # the shortest, of which 3 epochs of 1,197 images in batches of 64 have 56.1
        assert found["experiments"][1]["missing"]["gpu_seconds"] == pytest.approx(5 * 3 * 1197 / 64 * step)
        first, second, _, last = found["experiments"][0]["cells"]
        assert [run.pop("seed") for run in first["runs"]] == [0, 1, 2]
        assert [run["value"] for run in first.pop("runs")] == [87.8, 88.0, 88.2]
        assert first == {
            "label": "IteRand, ρ = 0.5",
            "axes": {"method": "IteRand", "width": 0.5},
            "n": 3,
            "mean": pytest.approx(88.0),
            "std": pytest.approx(0.2),
            "paper": {"mean": 88.0, "std": 0.3, "where": "Table 4"},
            "difference": pytest.approx(0.0, abs=1e-9),
            "deviation": pytest.approx(math.sqrt((0.04 + 0.09) / 2)),
            "verdict": "same",
            "weights": 2e6,
            "kept": 1e6,
            "ticket_bytes": 424e3,
            "times": [{"sharing": "cpu", "n": 3, "seconds": 90.0}],
        }
        assert second["verdict"] == "above"
        assert (last["n"], last["mean"], last["verdict"]) == (0, None, None)

    def test_the_page_has_each_number(self, tmp_path, monkeypatch):
        page = as_html(small_report(tmp_path, monkeypatch))
        for words in ("88.00", "± 0.20", "+1.00", "−4.00", "1.00M", "424.0 kB", "A processor", "0123456789ab"):
            assert words in page
        assert page.count('class="verdict same"') == page.count('class="verdict above"') == 1
        assert "<code>iterand reproduce imdb</code>" in page

    def test_the_same_records_give_the_same_page(self, tmp_path, monkeypatch):
        found = small_report(tmp_path, monkeypatch)
        assert as_html(found) == as_html(read_report(tmp_path))

    def test_the_page_asks_for_nothing(self, tmp_path, monkeypatch):
        page = as_html(small_report(tmp_path, monkeypatch))
        assert all(link.startswith(("#", "data:,")) for link in re.findall(r'href="([^"]*)"', page))
        assert not re.search(r"\bsrc=|@import|url\((?!#)|https?://", page)

    def test_an_empty_folder_makes_a_page_of_open_experiments(self, tmp_path, monkeypatch):
        install(monkeypatch, widths())
        page = as_html(read_report(tmp_path))
        assert "What is left" in page
        assert "<svg" not in page

    def test_nothing_in_a_record_or_an_experiment_becomes_markup(self, tmp_path, monkeypatch):
        evil = "<script>alert(1)</script> $x$ & \" ' | `x` ]]>"
        of = replace(recipe(width=0.5), name=evil, description=evil)
        cells = [
            Cell(
                evil, recipe(width=width), (("network", evil), ("method", evil), (evil, width)), PaperNumber(9, 1, evil)
            )
            for width in (0.5, 1.0)
        ]
        cells.append(replace(cells[0], axes=(("network", "b"), ("method", "b"), (evil, 2.0)), recipe=recipe(width=2.0)))
        kinds = [(kind, Experiment(kind, evil, tuple(cells), 1, evil, kind, evil)) for kind in ("curves", "bars")]
        install(monkeypatch, *(experiment for _, experiment in kinds))
        environment = {"command": evil, "commit": evil, "hardware": {"gpu": evil}, "torch": evil}
        write(tmp_path / "a.json", as_record(of, 88.0, environment=environment))
        write(tmp_path / "b.json", as_record(recipe(width=2.0), 88.0))
        write(tmp_path / "other.json", as_record(replace(of, network=recipe(network="x").network), 1.0))
        write(tmp_path / "record.json", as_record(recipe(), 1.0, format=f"iterand record {evil}"))
        found = read_report(tmp_path)
        page = as_html(found)
        assert page.count("<script>") == 1  # the page's own
        assert page.count("alert(1)") > 10
        for line in as_markdown(found).splitlines():
            assert not re.search(r"(?<!\\)<", line)

    def test_unknown_plot(self, tmp_path, monkeypatch):
        install(monkeypatch, replace(widths(), plot="pie"))
        write_runs(tmp_path, recipe(width=0.5), 88.0)
        with pytest.raises(ValueError, match="plot is 'pie'; it must be none, bars, curves"):
            as_html(read_report(tmp_path))


@pytest.mark.parametrize(
    ("seconds", "words"), [(2.849, "2.8 s"), (99.9, "99.9 s"), (600, "10 min"), (6253.69, "1 h 44 min")]
)
def test_durations(seconds, words):
    assert formatting.duration(seconds) == words


def places(value, path=()):
    """Where something could be exchanged in a JSON value."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield (*path, key)
            yield from places(entry, (*path, key))


ODD = [None, True, -1, 0, 10**400, 1e300, math.nan, math.inf, "", "\x00<b>", [], [[]], {}, {"a": {}}, [{}], "iterand"]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: repr(odd)[:12])
def test_no_record_breaks_a_report(tmp_path, monkeypatch, odd):
    install(monkeypatch, replace(widths(), plot="none"))
    base = as_record(recipe(width=0.5), 88.0)
    for number, place in enumerate(places(base)):
        record = json.loads(json.dumps(base))
        inner = record
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = odd
        write(tmp_path / str(number) / "record.json", record)
    found = read_report(tmp_path)
    assert len(found.runs) + len(found.unmatched) + len(found.superseded) + len(found.damaged) == number + 1
    assert found.damaged
    assert "<b>" not in as_html(found)
    json.loads(as_json(found), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert as_markdown(found)


class TestCommand:
    def run(self, *arguments):
        app = typer.Typer()
        app.command()(report_command)
        return CliRunner().invoke(app, [str(entry) for entry in arguments])

    def test_a_page_beside(self, tmp_path, monkeypatch):
        small_report(tmp_path / "runs", monkeypatch)
        write(tmp_path / "runs" / "record.json", "{")
        monkeypatch.chdir(tmp_path)
        answer = self.run("runs")
        assert answer.exit_code == 0
        assert answer.stdout == "report.html: 6 runs in 1 of 2 experiments\n"
        assert "damaged record record.json: it cannot be read" in answer.stderr
        assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")

    def test_markdown_goes_to_stdout_and_to_a_file(self, tmp_path, monkeypatch):
        small_report(tmp_path / "runs", monkeypatch)
        monkeypatch.chdir(tmp_path)
        assert self.run("runs", "--format", "md").stdout == MARKDOWN
        assert self.run("runs", "--format", "md", "-o", "-").stdout == MARKDOWN
        assert self.run("runs", "-o", "-").stdout.startswith("<!DOCTYPE html>")
        assert [path.name for path in tmp_path.iterdir()] == ["runs"]
        self.run(tmp_path / "runs", "--format", "md", "-o", tmp_path / "table.md")
        assert (tmp_path / "table.md").read_text() == MARKDOWN

    def test_json_is_one_object(self, tmp_path, monkeypatch):
        small_report(tmp_path / "runs", monkeypatch)
        assert json.loads(self.run(tmp_path / "runs", "--format", "json").stdout)["profile"] == "paper"

    def test_a_dry_run_that_two_experiments_share_is_counted_once(self, tmp_path, monkeypatch):
        install(monkeypatch, widths(), replace(widths(), name="more"))
        write_runs(tmp_path, tiny(widths()).cells[0].recipe, 11.11, 12.22)
        assert "; 2 dry runs left out" in self.run(tmp_path, "-o", tmp_path / "page.html").stdout

    def test_dry_runs_and_unmatched_records_are_mentioned(self, tmp_path, monkeypatch):
        install(monkeypatch, widths())
        write_runs(tmp_path, tiny(widths()).cells[0].recipe, 11.11, 12.22)
        write_runs(tmp_path, recipe(network="other"), 50.0)
        said = self.run(tmp_path, "-o", tmp_path / "page.html").stdout
        assert "2 dry runs left out (--scale tiny shows them)" in said
        assert "1 record belongs to no cell of profile paper" in said
        markdown = self.run(tmp_path, "--format", "md").stdout
        assert "### Records that match no cell" in markdown
        assert "| 0 | 50.00 | none |" in markdown
