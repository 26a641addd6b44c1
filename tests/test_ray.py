"""The Ray engine, with a real Ray of two workers: what comes out is what the local engine gives, whatever happens."""

import io
import json
import math
import os
import signal
import sys
import time
import uuid
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from forked import Command
from iterand.cli import reproduce as cli_reproduce
from iterand.cli import runs_table
from iterand.cli.main import app
from iterand.errors import IterandError, MissingExtraError
from iterand.lab.experiments import cluster as engine
from iterand.lab.experiments import local
from iterand.lab.experiments.cluster import Cluster, connected
from iterand.lab.experiments.library import find_recipe
from iterand.lab.experiments.local import Event, Task
from iterand.lab.training import recipe_file
from iterand.lab.training.checkpoint import read_checkpoint
from iterand.lab.training.environment import StopRequest
from iterand.lab.training.folder import default_path

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'iterand[ray]'")

STEPS = 4  # an epoch of the recipes below
SHORT = ["training.epochs=3", "data.limit=256"]
LONG = ["training.epochs=120", "data.limit=256"]
METHODS = {
    "SGD": ["method.name=sgd", "learning_rate.initial=0.02", *SHORT],
    "edge-popup": ["method.name=edge_popup", *SHORT],
    "IteRand": SHORT,
    "IteRand, long": LONG,
}


def task(label, base, *settings):
    recipe = recipe_file.override(find_recipe("digits"), list(settings))
    return Task(f"digits/{label}", recipe, default_path(recipe, base), "cpu")


def what_came_out(record):
    """A record without what differs between two runs of one recipe: the time they took and their date."""
    kept = {key: value for key, value in record.items() if key not in ("seconds", "randomization_milliseconds")}
    return {**kept, "environment": {key: value for key, value in kept["environment"].items() if key != "date"}}


def records(events):
    return {event.task.label: what_came_out(event.value) for event in events if event.kind == "done"}


@pytest.fixture(scope="module", autouse=True)
def _secret():
    """A new Ray writes a secret to the home folder unless it is given one; a command that connects needs it too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_AUTH_MODE", raising=False)
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_AUTH_TOKEN", uuid.uuid4().hex)
        patch.setenv("RAY_worker_niceness", "0")  # else its workers wait for the tests that run beside these
        yield


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The records that the local engine gives."""
    base = tmp_path_factory.mktemp("local")
    found = records(local.run_tasks([task(label, base, *settings) for label, settings in METHODS.items()], jobs=2))
    assert set(found) == {f"digits/{label}" for label in METHODS}
    return found


# Without a Ray: what is refused.


def test_without_ray_one_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(MissingExtraError, match=r"--engine ray.* needs ray, .*pip install 'iterand\[ray\]'"),
        connected(None),
    ):
        pass


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("127.0.0.1:1", r"no Ray cluster to use at '127.0.0.1:1' \(.*refused.*\); start one with ray start --head"),
        ("no.such.host.invalid:6379", "no Ray cluster to use at 'no.such.host.invalid:6379'"),
        ("127.0.0.1:99999", "no Ray cluster to use at '127.0.0.1:99999'"),
        ("somewhere", r"no Ray cluster to use at 'somewhere' \(Invalid address format: somewhere\)"),
    ],
)
def test_no_cluster_there_is_said_at_once(address, sentence, monkeypatch):
    """Where nobody answers, Ray is not asked: it would try for minutes."""
    asked, init = [], ray.init
    monkeypatch.setattr(ray, "init", lambda address, **options: asked.append(address) or init(address, **options))
    with pytest.raises(IterandError, match=sentence), connected(address):
        pass
    assert asked == ([] if ":" in address else [address])


def test_auto_does_not_wait_for_a_cluster_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "_ADDRESS_FILE", tmp_path / "ray_current_cluster")
    (tmp_path / "ray_current_cluster").write_text("127.0.0.1:1\n")
    with pytest.raises(IterandError, match=r"no Ray cluster to use at '127.0.0.1:1'"):
        engine._check_address("auto")
    (tmp_path / "ray_current_cluster").unlink()
    engine._check_address("auto")  # now Ray has to find out


def test_from_outside_the_cluster_ray_has_its_own_command():
    with pytest.raises(ValueError, match=r"'ray://head:10001'; it must be HOST:PORT or auto.*ray job submit"):
        engine._check_address("ray://head:10001")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--engine", "dask"], "unknown engine 'dask'; it must be local or ray"),
        (["--address", "auto"], "--address auto says something to Ray only; add --engine ray"),
        (["--gpus-per-run", "0.5"], "--gpus-per-run 0.5 says something to Ray only"),
    ],
)
def test_options_that_make_no_sense_together(tmp_path, arguments, sentence):
    answer = CliRunner().invoke(app, ["reproduce", "digits", "--out", str(tmp_path), *arguments])
    assert sentence in str(answer.exception)
    assert not list(tmp_path.iterdir())


def test_what_ray_prints_does_not_mix_with_results(monkeypatch, capsys):
    monkeypatch.setattr(engine, "connected", lambda address, jobs: nullcontext(with_gpus(0)))
    with cli_reproduce._place("ray", "auto", 3, None, None) as place:
        print("(raylet) a node has been marked dead")
        assert (place.device, place.jobs) == ("cpu", 3)
    assert capsys.readouterr() == ("", "(raylet) a node has been marked dead\n")


def with_gpus(count):
    return Cluster(float(count), StopRequest(), ExitStack())


def test_device_and_share_of_a_gpu():
    assert [with_gpus(0).device(name) for name in ("auto", "cpu")] == ["cpu", "cpu"]
    assert [with_gpus(8).device(name) for name in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]
    with pytest.raises(ValueError, match="the Ray cluster has no GPU; use --device cpu"):
        with_gpus(0).device("cuda")
    with pytest.raises(ValueError, match="device is 'cuda:1'; with Ray it must be auto, cpu or cuda"):
        with_gpus(8).device("cuda:1")

    shares = {jobs: with_gpus(8).gpus_per_run(None, "cuda", jobs) for jobs in (None, 1, 8, 9, 16, 17)}
    assert shares == {None: 1.0, 1: 1.0, 8: 1.0, 9: 0.5, 16: 0.5, 17: 1 / 3}
    for jobs, share in shares.items():  # so many do fit
        assert 8 * math.floor(1 / share + 1e-9) >= (jobs or 1)
    assert with_gpus(1).gpus_per_run(None, "cuda", 4) == 0.25
    assert with_gpus(8).gpus_per_run(None, "cpu", 4) == 0.0
    assert with_gpus(8).gpus_per_run(0.3, "cuda", 4) == 0.3
    for share in (0.0, -1.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="must be above 0 and at most 1"):
            with_gpus(8).gpus_per_run(share, "cuda", None)
    with pytest.raises(ValueError, match=r"--gpus-per-run is 0.5, but the runs are to be on the CPU"):
        with_gpus(8).gpus_per_run(0.5, "cpu", None)


class Heard:
    """A queue that only collects."""

    def __init__(self):
        self.messages = []

    def put_nowait(self, message):
        self.messages.append(message)


def test_a_machine_that_does_not_share_the_folder_says_so_and_does_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    queue = Heard()
    answer = engine._work(task("IteRand", tmp_path, *SHORT), 5, ["iterand"], tmp_path / "elsewhere" / ".shared", queue)
    assert answer[0] == "failed"
    assert f"does not see {tmp_path / 'elsewhere'}: --out must lie on a path all machines share" in answer[1]["error"]
    assert [message[:2] for message in queue.messages] == [(5, "started")]
    assert not list(tmp_path.iterdir())


# With one.


@pytest.fixture(scope="module")
def cluster():
    with connected(None, jobs=2) as cluster:
        yield cluster


def test_records_are_those_of_the_local_engine(tmp_path, cluster, expected):
    tasks = [task(label, tmp_path, *settings) for label, settings in METHODS.items() if settings is not LONG]
    events = list(cluster.run_tasks(tasks, jobs=2))
    assert records(events) == {one.label: expected[one.label] for one in tasks}
    for one in tasks:
        kinds = [event.kind for event in events if event.task == one]
        assert kinds == ["started", *["progress"] * (len(kinds) - 2), "done"]
        assert len(kinds) > 2
        record = json.loads((one.folder / "record.json").read_text())
        assert what_came_out(record) == expected[one.label]  # environment, and the command in it, too
        assert len((one.folder / "metrics.jsonl").read_text().splitlines()) == 3
    again = list(cluster.run_tasks(tasks, jobs=2))
    assert [event.kind for event in again if event.kind != "done"] == ["started"] * 3  # complete: nothing is done again
    assert records(again) == records(events)


def test_a_killed_worker_costs_time_only(tmp_path, cluster, expected):
    long = task("IteRand, long", tmp_path, *LONG)
    beside = task("SGD", tmp_path, *METHODS["SGD"])
    seen, killed = [], False
    for event in cluster.run_tasks([long, beside], jobs=2):
        seen.append(event)
        if event.task == long and event.kind == "progress" and event.value["done"] > 10 * STEPS and not killed:
            killed = True
            (start,) = [one.value["pid"] for one in seen if one.task == long and one.kind == "started"]
            os.kill(start, signal.SIGKILL)
    assert killed
    assert records(seen) == {one.label: expected[one.label] for one in (long, beside)}

    tries = [number for number, event in enumerate(seen) if event.task == long and event.kind == "started"]
    assert len(tries) == 2
    after = [event.value["done"] for event in seen[tries[1] :] if event.task == long and event.kind == "progress"]
    assert min(after) > STEPS  # it went on from the checkpoint of the first epoch
    assert sum(event.kind == "started" for event in seen if event.task == beside) == 1


def test_a_run_that_fails_does_not_touch_the_others(tmp_path, cluster, expected, monkeypatch):
    monkeypatch.setattr(engine, "RETRIES", 0)
    short = task("IteRand", tmp_path, *SHORT)
    no_data = replace(task("no data", tmp_path, "data.name=cifar10"), data_dir=tmp_path / "nothing")
    lost = task("lost", tmp_path, *LONG)
    errors, seen = {}, []
    for event in cluster.run_tasks([no_data, lost, short], jobs=3):
        seen.append(event)
        if event.kind == "started" and event.task == lost:
            os.kill(event.value["pid"], signal.SIGKILL)
        if event.kind == "failed":
            errors[event.task] = event.value["error"]
    assert records(seen) == {short.label: expected[short.label]}
    assert set(errors) == {no_data, lost}
    assert "cifar10" in errors[no_data]
    assert "iterand data fetch" in errors[no_data]
    assert errors[lost].startswith("Ray gave it up, 0 retries included: ")
    assert "\n" not in errors[lost]


def test_a_folder_that_cannot_be_written_to(tmp_path, cluster):
    (tmp_path / "file").write_text("")
    with pytest.raises(IterandError, match="cannot write to the folder of the runs"):
        list(cluster.run_tasks([task("IteRand", tmp_path / "file", *SHORT)], jobs=1))


TINY = ["digits", "--scale", "tiny", "--seeds", "1"]


def reproduce(folder, *arguments, **variables):
    """The command, which prints to files beside the folder of its runs."""
    printed = folder.with_name(f"{folder.name}-printed")
    return Command("reproduce", *arguments, "--engine", "ray", "--out", folder, folder=printed, **variables)


def test_the_command_uses_a_cluster_that_is_there_and_leaves_it_running(tmp_path, cluster):
    address = ray.get_runtime_context().gcs_address
    process = reproduce(tmp_path, *TINY, "--address", address, "--jobs", "1", "--json")
    out, err = process.communicate()
    assert process.returncode == 0, err
    answer = json.loads(out)
    assert [cell["n"] for cell in answer["cells"]] == [1, 1, 1]
    assert answer["environment"]["device"] == "cpu"
    assert len(list(tmp_path.glob("*/record.json"))) == 3
    assert "--engine ray" in json.loads(next(tmp_path.glob("*/record.json")).read_text())["environment"]["command"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    lines = [line for line in err.splitlines() if " pending, " not in line]  # which comes now and then
    assert len(lines) == 3, err  # one for each run, and not a word of Ray's
    assert lines[2].startswith("3/3 digits/")
    assert ray.get(ray.remote(lambda: 7).remote()) == 7


def processes_with(marker):
    """The processes that have this text in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marker.encode() in path.read_bytes():
                found.append((path.parent / "cmdline").read_text())
        except OSError:
            continue
    return [command for command in found if command]


def under_way(folder):
    """Whether some run is between its third and its thirtieth epoch of forty."""
    lines = [path.read_text().count("\n") for path in folder.glob("*/metrics.jsonl")]
    return any(3 <= count <= 30 for count in lines)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
def test_ctrl_c_leaves_what_is_finished_and_saves_the_rest(tmp_path):
    marker = f"MARKER={uuid.uuid4().hex}"
    arguments = ["--only", "digits/edge-popup", "--seeds", "20", "--jobs", "2"]
    process = reproduce(tmp_path, *arguments, MARKER=marker.partition("=")[2])
    while not (list(tmp_path.glob("*/record.json")) and under_way(tmp_path)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    assert any("raylet" in command for command in processes_with(marker))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, err
    assert err.endswith("stopped and saved; run the same command to resume\n")
    assert "Traceback" not in out + err
    folders = [path for path in tmp_path.iterdir() if path.is_dir()]
    done = [json.loads((path / "record.json").read_text()) for path in folders if (path / "record.json").exists()]
    assert 1 <= len(done) < 20
    assert all(len(record["metrics"]) == 40 for record in done)
    saved = [read_checkpoint(path) for path in folders if not (path / "record.json").exists()]
    places = [(one.state["epoch"], one.state["step"]) for one in saved if one is not None]
    assert any(place > (1, 0) for place in places), places  # not only the checkpoint that every run writes early
    while processes_with(marker):
        time.sleep(0.2)


# The live table.


def shown(table):
    console = Console(file=io.StringIO(), width=100)
    console.print(table)
    return [line.split() for line in console.file.getvalue().splitlines() if line.strip()]


def test_the_live_table(tmp_path, monkeypatch):
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(runs_table, "err", screen)
    tasks = [task(f"seed {seed}", tmp_path, f"seed={seed}") for seed in range(14)]
    tasks.append(replace(tasks[0], label="other/seed 0"))
    head = ["pending", "running", "done", "failed"]
    with runs_table.watching(tasks) as table:
        assert shown(table) == [head, ["digits", "14", "0", "0", "0"], ["other", "1", "0", "0", "0"]]
        for one in tasks[:13]:
            table(Event("started", one, {"host": "node7", "pid": 1}))
        lines = shown(table)
        assert lines[:3] == [head, ["digits", "1", "13", "0", "0"], ["other", "1", "0", "0", "0"]]
        assert len(lines) == 3 + 12  # a terminal has so many lines
        assert "node7" in lines[3]
        table(Event("progress", tasks[0], {"done": 30, "total": 40, "loss": 0.5}))
        assert {"30/40", "0.500"} <= set(shown(table)[3])
        table(Event("started", tasks[0], {"host": "node8", "pid": 2}))  # its worker was lost
        assert shown(table)[1] == ["digits", "1", "13", "0", "0"]
        table(Event("done", tasks[0], {"result": {"test_accuracy": 50.0}}))
        table(Event("failed", tasks[1], {"error": "no [luck]"}))
        table(Event("failed", tasks[14], {"error": "never began"}))
        assert shown(table)[:3] == [
            head,
            ["digits", "1", "11", "1", "1"],
            ["other", "0", "0", "0", "1"],
        ]
        assert len(table.bars) == 11
    assert "seed 13" not in screen.file.getvalue()


def test_lines_where_there_is_no_terminal(tmp_path, monkeypatch):
    screen = Console(file=io.StringIO(), width=40)
    monkeypatch.setattr(runs_table, "err", screen)
    monkeypatch.setattr(runs_table, "_SECONDS_A_LINE", math.inf)
    first, second = (task(f"seed {seed}", tmp_path, f"seed={seed}") for seed in range(2))
    with runs_table.watching([first, second]) as table:
        table(Event("started", first, {}))
        table(Event("progress", first, {"done": 1, "total": 2, "loss": 0.5}))
        assert screen.file.getvalue() == ""
        monkeypatch.setattr(runs_table, "_SECONDS_A_LINE", -1.0)
        table(Event("progress", first, {"done": 2, "total": 2, "loss": 0.5}))
        monkeypatch.setattr(runs_table, "_SECONDS_A_LINE", math.inf)
        table(Event("done", first, {"result": {"test_accuracy": 50.0}}))
        table(Event("failed", second, {"error": "no [luck]"}))
    assert screen.file.getvalue().splitlines() == [
        "1 pending, 1 running, 0 done, 0 failed",
        "1/2 digits/seed 0: test accuracy 50.00 %",
        "2/2 digits/seed 1: no [luck]",
    ]
