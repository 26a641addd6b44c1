"""Many runs: each once, whoever asks for it; what is chosen, what failed, what is printed."""

import errno
import itertools
import json
import multiprocessing
import shutil
import signal

import pytest
import torch
from typer.testing import CliRunner

from iterand.cli import reproduce
from iterand.cli.main import app
from iterand.lab.experiments import local, sweep
from iterand.lab.experiments import local as task_module
from iterand.lab.experiments.catalog import experiment_names, find_experiment
from iterand.lab.experiments.library import find_recipe
from iterand.lab.experiments.local import Event, Task, UnexpectedError, do, run_tasks
from iterand.lab.experiments.sweep import Sweep, distinct_runs, only
from iterand.lab.training import recipe_file
from iterand.lab.training.environment import Interrupted
from iterand.lab.training.recipe import Recipe


def record(task, accuracy):
    result = {"test_accuracy": accuracy, "validation_accuracy": accuracy + 1, "kept": 3, "weights": 6}
    result |= {"float32_bytes": 24, "ticket_bytes": 5 + 2 * task.recipe.seed}
    milliseconds = 0.5 if task.recipe.method.name == "iterand" else None
    return {
        "recipe": {"seed": task.recipe.seed},
        "result": result,
        "metrics": [{"validation_accuracy": accuracy - 1}, {"validation_accuracy": accuracy + 2}],
        "seconds": 7.0 + task.recipe.seed,
        "randomization_milliseconds": milliseconds,
    }


@pytest.fixture
def done(monkeypatch):
    """Runs that take no time: test accuracy 10 + seed, backwards; SGD fails. Gives the tasks asked for."""
    asked = []

    def run_tasks(tasks, jobs):
        asked.extend(tasks)
        for task in reversed(tasks):
            yield Event("started", task, {})
            if task.recipe.method.name == "sgd":
                yield Event("failed", task, {"error": "no such [luck]"})
            else:
                yield Event("done", task, record(task, 10.0 + task.recipe.seed))

    for module in (sweep, local):
        monkeypatch.setattr(module, "run_tasks", run_tasks)
    return asked


def test_a_ticket_is_as_large_as_those_of_all_seeds_in_the_mean(tmp_path, done):
    runs = Sweep([find_experiment("digits")], tmp_path, device="cpu", seeds=3)
    runs.run(jobs=1)
    sizes = {cell.cell.label: cell.summary()["ticket_bytes"] for cell in runs.results["digits"]}
    assert sizes == {"SGD": None, "edge-popup": 7, "IteRand": 7}


def test_a_run_that_two_experiments_share_is_done_once(tmp_path, done):
    experiments = [find_experiment(name) for name in ("figure2", "width", "overhead")]
    runs = Sweep(experiments, tmp_path, device="cpu", seeds=2)
    assert len(runs) == 2 * (60 + 2)
    runs.run(jobs=1)
    assert len(done) == len(runs) == len({task.folder for task in done})
    for cells in runs.results.values():
        for cell in cells:
            trained = cell.cell.recipe.method.name == "sgd"
            assert (len(cell.records), len(cell.errors)) == ((0, 2) if trained else (2, 0))
    width = runs.results["width"][0].summary()
    assert (width["seeds"], width["mean"], width["test_accuracies"]) == ([0, 1], 10.5, [10.0, 11.0])
    assert width["std"] == pytest.approx(0.5**0.5)
    assert (width["paper"]["mean"], width["measure"]) == (89.96, "test_accuracy")
    overhead = runs.results["overhead"][0].summary()
    assert (overhead["mean"], overhead["randomization_milliseconds"]) == (7.5, 0.5)


def test_what_is_measured_is_the_experiments_choice(tmp_path, done):
    runs = Sweep([find_experiment("figure1")], tmp_path, device="cpu", seeds=1)
    runs.run(jobs=1)
    summary = runs.results["figure1"][0].summary()
    assert (summary["mean"], summary["std"], summary["test_accuracy_mean"]) == (12.0, None, 10.0)  # of the last epoch


def test_only_what_fits_the_pattern():
    everything = [find_experiment(name) for name in experiment_names()]
    (found,) = only(everything, "figure2/*0.25*")
    assert (found.name, len(found.cells)) == ("figure2", 15)
    assert [entry.name for entry in only(everything, "*IMP*")] == ["imp", "best"]
    with pytest.raises(ValueError, match=r"no cell fits the pattern 'figure9/\*'; cells are called like 'figure[0-9]/"):
        only(everything, "figure9/*")
    with pytest.raises(ValueError, match=r"'figure2/resnet34\*'; cells are called like 'figure2/ResNet34"):
        only(everything, "figure2/resnet34*")
    with pytest.raises(ValueError, match=r"'resnet34\*'; cells are called like 'figure2/ResNet34"):
        only([find_experiment("figure2")], "resnet34*")
    (found,) = only([find_experiment("figure2")], "Conv6, IteRand*", "figure2/ResNet18, SGD*")  # 2 weights, 4 widths
    assert len(found.cells) == 2 * 4 + 4
    several = only(everything, "figure2/*0.25*", "sparsity/Conv6*", "figure2/Conv6*")  # 3 networks x 5, 4 widths x 5
    assert [(entry.name, len(entry.cells)) for entry in several] == [("figure2", 30), ("sparsity", 14)]
    with pytest.raises(ValueError, match=r"no cell fits the pattern 'figure9/\*'"):
        only(everything, "figure2/*", "figure9/*")


def test_distinct_runs_count_each_once():
    assert len(distinct_runs([find_experiment("figure3"), find_experiment("figure3-curves")])) == 8
    assert len(distinct_runs([find_experiment("imdb")])) == 30


def call(*arguments):
    return CliRunner().invoke(app, ["reproduce", *arguments], env={"COLUMNS": "200"})


def test_the_list(done):
    text = call().output
    assert "GPU time (rough)" in text
    assert all(name in text for name in experiment_names())
    listed = json.loads(call("--json").stdout)
    assert list(listed) == experiment_names()
    assert (listed["figure2"]["cells"], listed["figure2"]["runs"]) == (60, 180)
    assert 60 < listed["figure2"]["gpu_minutes"] < 6000
    assert done == []


def test_tables_and_failures(tmp_path, done):
    answer = call("--only", "imdb/LSTM*", "--out", str(tmp_path))
    assert answer.exit_code == 1
    assert "Film reviews" in answer.stdout
    assert "88.44 ± 0.28" in answer.stdout
    assert "12.00 ± 1.58" in answer.stdout  # of 10, 11, 12, 13, 14
    assert "BiLSTM" not in answer.stdout
    assert answer.stderr.splitlines()[:2] == [
        "1/15 imdb/LSTM, SGD, seed 4: no such [luck]",
        "2/15 imdb/LSTM, SGD, seed 3: failed for the same reason",
    ]
    assert answer.stderr.endswith("\nfailed: imdb/LSTM, SGD, seed 4 and 4 more runs: no such [luck]\n")
    assert "a randomization (ms)" in call("overhead", "--out", str(tmp_path)).stdout
    assert "a dry run, the numbers mean nothing" in call("digits", "--scale", "tiny", "--out", str(tmp_path)).stdout


@pytest.mark.parametrize("columns", [30, 60, 80, 200])
def test_nothing_is_cut_off_where_lines_are_short(tmp_path, done, columns):
    """A long label wraps, numbers do not."""
    env = {"COLUMNS": str(columns)}
    text = CliRunner().invoke(app, ["reproduce", "claims", "--out", str(tmp_path)], env=env).stdout
    assert "…" not in text
    assert text.count("11.00 ± 1.00   3") == 6  # of 10, 11, 12
    assert text.count("7 B") == 6
    assert "ResNet18, biprop, norms " in text
    labels = " ".join(cell.label for cell in find_experiment("claims").cells)
    assert set(labels.split()) <= set(text.split())


def test_the_caption_says_how_many_runs_there_are(tmp_path, monkeypatch):
    def run_tasks(tasks, jobs):
        for task in tasks:
            lost = task.recipe.seed == 2 and task.recipe.method.name == "sgd"
            yield Event("failed", task, {"error": "lost"}) if lost else Event("done", task, record(task, 10.0))

    monkeypatch.setattr(local, "run_tasks", run_tasks)
    assert "n = 2 to 3" in call("digits", "--out", str(tmp_path)).stdout
    monkeypatch.setattr(local, "run_tasks", lambda tasks, *_, **__: run_tasks(tasks[:1] + tasks[3:4] + tasks[6:7], 1))
    assert call("digits", "--out", str(tmp_path)).stdout.rstrip().endswith("standard deviation, n = 1")


def test_json_of_one_and_of_several(tmp_path, done):
    one = json.loads(call("large", "--out", str(tmp_path), "--profile", "text", "--json").stdout)
    assert (one["experiment"], one["profile"], len(one["cells"])) == ("large", "text", 4)
    several = json.loads(call("--only", "*LSTM*IteRand*", "--out", str(tmp_path), "--json").stdout)
    assert [(entry["experiment"], len(entry["cells"])) for entry in several["experiments"]] == [("imdb", 2)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["digits", "--all"], "--all runs every experiment, and 'digits' is one of them"),
        (["--all", "--profile", "mine"], "unknown profile 'mine'"),
        (["digits", "--scale", "huge"], "unknown scale 'huge'"),
        (["--only", "nothing"], "no cell fits the pattern 'nothing'"),
    ],
)
def test_mistakes(done, arguments, sentence):
    assert sentence in str(call(*arguments).exception)
    assert done == []


@pytest.mark.parametrize("saved", [None, "checkpoint.safetensors", "record.json"])
def test_sigterm_stops_runs_as_ctrl_c_does(tmp_path, monkeypatch, saved):
    """The last line says that runs are saved only if one is."""

    def run_tasks(tasks, jobs):
        yield Event("started", tasks[0], {})
        if saved:
            tasks[0].folder.mkdir()
            (tasks[0].folder / saved).touch()
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(local, "run_tasks", run_tasks)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        found = call("digits", "--out", str(tmp_path))
        assert isinstance(found.exception, Interrupted if saved else SystemExit)
        assert saved or found.exit_code == 130
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_durations_for_people():
    assert [reproduce._duration(minutes) for minutes in (0.5, 59.6, 600, 90_000)] == [
        "< 1 min",
        "60 min",
        "10 h",
        "1,500 h",
    ]


class Drawing:
    """An observer that draws from torch's generator, as dropout does, and looks at the threads."""

    def __init__(self):
        self.seen = []

    def step(self, session):
        self.seen.append((torch.rand(()).item(), torch.get_num_threads()))

    def epoch(self, session, metrics):
        pass


def test_a_run_has_the_generator_and_the_threads_of_its_recipe(tmp_path):
    def seen(seed, folder):
        settings = [f"seed={seed}", "limit=300", f"epochs={1 + seed}", f"threads={1 + seed % 2}"]
        recipe = recipe_file.override(find_recipe("digits"), settings)
        before, observer = torch.get_num_threads(), Drawing()
        assert do(Task("run", recipe, tmp_path / folder / str(seed), "cpu"), observer).kind == "done"
        assert torch.get_num_threads() == before
        return observer.seen

    first = {seed: seen(seed, "first") for seed in (0, 1, 2)}
    assert {seed: seen(seed, "again") for seed in (2, 0, 1)} == first
    assert {threads for _, threads in first[1]} == {2}


def test_a_run_that_fails_does_not_touch_the_others(tmp_path):
    recipes = [recipe_file.override(find_recipe("digits"), [f"seed={seed}", "epochs=2"]) for seed in range(3)]
    broken = recipe_file.override(find_recipe("conv6"), ["seed=9"])
    (tmp_path / "cifar-10-binary.tar.gz").touch()

    def done(jobs):
        base = tmp_path / str(jobs)
        all_of_them = (recipes[0], broken, *recipes[1:])
        tasks = [Task("run", recipe, base / str(recipe.seed), "cpu", tmp_path) for recipe in all_of_them]
        events = list(run_tasks(tasks, jobs))
        assert [event.task.recipe.seed for event in events if event.kind == "failed"] == [9]
        return {event.task.recipe.seed: event.value for event in events if event.kind == "done"}

    one, two = done(1), done(2)
    assert sorted(one) == sorted(two) == [0, 1, 2]
    for seed, record in one.items():
        assert (two[seed]["result"], two[seed]["metrics"]) == (record["result"], record["metrics"])


def test_runs_without_data_fail_before_the_others_start(tmp_path):
    digits, conv6 = find_recipe("digits", ["epochs=1"]), find_recipe("conv6")
    tasks = [Task("run", recipe, tmp_path / recipe.name, "cpu", tmp_path) for recipe in (digits, conv6)]
    events = [(event.kind, event.task.recipe.name) for event in run_tasks(tasks, 2) if event.kind != "progress"]
    assert events == [("failed", "conv6"), ("started", "digits"), ("done", "digits")]
    assert list(run_tasks([tasks[0]], 1))[-1].kind == "done"  # a complete run


def test_nothing_starts_where_no_run_has_data(tmp_path):
    answer = call("--only", "i*", "--out", str(tmp_path / "runs"), "--data-dir", str(tmp_path / "empty"))
    for name in ("cifar10", "imdb"):
        assert str(answer.exception).count(f"{name} is not in {tmp_path / 'empty'}; ") == 1
    assert answer.output == ""
    assert not list(tmp_path.iterdir())


def test_a_process_does_one_run_after_another_and_a_killed_one_costs_its_run_only(tmp_path):
    epochs = [2, 100_000, 2, 2]  # the one that is killed would not end
    settings = [[f"seed={seed}", f"epochs={count}"] for seed, count in enumerate(epochs)]
    recipes = [recipe_file.override(find_recipe("digits"), each) for each in settings]
    tasks = [Task("run", recipe, tmp_path / str(recipe.seed), "cpu") for recipe in recipes]
    others = [task for task in tasks if task.recipe.seed != 1]
    alone = {
        event.task.recipe.seed: event.value["result"] for event in run_tasks(others, jobs=4) if event.kind == "done"
    }
    for task in others:
        shutil.rmtree(task.folder)
    events, processes = run_tasks(tasks, jobs=1), []
    done, failed = {}, {}
    for event in events:
        if event.kind == "started":
            (child,) = multiprocessing.active_children()
            processes.append(child.pid)
            if event.task.recipe.seed == 1:
                child.kill()
        if event.kind == "done":
            done[event.task.recipe.seed] = event.value["result"]
        if event.kind == "failed":
            failed[event.task.recipe.seed] = event.value["error"]
    assert processes[0] == processes[1] != processes[2] == processes[3]
    assert failed == {1: "its process ended with exit code -9"}
    assert done == alone
    assert not multiprocessing.active_children()


def test_stopping_between_two_runs_does_not_wait(tmp_path, caplog):
    recipes = [recipe_file.override(find_recipe("digits"), [f"seed={seed}", "epochs=1"]) for seed in range(3)]
    tasks = [Task("run", recipe, tmp_path / str(recipe.seed), "cpu") for recipe in recipes]
    for _ in range(3):
        events = run_tasks(tasks, jobs=1)
        assert [event.kind for event in itertools.islice(events, 1)] == ["started"]
        next(event for event in events if event.kind == "started")  # the second
        events.close()
        assert caplog.messages == ["stopping: checkpoints of the running runs are being saved"]
        caplog.clear()
        for path in tmp_path.iterdir():
            shutil.rmtree(path)


def test_an_error_that_nobody_foresaw_ends_its_process(tmp_path):
    """The next run of the same network gets another one."""
    broken = recipe_file.override(find_recipe("digits"), ["seed=1", "epochs=1"])
    recipes = [recipe_file.override(find_recipe("digits"), [f"seed={seed}", "epochs=1"]) for seed in (0, 2)]
    tasks = [Task("run", recipe, tmp_path / str(recipe.seed), "cpu") for recipe in recipes]
    tasks.insert(1, Task("run", broken, tmp_path / "1", "cpu", execution="none"))
    processes, ends = [], {}
    for event in run_tasks(tasks, jobs=1):
        if event.kind == "started":
            (child,) = multiprocessing.active_children()
            processes.append(child.pid)
        elif event.kind != "progress":
            ends[event.task.recipe.seed] = event.kind, event.value.get("error", "")
    assert [kind for kind, _ in ends.values()] == ["done", "failed", "done"]
    assert ends[1][1].startswith("TypeError: ")
    assert processes[0] == processes[1] != processes[2]


def test_the_sentence_of_an_error_that_nobody_foresaw(tmp_path, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(task_module, "run", broken)
    with pytest.raises(UnexpectedError, match="RuntimeError: CUDA error: an illegal memory access"):
        do(Task("run", find_recipe("digits"), tmp_path, "cpu"), Drawing())


def test_the_sentence_of_an_error_of_the_operating_system(tmp_path, monkeypatch):
    def broken(*arguments, **options):
        raise OSError(errno.EROFS, "Read-only file system", "runs")

    monkeypatch.setattr(task_module, "run", broken)
    event = do(Task("run", find_recipe("digits"), tmp_path, "cpu"), Drawing())
    assert event.value["error"] == "cannot read or write runs: Read-only file system"


def test_what_children_are_forked_from_does_not_hear_an_interrupt(monkeypatch):
    """Else it would break while it imports torch, and say so at length."""
    heard = []
    monkeypatch.setattr(local.forkserver, "ensure_running", lambda: heard.append(signal.getsignal(signal.SIGINT)))
    before = signal.getsignal(signal.SIGINT)
    list(run_tasks([], 1))
    assert heard == [signal.SIG_IGN]
    assert signal.getsignal(signal.SIGINT) is before


def test_processes_share_the_cores_where_a_gpu_does_the_sums(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    tasks = {device: [Task("run", Recipe(), tmp_path, device)] * 9 for device in ("cpu", "cuda")}
    assert local.threads_each(tasks["cpu"], 4) == 0  # there sums depend on it
    assert [local.threads_each(tasks["cuda"], jobs) for jobs in (1, 4, 9, 40)] == [16, 4, 1, 1]
    assert local.threads_each(tasks["cuda"][:2], 8) == 8
