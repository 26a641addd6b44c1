"""``iterand bench``: every benchmark runs here, its numbers are numbers, and what goes wrong is said."""

import json
import math
import sys
from functools import partial

import pytest
import torch

from iterand import memory
from iterand.lab.benchmarks import epoch, inference, step, table, timing
from iterand.lab.benchmarks.catalog import verdicts
from iterand.lab.benchmarks.table import Options
from iterand.lab.benchmarks.timing import Timer, burst, one_by_one, spread, subject, take_turns
from iterand.lab.experiments.library import find_recipe
from iterand.lab.training.folder import RunFolder
from iterand.lab.training.run import run
from iterand.surgery import masked_layers

CPU = torch.device("cpu")
TINY = ["--network", "digits", "--batch-size", "16", "--size", "1000", "--examples", "48", "--repeats", "2"]
SPREADS = {
    "step": ["milliseconds", "ratio_to_dense"],
    "loop": ["milliseconds", "ratio_to_dense"],
    "select": ["milliseconds", "nanoseconds_a_weight"],
    "randomize": ["milliseconds", "host_milliseconds", "nanoseconds_a_weight"],
    "augment": ["epoch_milliseconds", "images_a_second"],
    "epoch": ["seconds", "data_seconds", "steps_seconds", "evaluation_seconds"],
    "ticket": ["write_seconds", "load_seconds"],
    "tasks": ["first_milliseconds", "again_milliseconds", "cached_milliseconds", "ratio_to_copy"],
    "inference": ["milliseconds"],
}


@pytest.fixture
def cli(cli):
    """Run ``iterand bench``."""
    return partial(cli, "bench")


def test_all_benchmarks_give_numbers(cli):
    code, out, err = cli(*TINY, "--device", "cpu", "--json")
    assert (code, err) == (0, "")
    record = json.loads(out)
    assert record["format"] == "iterand benchmark 1"
    assert record["environment"]["torch"] == torch.__version__
    assert record["environment"]["hardware"]["cores"] > 0
    assert list(record["benchmarks"]) == list(SPREADS)
    for name, columns in SPREADS.items():
        rows = record["benchmarks"][name]["rows"]
        assert rows
        assert record["benchmarks"][name]["notes"]
        for row in rows:
            assert "failed" not in row, row
            for column in columns:
                found = row[column]
                assert all(math.isfinite(value) and value > 0 for value in found.values()), (name, column)
                assert found["p10"] <= found["median"] <= found["p90"]
    rows = record["benchmarks"]["step"]["rows"]
    assert [row["method"] for row in rows] == ["sgd", "edge_popup", "iterand"]
    assert rows[0]["ratio_to_dense"]["median"] == 1
    assert rows[2]["randomization_milliseconds"] > 0
    weights = {(row["subject"], row["ranking"], row["weights"]) for row in record["benchmarks"]["select"]["rows"]}
    assert weights == {("digits", "layer", 1364), ("digits", "global", 1364), ("one tensor", "layer", 1000)}
    for row in record["benchmarks"]["augment"]["rows"]:
        assert row["images_a_second"]["median"] == pytest.approx(48e3 / row["epoch_milliseconds"]["median"])
    (row,) = record["benchmarks"]["epoch"]["rows"]
    parts = sum(row[f"{part}_seconds"]["p10"] for part in ("data", "steps", "evaluation"))
    assert parts < row["seconds"]["p90"]
    assert (row["data"], row["examples"]) == ("digits", 48)
    (row,) = record["benchmarks"]["ticket"]["rows"]
    assert row["bits_a_weight"] == pytest.approx(8 * row["ticket_bytes"] / 1364)


def test_a_ticket_has_inputs_of_its_data(tmp_path):
    run(find_recipe("digits", ["epochs=1"]), RunFolder(tmp_path), device=CPU)
    _, shape = inference._network(str(tmp_path / "model.ticket"))
    assert shape == (1, 8, 8)


def test_random_images_stand_in_for_data_that_are_missing(cli, tmp_path):
    arguments = ["--network", "resnet20", "--batch-size", "4", "--examples", "8", "--repeats", "1", "--json"]
    code, out, _ = cli("epoch", *arguments, "--device", "cpu", "--data-dir", str(tmp_path))
    assert code == 0
    (row,) = json.loads(out)["benchmarks"]["epoch"]["rows"]
    assert (row["data"], row["examples"], row["seconds"]["n"]) == ("random images", 8, 1)


def test_table_for_people(cli):
    code, out, err = cli("select", "--size", "1000", "--repeats", "2", "--device", "cpu")
    assert (code, err) == (0, "")
    assert "nanoseconds a weight" in out
    assert "1,000" in out
    assert f"torch {torch.__version__}" in out


@pytest.mark.parametrize("width", [80, 200])
def test_no_word_of_a_table_is_broken(cli, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, _ = cli("ticket", "--network", "resnet20", "--repeats", "1")
    assert code == 0
    for whole in ("resnet20", "signed_constant", "270,896", "distribution", "float32", "percent"):
        assert whole in out.split(), out
    assert max(map(len, out.splitlines())) <= width


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["stp"], "unknown benchmark 'stp'; did you mean 'step'?"),
        (
            ["inference", "--execution", "tvm"],
            "there is no runtime 'tvm'; there are iterand, iterand-int8, onnxruntime, ",
        ),
        (["step", "--network", "conv7"], "unknown recipe 'conv7'; did you mean 'conv6'?"),
        (["step", "--network", "lstm"], "lstm is trained on imdb; benchmarks know the shapes of digits, cifar10"),
        (["step", "--precision", "int8"], "precision is 'int8'; it must be one of float32, bfloat16"),
        (["step", "--device", "tpu"], "device is 'tpu'"),
        (["step", "--size", "9"], "--size is for select, not for step; leave it out"),
        (["select", "--examples", "9"], "--examples is for augment or epoch, not for select; leave it out"),
        (["augment", "--network", "conv6"], "--network is for step or loop or select or randomize or epoch or ticket"),
        (["tasks", "--execution", "eager"], "--execution is for step or loop or inference, not for tasks"),
        (["tasks", "--batch-size", "9"], "--batch-size is for step or loop or augment or epoch or inference, not"),
        (["loop", "--precision", "float32"], "--precision is for step or epoch, not for loop; leave it out"),
        (["step", "--data-dir", "."], "--data-dir is for epoch, not for step; leave it out"),
        (["ticket", "--device", "cuda"], "--device cuda is for step or loop or select or randomize or augment or"),
    ],
)
def test_bad_input_gets_one_sentence(cli, arguments, sentence):
    code, out, err = cli(*arguments)
    assert (code, out) == (1, "")
    assert sentence in err
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [["inference", "--batch-size"], ["select", "--size"], ["augment", "--examples"]])
def test_more_than_any_memory_holds_is_refused(cli, arguments):
    code, out, err = cli(*arguments, str(10**22))
    assert (code, out) == (2, "")
    assert f"Invalid value for '{arguments[1]}'" in err


def test_what_fails_gives_a_reason_and_the_others_go_on(cli, monkeypatch):
    whole = epoch.ImageSplit

    def broken(images, labels, normalize, augmentation):
        if augmentation == "crop":
            raise torch.OutOfMemoryError("no memory left\nand much more about it")
        return whole(images, labels, normalize, augmentation)

    monkeypatch.setattr(epoch, "ImageSplit", broken)
    code, out, err = cli("augment", "--examples", "32", "--repeats", "1", "--device", "cpu")
    assert code == 0
    assert "no memory left" in out
    assert "much more" not in out
    assert out.count("(") >= 4, "two augmentations were measured"
    assert err == "warning: some could not be measured; the table says why\n"


@pytest.mark.parametrize("width", [45, 80])
def test_a_package_that_is_missing_is_named_with_its_extra(cli, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setitem(sys.modules, "transformers", None)
    _, out, _ = cli("tasks", "--network", "minilm", "--repeats", "1")
    assert "pip install 'iterand[transformers]'" in " ".join(out.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["select", "--size", 10**12],
        ["select", "--size", 10**12, "--json"],
        ["augment", "--examples", 10**12],
        ["loop", "--batch-size", 10**12],
    ],
)
def test_where_nothing_is_measured_the_command_fails(cli, arguments):
    code, out, err = cli(*arguments, "--repeats", "1", "--device", "cpu")
    assert (code, err) == (1, "error: nothing could be measured; the table says why\n")
    assert "memory" in out


def test_what_is_measured_is_printed_beside_a_size_that_does_not_fit(cli, monkeypatch):
    monkeypatch.setattr(memory, "main_memory", lambda: 10**6)
    code, out, err = cli("select", "--size", "1000", "--size", 10**6, "--repeats", "1", "--device", "cpu", "--json")
    assert (code, err) == (0, "warning: some could not be measured; the table says why\n")
    measured, failed = (json.loads(out)["benchmarks"]["select"]["rows"][index] for index in (0, -1))
    assert measured["milliseconds"]["n"] == 1
    assert failed["failed"] == (
        "measuring so many scores takes at least 8 MB of memory, but 1 MB are free; choose fewer with --size"
    )


def test_step_is_the_step_of_the_loop():
    """Scores move, weights only by randomization, and only when it is due."""
    chosen = subject("digits", ("method.name=iterand", f"period={step.PERIOD}", "rate=1.0"))
    one = step.Contender(chosen, chosen.network(), step.ways(CPU)[0], chosen.batches(2, 8, CPU), CPU)
    (layer, *_) = masked_layers(one.session.model).values()
    score, weight = layer.score.detach().clone(), layer.weight.detach().clone()
    one.run_between_randomizations()
    one.run_between_randomizations()
    assert not torch.equal(layer.score, score)
    assert torch.equal(layer.weight, weight)
    assert one.randomization() > 0
    assert not torch.equal(layer.weight, weight)
    assert one.session.seen == 16


def test_spread():
    found = spread([5.0, 1.0, 2.0, 4.0, 3.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0])
    assert (found.p10, found.median, found.p90, found.n) == (2, 6, 10, 11)
    assert found.scaled(0.5).p90 == 5


def test_works_take_turns():
    calls = []
    times = take_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3, 0.0, CPU)
    assert "".join(calls) == "aabb" + "ab" * 3
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}


def test_only_the_work_is_timed(monkeypatch):
    now = 0.0

    def work(seconds=0.05):
        nonlocal now
        now += seconds

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    assert one_by_one(work, 2, CPU, before=lambda: work(3)) == ([pytest.approx(50)] * 2,) * 2
    assert burst(work, 2, CPU) == pytest.approx(50)
    timer = Timer(CPU)
    for _ in range(2):
        with timer:
            work()
    work()
    assert timer.total() == pytest.approx(0.1)
    assert timer.total() == 0


ROUNDS = {"randomize": 0.174, "randomize, cut known": 0.083, "copy": 0.026}


def test_targets():
    row = {"network": "conv6", "execution": "eager", "method": "iterand", "batch": 128}
    tables = {"step": {"rows": [row | {"ratio_to_dense": {"median": 1.2}}, row | {"ratio_to_dense": None}]}}
    (missed,) = verdicts({"hardware": {"cpu": "any"}}, tables)
    assert (missed["measured"], missed["limit"], missed["met"]) == (1.2, 1.10, False)
    assert verdicts({"hardware": {"cpu": "any", "gpu": "NVIDIA H200"}}, tables) == []
    fast = row | {"execution": "graph", "ratio_to_dense": {"median": 1.01}, "host_syncs": 0}
    found = verdicts({"hardware": {"gpu": "NVIDIA H200"}}, {"step": {"rows": [fast]}})
    assert [(one["column"], one["met"]) for one in found] == [("ratio_to_dense", True), ("host_syncs", True)]
    rounds = [{"network": "resnet18", "what": what, "milliseconds": {"median": time}} for what, time in ROUNDS.items()]
    (met,) = verdicts({"hardware": {"gpu": "NVIDIA H200"}}, {"randomize": {"rows": rounds}})
    assert (met["measured"], met["limit"], met["met"]) == (0.083, 0.1, True)


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("milliseconds", {"median": 2.3912, "p10": 0.1, "p90": 12345.6, "n": 3}, "2.391 (0.1000–12,346)"),
        ("peak_bytes", 1_500_000, "1.50 MB"),
        ("weights", 2_261_184, "2,261,184"),
        ("met", False, "no"),
        ("note", None, ""),
    ],
)
def test_cells(column, value, text):
    assert table.cell(column, value) == text


def test_options_of_a_short_run():
    assert Options(CPU).batch == 128
    assert Options(CPU, short=True).batch == 32
    assert Options(torch.device("cuda"), short=True).batch == 128
    assert Options(CPU, batch_size=3, short=True).settings == ("batch_size=3", "precision=float32")
    assert Options(torch.device("cuda")).settings == ("batch_size=128",)
