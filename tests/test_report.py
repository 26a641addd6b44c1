"""The report's numbers: what is read, what is put together, what is said of it."""

import json
import math
import re
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from iterand.cli.report import report as report_command
from iterand.errors import IterandError
from iterand.experiments.experiment import Cell, Experiment, PaperNumber
from iterand.experiments.report import formatting, settings
from iterand.experiments.report.as_json import as_json
from iterand.experiments.report.assembly import read_report
from iterand.experiments.report.layout import panels, positions
from iterand.experiments.report.markdown import as_markdown
from iterand.experiments.report.matching import identity
from iterand.experiments.report.page import as_html
from iterand.experiments.report.records import read_records
from iterand.experiments.report.statistics import Summary, compare, summarize
from iterand.experiments.report.svg import Styles
from iterand.training import recipe_file
from iterand.training.recipe import Recipe, recipe_keys
from reporting import as_record, install, recipe, tiny, widths, write, write_runs

OTHER_VALUES = {
    "method.weight_distribution": "signed_constant",
    "method.score_distribution": "signed_constant",
    "data.name": "cifar10",
    "network.name": "resnet18",
}


def changed(of: Recipe, key: str) -> Recipe:
    """The recipe with another value of one setting."""
    section, _, name = key.rpartition(".")
    old = getattr(getattr(of, section) if section else of, name)
    choices = [entry for entry in recipe_keys()[key].metadata.get("choices") or () if entry != old]
    if key in OTHER_VALUES:
        new = OTHER_VALUES[key]
    elif choices:
        new = choices[0]
    elif isinstance(old, bool):
        new = not old
    elif isinstance(old, tuple):
        new = (*old, 7)
    else:
        new = f"{old}x" if isinstance(old, str) else old + 1 if isinstance(old, int) else old / 2 + 0.01
    values = recipe_file.as_dict(of)
    (values[section] if section else values)[name] = new
    return recipe_file.from_dict(values)


class TestStatistics:
    def test_mean_and_sample_deviation(self):
        # Deviations from 91 are −1, 0 and 1: variance (1 + 0 + 1) / 2.
        assert summarize([90.0, 91.0, 92.0]) == Summary(3, 91.0, 1.0)
        # (0.7, −0.5, −0.2): variance (0.49 + 0.25 + 0.04) / 2 = 0.39.
        found = summarize([89.0, 87.8, 88.1])
        assert found.mean == pytest.approx(88.3)
        assert found.std == pytest.approx(math.sqrt(0.39))

    def test_one_run_has_no_deviation_and_none_no_summary(self):
        assert summarize([88.8]) == Summary(1, 88.8, None)
        assert summarize([]) is None

    @pytest.mark.parametrize(
        ("ours", "paper", "deviation", "verdict"),
        [
            ((90.0, 0.3), (90.5, 0.4), math.sqrt(0.125), "same"),  # (0.09 + 0.16) / 2; twice it is 0.707
            ((90.0, 0.3), (90.75, 0.4), math.sqrt(0.125), "below"),
            ((90.75, 0.3), (90.0, 0.4), math.sqrt(0.125), "above"),
            ((90.0, None), (90.5, 0.25), 0.25, "same"),  # exactly two deviations
            ((90.0, None), (90.5, 0.24), 0.24, "below"),
            ((90.0, 0.25), (89.5, None), 0.25, "same"),
            ((90.0, 0.25), (89.4, None), 0.25, "above"),
            ((90.0, None), (90.0, None), None, "unknown"),
            ((90.0, 0.0), (90.0, 0.0), 0.0, "same"),
            ((90.0, 0.0), (90.1, 0.0), 0.0, "below"),
        ],
    )
    def test_within_two_deviations(self, ours, paper, deviation, verdict):
        found = compare(Summary(3, *ours), PaperNumber(*paper, "Table 4"))
        assert found.difference == pytest.approx(ours[0] - paper[0])
        assert found.deviation == (None if deviation is None else pytest.approx(deviation))
        assert found.verdict == verdict


class TestRecords:
    def test_found_wherever_they_are_kept(self, tmp_path):
        write(tmp_path / "runs" / "a" / "record.json", as_record(recipe(), 90.0))
        write(tmp_path / "committed.json", as_record(recipe(), 91.0))
        found = read_records(tmp_path)
        assert [(str(entry.path), entry.result["test_accuracy"]) for entry in found.found] == [
            ("committed.json", 91.0),
            ("runs/a/record.json", 90.0),
        ]
        assert not found.damaged

    @pytest.mark.parametrize("text", ["[1, 2]", '{"format": "something else"}', "{}", "3", "{not json", "[" * 100_000])
    def test_other_json_is_passed_over(self, tmp_path, text):
        write(tmp_path / "environment.json", text)
        assert not read_records(tmp_path).found
        assert not read_records(tmp_path).damaged

    @pytest.mark.parametrize(
        ("name", "value", "words"),
        [
            ("record.json", '{"format": "iterand', "cannot be read"),
            ("kept.json", json.dumps(as_record(recipe(), 90.0))[:300], "cannot be read"),
            ("record.json", "{}", "its format is None"),
            ("kept.json", as_record(recipe(), 90.0, format="iterand record 2"), "'iterand record 2'"),
            ("kept.json", as_record(recipe(), math.nan), "result.test_accuracy is nan"),
            ("kept.json", as_record(recipe(), 90.0, result={}), "result.test_accuracy is None"),
            ("kept.json", as_record(recipe(), 90.0, result=[1]), "it has no result"),
            ("kept.json", as_record(recipe(), 90.0, seconds=True), "seconds is True"),
            ("kept.json", as_record(recipe(), 90.0, metrics=[]), "one table an epoch"),
            ("kept.json", as_record(recipe(), 90.0, metrics=[{"epoch": 1}]), "metrics.train_accuracy is None"),
            ("kept.json", as_record(recipe(), 90.0, recipe={"perod": 3}), "no key 'perod'"),
        ],
    )
    def test_a_damaged_record_is_named_and_left_out(self, tmp_path, name, value, words):
        write(tmp_path / "good.json", as_record(recipe(), 90.0))
        write(tmp_path / "folder" / name, value)
        found = read_records(tmp_path)
        assert [str(entry.path) for entry in found.found] == ["good.json"]
        (sentence,) = found.damaged
        assert sentence.startswith(f"folder/{name}: ")
        assert words in sentence

    def test_bytes_that_are_no_text(self, tmp_path):
        (tmp_path / "record.json").write_bytes(b"\xff\xfe\x00")
        (tmp_path / "other.json").write_bytes(b"\xff\xfe\x00")
        (sentence,) = read_records(tmp_path).damaged
        assert sentence.startswith("record.json: it cannot be read")

    def test_a_recipe_from_before_a_setting_was_known_has_its_default(self, tmp_path):
        record = as_record(recipe(), 90.0)
        del record["recipe"]["method"]["floor"]
        write(tmp_path / "old.json", record)
        assert read_records(tmp_path).found[0].recipe == recipe()

    def test_no_folder(self, tmp_path):
        with pytest.raises(IterandError, match="is not a folder"):
            read_records(tmp_path / "missing")


class TestMatching:
    @pytest.mark.parametrize("key", sorted(recipe_keys()))
    def test_every_setting_but_name_description_and_seed_tells_cells_apart(self, key):
        base = recipe()
        same = identity(changed(base, key)) == identity(base)
        assert same == (key in ("name", "description", "seed"))

    def test_a_whole_number_is_the_float_it_is(self):
        assert identity(recipe(sparsity=0)) == identity(recipe(sparsity=0.0))

    def test_other_settings_are_never_mixed_in(self, tmp_path, monkeypatch):
        install(monkeypatch, widths())
        write_runs(tmp_path, recipe(width=0.5), 88.0, 88.2)
        write_runs(tmp_path, recipe(width=0.5, rate=0.2), 10.0, 20.0, 30.0)
        found = read_report(tmp_path)
        first, *others = found.outcomes[0].cells
        assert first.summary == summarize([88.0, 88.2])
        assert all(cell.summary is None for cell in others)
        assert [entry.record.result["test_accuracy"] for entry in found.strangers] == [10.0, 20.0, 30.0]

    def test_the_newest_of_two_records_counts_once(self, tmp_path, monkeypatch):
        install(monkeypatch, widths())
        of = recipe(width=0.5)
        write(tmp_path / "a.json", as_record(of, 80.0), age=20)
        write(tmp_path / "b.json", as_record(of, 88.0), age=10)
        write(tmp_path / "c.json", as_record(of, 70.0), age=30)
        write(tmp_path / "d.json", as_record(replace(of, seed=1), 89.0), age=40)
        found = read_report(tmp_path)
        assert [run.result["test_accuracy"] for run in found.outcomes[0].cells[0].runs] == [88.0, 89.0]
        assert {(str(old.record.path), str(old.newer.path)) for old in found.set_aside} == {
            ("a.json", "b.json"),
            ("c.json", "b.json"),
        }
        assert "<code>a.json</code> has the settings and the seed of <code>b.json</code>" in as_html(found)

    def test_two_experiments_may_share_a_run(self, tmp_path, monkeypatch):
        install(monkeypatch, widths(), replace(widths(), name="again"))
        write_runs(tmp_path, recipe(width=0.5), 88.0)
        found = read_report(tmp_path)
        assert [outcome.done for outcome in found.outcomes] == [1, 1]
        assert len(found.runs) == 1


class TestDryRuns:
    def test_they_never_count_as_results(self, tmp_path, monkeypatch):
        install(monkeypatch, widths())
        write_runs(tmp_path, tiny(widths()).cells[0].recipe, 11.11, 12.22)
        found = read_report(tmp_path)
        assert not found.runs
        assert not found.started
        assert [outcome.done for outcome in found.dry] == [1]
        for text in (as_html(found), as_markdown(found), as_json(found)):
            assert "11.11" not in text
            assert "11.66" not in text  # their mean
        assert "Dry runs: not results" in as_html(found)

    def test_a_report_of_them_says_so(self, tmp_path, monkeypatch):
        install(monkeypatch, widths())
        write_runs(tmp_path, tiny(widths()).cells[0].recipe, 11.11, 12.22)
        write_runs(tmp_path, widths().cells[0].recipe, 88.0)
        found = read_report(tmp_path, scale="tiny")
        page = as_html(found)
        assert 'class="banner" role="note"><strong>Dry run.</strong>' in page
        assert "<title>Dry run of " in page
        assert as_markdown(found).startswith("> **Dry run.**")
        assert json.loads(as_json(found))["scale"] == "tiny"
        assert "88.00" not in re.sub(r'<td class="number" data-value="88.0" title.*', "", page)

    def test_results_have_no_banner(self, tmp_path, monkeypatch):
        install(monkeypatch, widths())
        write_runs(tmp_path, widths().cells[0].recipe, 88.0)
        assert "Dry run" not in as_html(read_report(tmp_path))


def small_report(tmp_path, monkeypatch):
    open_experiment = Experiment("imdb", "Film reviews", (Cell("LSTM", recipe(network="lstm")),), 5, "Table 11")
    install(monkeypatch, widths(), open_experiment)
    write_runs(tmp_path, recipe(width=0.5), 87.8, 88.0, 88.2)
    write_runs(tmp_path, recipe(width=1.0), 91.0)
    write_runs(tmp_path, recipe("sgd", width=0.5), 85.0, 85.0)
    return read_report(tmp_path)


MARKDOWN = """\
Mean ± standard deviation over n runs. “As the paper”: within 2 deviations of its mean.

### Varying the width (Table 4)

| method | width ρ | test accuracy (%) | paper | difference |  |
|---|---|---:|---:|---:|---|
| IteRand | 0.5 | 88.00 ± 0.20 (n = 3) | 88.00 ± 0.30 | +0.00 | as the paper |
| IteRand | 1 | 91.00 (n = 1) | 90.00 ± 0.30 | +1.00 | above |
| SGD | 0.5 | 85.00 ± 0.00 (n = 2) | 89.00 ± 0.30 | −4.00 | below |
| SGD | 1 | open | 91.00 ± 0.30 |  |  |

### Open

- imdb: Film reviews
"""


class TestForms:
    def test_markdown(self, tmp_path, monkeypatch):
        assert as_markdown(small_report(tmp_path, monkeypatch)) == MARKDOWN

    def test_json(self, tmp_path, monkeypatch):
        found = json.loads(as_json(small_report(tmp_path, monkeypatch)))
        assert found["format"] == "iterand report 1"
        assert [entry["name"] for entry in found["experiments"]] == ["widths", "imdb"]
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
            "seconds": 90.0,
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
        assert "Open: no runs yet" in page
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


class TestLayout:
    @pytest.mark.parametrize(
        ("places", "expected"),
        [
            ((0.25, 0.5, 1.0, 2.0), [math.log(0.25), math.log(0.5), 0.0, math.log(2.0)]),
            ((1, 30, 300, 3000), [0.0, math.log(30), math.log(300), math.log(3000)]),
            ((0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99), [0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99]),
            ((0.0, 0.01, 0.1, 1.0), [0.0, 1.0, 2.0, 3.0]),
            ((1.0, 2.0), [1.0, 2.0]),
            ((5.0,), [5.0]),
            ((), []),
        ],
    )
    def test_an_axis_is_straight_logarithmic_or_in_steps(self, places, expected):
        assert positions(places) == pytest.approx(expected)

    def test_panels_are_networks_and_series_what_is_left(self, tmp_path, monkeypatch):
        cells = tuple(
            Cell(
                "x", recipe(network=network, width=width), (("network", network), ("method", method), ("width", width))
            )
            for network in ("conv6", "resnet18")
            for method in ("IteRand", "SGD")
            for width in (0.5, 1.0)
        )
        install(monkeypatch, replace(widths(), cells=cells))
        found = panels(read_report(tmp_path).outcomes[0], "width")
        assert [(panel.title, [(series.name, len(series.cells)) for series in panel.series]) for panel in found] == [
            ("conv6", [("IteRand", 2), ("SGD", 2)]),
            ("resnet18", [("IteRand", 2), ("SGD", 2)]),
        ]

    def test_a_method_has_one_hue_whatever_its_variant(self):
        styles = Styles()
        hue = {name: styles[name].variable.rpartition("-")[0] for name in ("SGD", "IteRand, SC", "IteRand (KU)", "new")}
        assert hue == {"SGD": "series-3", "IteRand, SC": "series-1", "IteRand (KU)": "series-1", "new": "series-5"}
        assert styles["IteRand, SC"] != styles["IteRand (KU)"]
        assert styles[""] == styles["IteRand"] == styles["IteRand, SC"]


def test_settings_are_split_into_the_base_and_a_cells_own():
    cells = widths().cells
    base = settings.common(cells)
    assert base["network.name"] == "conv6"
    assert not {"network.width_factor", "method.name", "seed", "name"} & set(base)
    assert settings.own(cells[0].recipe, base) == {"network.width_factor": "0.5", "method.name": "iterand"}


@pytest.mark.parametrize(
    ("seconds", "words"), [(2.849, "2.8 s"), (99.9, "99.9 s"), (600, "10 min"), (6253.69, "1 h 44 min")]
)
def test_durations(seconds, words):
    assert formatting.duration(seconds) == words


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
        assert self.run(tmp_path / "runs", "--format", "md").stdout == MARKDOWN
        self.run(tmp_path / "runs", "--format", "md", "-o", tmp_path / "table.md")
        assert (tmp_path / "table.md").read_text() == MARKDOWN

    def test_json_is_one_object(self, tmp_path, monkeypatch):
        small_report(tmp_path / "runs", monkeypatch)
        assert json.loads(self.run(tmp_path / "runs", "--format", "json").stdout)["profile"] == "paper"

    def test_dry_runs_and_strangers_are_mentioned(self, tmp_path, monkeypatch):
        install(monkeypatch, widths())
        write_runs(tmp_path, tiny(widths()).cells[0].recipe, 11.11, 12.22)
        write_runs(tmp_path, recipe(network="other"), 50.0)
        said = self.run(tmp_path, "-o", tmp_path / "page.html").stdout
        assert "2 dry runs left out (--scale tiny shows them)" in said
        assert "1 records belong to no cell of profile paper" in said
