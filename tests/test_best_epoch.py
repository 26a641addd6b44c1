"""``training.select_epoch = "best_validation"``: the run ends with the network of the lowest validation loss."""

import pytest
import torch

from crashing import StopAfter, outcome
from iterand.errors import RecipeError
from iterand.lab.data import load_data
from iterand.lab.training import loop, recipe_file
from iterand.lab.training.checkpoint import read_checkpoint
from iterand.lab.training.folder import RunFolder
from iterand.lab.training.recipe import Recipe
from iterand.lab.training.run import build_session, evaluate_run, run
from iterand.lab.training.session import follow_best, selected_epoch
from iterand.ticket import read_ticket

CPU = torch.device("cpu")


def restless(*settings):
    """A run whose validation loss rises now and then, at a rate that does not change with the number of epochs."""
    base = ["width_factor=0.25", "batch_size=100", "epochs=5", "period=2", "select_epoch=best_validation"]
    rate = ["learning_rate.initial=200.0", "learning_rate.schedule=constant"]
    return recipe_file.override(Recipe(name="restless"), [*base, *rate, *settings])


def run_past_the_best(folder, *settings, device=CPU):
    """A run whose best epoch is not its last, which depends on sums: its settings, folder and record."""
    for seed in range(9):
        chosen, own = [*settings, f"seed={seed}"], folder / f"seed {seed}"
        record = run(restless(*chosen), RunFolder(own), device=device)
        if record["result"]["tested_epoch"] < 5:
            return chosen, own, record
    raise AssertionError("the last epoch is always the best")


def losses(record):
    return [line["validation_loss"] for line in record["metrics"]]


@pytest.mark.parametrize(
    "settings",
    [
        ["weight_distribution=signed_constant", "rate=1.0"],
        ["weight_distribution=kaiming_uniform", "rate=0.3"],
        ["method.name=sgd", "learning_rate.initial=3.0"],
    ],
    ids=["signed constants", "continuous weights", "sgd"],
)
def test_the_network_is_that_of_a_run_that_ended_there(tmp_path, settings):
    settings, _, record = run_past_the_best(tmp_path, *settings)
    best = record["result"]["tested_epoch"]
    assert losses(record)[best - 1] == min(losses(record))
    short = run(restless(*settings, "select_epoch=last", f"epochs={best}"), RunFolder(tmp_path / "short"), device=CPU)
    expected = {name: value for name, value in record["result"].items() if name not in ("tested_epoch", "ticket_bytes")}
    assert expected == {name: value for name, value in short["result"].items() if name != "ticket_bytes"}
    long = run(restless(*settings, "select_epoch=last"), RunFolder(tmp_path / "long"), device=CPU)
    assert long["metrics"] == record["metrics"]
    assert long["result"]["model_sha256"] != record["result"]["model_sha256"]


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.cuda,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
            ],
        ),
    ],
)
def test_what_a_run_leaves_behind_is_the_tested_network(tmp_path, device):
    _, folder, record = run_past_the_best(tmp_path, device=torch.device(device))
    for what in (folder, folder / "model.ticket"):
        assert evaluate_run(what, device=torch.device(device))["test_accuracy"] == record["result"]["test_accuracy"]
    assert read_ticket(folder / "model.ticket").metrics["tested_epoch"] == record["result"]["tested_epoch"]
    assert not [name for name in read_checkpoint(folder).tensors if name.startswith("best.")]


def test_a_broken_run_remembers_its_best_epoch(tmp_path, monkeypatch):
    settings, folder, whole = run_past_the_best(tmp_path)
    recipe = restless(*settings)
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    steps = len(load_data("digits", CPU).train) // 100
    after_best = steps * whole["result"]["tested_epoch"] + 1
    with pytest.raises(RuntimeError, match="crash"):
        run(recipe, RunFolder(tmp_path / "broken"), device=CPU, observer=StopAfter(after_best))
    assert [name for name in read_checkpoint(tmp_path / "broken").tensors if name.startswith("best.")]
    with pytest.warns(UserWarning, match=r"broken is not complete \(2 of 5 epochs\); its command resumes it"):
        measured = evaluate_run(tmp_path / "broken", device=CPU)
    assert measured["test_accuracy"] == whole["result"]["test_accuracy"]
    run(recipe, RunFolder(tmp_path / "broken"), device=CPU)
    assert outcome(tmp_path / "broken") == outcome(folder)


def test_of_equal_epochs_the_first():
    session = build_session(restless(), load_data("digits", CPU), CPU)
    session.metrics = [{"validation_loss": loss} for loss in (2.0, 1.0, 1.0)]
    assert selected_epoch(session) == 1
    session.recipe = restless("select_epoch=last")
    assert selected_epoch(session) == 2


def test_nothing_is_copied_where_the_last_epoch_is_tested(monkeypatch):
    session = build_session(restless("select_epoch=last"), load_data("digits", CPU), CPU)
    session.metrics = [{"validation_loss": 1.0}]
    monkeypatch.setattr("iterand.lab.training.session.selected_epoch", None)
    follow_best(session, last=True)
    assert session.best == {}


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("method.name=imp", "method.name is 'imp'"),
        ("sparsity_schedule=cubic", "method.sparsity_schedule is not 'constant'"),
        ("norm_statistics=recomputed", "training.norm_statistics is 'recomputed'"),
    ],
)
def test_epochs_that_do_not_compare_are_refused(setting, reason):
    with pytest.raises(RecipeError, match=reason):
        restless("epochs=4", setting)
