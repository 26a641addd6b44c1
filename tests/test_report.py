"""The report's numbers: what is read, what is put together, what is said of it."""

import json
import math
import os
import re
import sys
from dataclasses import replace

import pytest

from iterand.errors import IterandError
from iterand.lab.experiments.experiment import Cell, Experiment, PaperNumber
from iterand.lab.experiments.library import find_recipe
from iterand.lab.report import assembly, formats
from iterand.lab.report.assembly import read_report
from iterand.lab.report.formats import as_html, as_json, as_markdown
from iterand.lab.report.formatting import Summary, compare, summarize
from iterand.lab.report.records import identity, read_records
from iterand.lab.training import recipe_file
from iterand.lab.training.recipe import Recipe, recipe_keys
from reporting import as_record, install, recipe, tiny, widths, write, write_runs

OTHER_VALUES = {
    "method.share": ("a", "b"),
    "method.include": ("a", "b"),
    "method.exclude": ("a", "b"),
    "method.weight_distribution": "signed_constant",
    "method.score_distribution": "signed_constant",
    "data.name": "cifar10",
    "network.name": "resnet18",
    "network.arguments": {"width": 3},
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


def nested(depth):
    value = {}
    for _ in range(depth):
        value = {"in": value}
    return value


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
            ("kept.json", as_record(recipe(), math.nan), "metrics.train_accuracy is nan"),
            ("kept.json", as_record(recipe(), 90.0, result={"test_accuracy": math.nan}), "result.test_accuracy is nan"),
            ("kept.json", as_record(recipe(), 90.0, result={"test_accuracy": 1e308}), "a number from 0 to 100"),
            ("kept.json", as_record(recipe(), 90.0, result={"test_accuracy": 90, "kept": 1e308}), "kept is 1e+308"),
            ("kept.json", as_record(recipe(), 90.0, result={"test_accuracy": 90, "kept": "all"}), "kept is 'all'"),
            ("kept.json", as_record(recipe(), 90.0, seconds=1e308), "seconds is 1e+308; it must be a number from 0 to"),
            ("kept.json", as_record(recipe(), 90.0, seconds=10**400), "seconds is 1000"),
            ("kept.json", as_record(recipe(), 90.0, environment={"commit": "\ud800"}), "UTF-8 cannot hold"),
            ("kept.json", as_record(recipe(), 90.0, environment={"\udcff": 1}), r"it holds '\udcff', which UTF-8"),
            ("kept.json", as_record(recipe(), 90.0, environment=nested(40)), "nested more than 20 deep"),
            ("record.json", "[" * 100_000, "cannot be read"),
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

    @pytest.mark.skipif(sys.platform == "win32", reason="there are no pipes in folders there")
    def test_a_file_of_another_size_or_kind(self, tmp_path):
        """A pipe would be waited for, and the memory may not hold what is many times as long as any record."""
        with (tmp_path / "vast.json").open("wb") as file:
            file.truncate(1 << 27)
        (tmp_path / "vast").mkdir()
        with (tmp_path / "vast" / "record.json").open("wb") as file:
            file.truncate(1 << 27)
        (tmp_path / "pipe").mkdir()
        os.mkfifo(tmp_path / "pipe" / "record.json")
        assert read_records(tmp_path).damaged == (
            "pipe/record.json: it is no file",
            "vast/record.json: it has more than 67,108,864 bytes",
        )

    def test_odd_records_do_not_block_the_report(self, tmp_path, monkeypatch):
        install(monkeypatch, widths())
        of = widths().cells[0].recipe
        write_runs(tmp_path, of, 88.0, 88.2)
        for seed, changes in enumerate(({"seconds": 1e308}, {"environment": {"commit": "\ud800"}}), start=2):
            write(tmp_path / f"{seed}.json", as_record(replace(of, seed=seed), 90.0, **changes))
        for seed in (4, 5):
            write(tmp_path / f"{seed}.json", as_record(replace(of, seed=seed), 1e308))
        found = read_report(tmp_path)
        assert found.outcomes[0].cells[0].summary == summarize([88.0, 88.2])
        assert len(found.damaged) == 4
        for text in (as_html(found), as_markdown(found), as_json(found)):
            text.encode()

    @pytest.mark.skipif(sys.platform != "linux", reason="names are text there")
    def test_a_folder_whose_name_is_no_text(self, tmp_path, monkeypatch):
        install(monkeypatch, widths())
        write(tmp_path / "good.json", as_record(widths().cells[0].recipe, 90.0))
        for name, value in ((b"bad\xff", as_record(widths().cells[0].recipe, 91.0)), (b"worse\xff", "{")):
            write(tmp_path / os.fsdecode(name) / "record.json", value)
        found = read_report(tmp_path)
        assert [str(run.path) for run in found.runs] == ["good.json"]
        named, unread = found.damaged
        assert named == r"bad\udcff/record.json: its path is not UTF-8, so no page can name it; rename its folder"
        assert unread.startswith(r"worse\udcff/record.json: it cannot be read")
        for text in (as_html(found), as_markdown(found), as_json(found)):
            text.encode()

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
        """The folder of the user's images does not either: their digest does."""
        base = recipe()
        if key in ("data.path", "data.image_size", "data.sha256", "network.arguments", "network.sha256"):
            base = recipe_file.override(base, ["data.name=image_folder", "network.name=own.py:network"])
        if key.startswith("training.teacher"):
            base = recipe_file.override(base, ["teacher=runs/teacher"])
        if key == "method.coats":
            base = recipe_file.override(base, ["mask=multicoat", "coats=2"])
        if key == "method.train_norms":
            base = recipe_file.override(base, ["method.name=sgd"])
        same = identity(changed(base, key)) == identity(base)
        assert same == (key in ("name", "description", "seed", "data.path"))

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
        assert [entry.record.result["test_accuracy"] for entry in found.unmatched] == [10.0, 20.0, 30.0]

    def test_other_settings_are_named(self, tmp_path, monkeypatch):
        install(monkeypatch, widths())
        asked = ["sparsity=0.9", "epochs=3", "method.exclude=output"]
        for seed, name in ((4, "digits"), (5, "mine")):
            of = find_recipe("digits", [*asked, f"name={name}", f"seed={seed}"])
            write(tmp_path / f"{name}.json", as_record(of, 88.0))
        known, unknown = read_report(tmp_path).unmatched
        assert known.settings == ["method.sparsity=0.9", 'method.exclude=["output"]', "training.epochs=3"]
        assert unknown.settings == ["method.sparsity=0.9"]  # of a recipe that may have had other settings
        assert json.loads(as_json(read_report(tmp_path)))["unmatched"][0]["seed"] == 4

    def test_the_newest_of_two_records_counts_once(self, tmp_path, monkeypatch):
        install(monkeypatch, widths())
        of = recipe(width=0.5)
        write(tmp_path / "a.json", as_record(of, 80.0), age=20)
        write(tmp_path / "b.json", as_record(of, 88.0), age=10)
        write(tmp_path / "c.json", as_record(of, 70.0), age=30)
        write(tmp_path / "d.json", as_record(replace(of, seed=1), 89.0), age=40)
        found = read_report(tmp_path)
        assert [run.result["test_accuracy"] for run in found.outcomes[0].cells[0].runs] == [88.0, 89.0]
        assert {(str(old.record.path), str(old.newer.path)) for old in found.superseded} == {
            ("a.json", "b.json"),
            ("c.json", "b.json"),
        }
        assert "<code>a.json</code> has the settings and the seed of <code>b.json</code>" in as_html(found)

    def test_a_record_of_another_profile_says_which(self, tmp_path, monkeypatch):
        def find(name, *, profile, scale):
            cell = Cell("one", recipe(rate={"paper": 0.1, "text": 0.1, "best": 0.3}[profile]))
            return Experiment("one", "One", (cell,), 1)

        install(monkeypatch, widths())
        monkeypatch.setattr(assembly, "find_experiment", find)
        write(tmp_path / "best.json", as_record(recipe(rate=0.3), 90.0))
        write(tmp_path / "none.json", as_record(recipe(rate=0.4), 90.0))
        write(tmp_path / "paper.json", as_record(recipe(rate=0.1), 90.0))
        here = read_report(tmp_path)
        assert [str(run.path) for run in here.runs] == ["paper.json"]
        assert [(str(entry.record.path), entry.profiles) for entry in here.unmatched] == [
            ("best.json", ("best",)),
            ("none.json", ()),
        ]
        there = read_report(tmp_path, profile="best")
        assert [(str(entry.record.path), entry.profiles) for entry in there.unmatched] == [
            ("none.json", ()),
            ("paper.json", ("paper", "text")),
        ]

    def test_two_experiments_may_share_a_run(self, tmp_path, monkeypatch):
        install(monkeypatch, widths(), replace(widths(), name="again"))
        write_runs(tmp_path, recipe(width=0.5), 88.0)
        found = read_report(tmp_path)
        assert [outcome.done for outcome in found.outcomes] == [1, 1]
        assert len(found.runs) == 1


def on_gpu(command):
    """The environment of a run on a GPU."""
    return {"device": "cuda", "hardware": {"cpu": "A", "gpu": "B"}, "command": command}


class TestTimes:
    @pytest.mark.parametrize(
        ("environment", "sharing"),
        [
            (on_gpu("iterand train conv6"), "unknown"),
            (on_gpu("iterand reproduce figure2"), "unknown"),
            (on_gpu("iterand reproduce figure2 --jobs 1"), "unknown"),
            (on_gpu("iterand reproduce figure2 --jobs 3 --out runs"), "shared"),
            (on_gpu("iterand reproduce figure2 --jobs=3"), "shared"),
            (on_gpu("iterand reproduce figure2 --engine ray --gpus-per-run 0.5"), "shared"),
            (on_gpu("iterand reproduce figure2 --engine ray --gpus-per-run 1"), "unknown"),
            (on_gpu("iterand reproduce --jobs many 'unclosed"), "unknown"),
            ({"device": "cpu", "hardware": {"cpu": "A"}, "command": "iterand reproduce digits --jobs 4"}, "cpu"),
            ({}, "cpu"),
        ],
    )
    def test_whether_a_run_shared_its_gpu(self, tmp_path, environment, sharing):
        write(tmp_path / "a.json", as_record(recipe(), 90.0, environment=environment))
        assert read_records(tmp_path).found[0].sharing == sharing

    def test_times_of_shared_and_other_runs_are_never_averaged(self, tmp_path, monkeypatch):
        timed = replace(widths(), measure="seconds", plot="none")
        install(monkeypatch, timed)
        runs = [(100.0, "iterand train"), (110.0, "iterand train"), (400.0, "iterand reproduce --jobs 8")]
        for seed, (seconds, command) in enumerate(runs):
            of = replace(timed.cells[0].recipe, seed=seed)
            record = as_record(of, 88.0, seconds=seconds, environment=on_gpu(command))
            write(tmp_path / f"{seed}.json", record)
        found = read_report(tmp_path)
        cell = found.outcomes[0].cells[0]
        assert [(time.sharing, time.n, time.seconds) for time in cell.times] == [
            ("unknown", 2, 105.0),
            ("shared", 1, 400.0),
        ]
        assert cell.summary == summarize([100.0, 110.0])
        page = as_html(found)
        assert "2 min <small>?</small> <small>n = 2</small><br>7 min <small>shared</small> <small>n = 1</small>" in page
        assert "203.33" not in page  # the mean of all three
        assert cell.comparison is None  # other hardware
        assert "Other runs may have shared the GPU" in as_markdown(found)


class TestDates:
    def test_the_first_and_the_last(self, tmp_path, monkeypatch):
        install(monkeypatch, widths())
        dates = ["2026-11-16T23:59:59+00:00", "2026-11-14", "2026-11-15T08:00:00", None, 3, "yesterday"]
        for seed, date in enumerate(dates):
            record = as_record(replace(recipe(width=0.5), seed=seed), 88.0, environment={"date": date})
            write(tmp_path / f"{seed}.json", record)
        found = read_report(tmp_path)
        assert found.dates == ("2026-11-14", "2026-11-15", "2026-11-16")
        assert "<dd>2026-11-14 to 2026-11-16 <small>3 without a date</small></dd>" in as_html(found)
        assert "Dates of the runs: 2026-11-14 to 2026-11-16." in as_markdown(found)
        assert json.loads(as_json(found))["dates"] == {"first": "2026-11-14", "last": "2026-11-16", "runs_without": 3}

    def test_records_without_dates(self, tmp_path, monkeypatch):
        install(monkeypatch, widths())
        write(tmp_path / "a.json", as_record(recipe(width=0.5), 88.0, environment={}))
        found = read_report(tmp_path)
        assert "<dt>dates of the runs</dt><dd>not recorded</dd>" in as_html(found)
        assert "Dates" not in as_markdown(found)
        assert json.loads(as_json(found))["dates"] == {"first": None, "last": None, "runs_without": 1}


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
        results, _, others = page.partition('<section id="unmatched"')
        assert "88.00" not in re.sub(r'<td class="number" data-value="88.0" title.*', "", results)
        assert "88.00" in others

    def test_results_have_no_banner(self, tmp_path, monkeypatch):
        install(monkeypatch, widths())
        write_runs(tmp_path, widths().cells[0].recipe, 88.0)
        assert "Dry run" not in as_html(read_report(tmp_path))


def test_settings_are_split_into_the_base_and_a_cells_own():
    cells = widths().cells
    base = formats.common_settings(cells)
    assert base["network.name"] == "conv6"
    assert not {"network.width_factor", "method.name", "seed", "name"} & set(base)
    assert formats.own_settings(cells[0].recipe, base) == {"network.width_factor": "0.5", "method.name": "iterand"}
