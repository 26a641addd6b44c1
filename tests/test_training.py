import contextlib
import errno
import json
import math
import os
import subprocess
import threading
import types
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

import iterand
from crashing import StopAfter, outcome
from iterand import memory
from iterand.errors import CheckpointError, DataError, IterandError, RecipeError
from iterand.lab.data import load_data
from iterand.lab.experiments.library import pin
from iterand.lab.training import environment, loop, recipe_file
from iterand.lab.training.checkpoint import read_checkpoint, write_checkpoint
from iterand.lab.training.environment import compute_settings
from iterand.lab.training.folder import RunFolder, default_path
from iterand.lab.training.methods import prepare
from iterand.lab.training.recipe import Recipe, TrainingRecipe, recipe_keys
from iterand.lab.training.run import build_session, evaluate_run, run
from iterand.lab.training.steps import EagerStep, compiling_pays, evaluate, loss, training_loss
from made_up_data import write_image_folder

CPU = torch.device("cpu")


def small(*settings):
    base = ["epochs=2", "width_factor=0.25", "batch_size=300", "period=2", "learning_rate.initial=0.5"]
    return recipe_file.override(Recipe(name="small"), [*base, *settings])


VARIANTS = {
    "sgd": ["method.name=sgd", "learning_rate.initial=0.02"],
    "edge-popup": ["method.name=edge_popup"],
    "iterand": ["rate=0.5"],
    "signed constant": ["weight_distribution=signed_constant", "rate=1.0"],
    "global, scheduled": ["ranking=global", "floor=0.01", "sparsity_schedule=cubic", "sparsity=0.9"],
    "magnitude, erk": ["rank_by=magnitude", "allocation=erk"],
    "bfloat16, channels last": ["precision=bfloat16", "channels_last=true"],
    "all of the data": ["drop_last=false"],
    "imp": ["method.name=imp", "rounds=1", "sparsity=0.9", "learning_rate.initial=0.02"],
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_broken_run_ends_like_an_unbroken_one(tmp_path, monkeypatch, variant):
    recipe = small(*VARIANTS[variant])
    run(recipe, RunFolder(tmp_path / "whole"), device=CPU)
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)  # a checkpoint after every step
    for steps in (1, 2, 3):
        with pytest.raises(RuntimeError, match="crash"):
            run(recipe, RunFolder(tmp_path / "broken"), device=CPU, observer=StopAfter(steps))
    run(recipe, RunFolder(tmp_path / "broken"), device=CPU)
    assert outcome(tmp_path / "broken") == outcome(tmp_path / "whole")


def test_metrics_are_a_line_an_epoch_and_the_folder_is_complete(tmp_path):
    recipe = small()
    folder = RunFolder(tmp_path / "run")
    result = run(recipe, folder, device=CPU)["result"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]
    assert [line["learning_rate"] for line in lines] == pytest.approx([0.5, 0.25])
    assert folder.recipe() == recipe
    assert result["kept"] == sum(n - round(0.5 * n) for n in (4 * 9, 4 * 4 * 9, 8 * 4 * 9, 8 * 8 * 9, 10 * 32))
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {
        "recipe.toml", "metrics.jsonl", "environment.json", "checkpoint.safetensors", "tensorboard", "model.ticket",
        "record.json",
    }  # fmt: skip
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))


def test_a_complete_run_is_not_done_again(tmp_path):
    recipe, folder = small(), RunFolder(tmp_path)
    first = run(recipe, folder, device=CPU)
    assert run(recipe, folder, device=CPU, observer=StopAfter(1)) == first  # not a single step
    with pytest.raises(RuntimeError, match="crash"):
        run(recipe, folder, device=CPU, observer=StopAfter(1), fresh=True)
    assert folder.record() is None


def test_a_complete_run_in_a_folder_that_is_read_only_is_shown(tmp_path):
    """Nothing is written, not even a lock; and nobody waits for one who holds it."""
    folder = tmp_path / "run"
    first = run(small("epochs=1"), RunFolder(folder), device=CPU)
    before = {path: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())}
    folder.chmod(0o555)
    try:
        assert run(small("epochs=1"), RunFolder(folder), device=CPU) == first
    finally:
        folder.chmod(0o755)
    assert {path: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())} == before


def test_what_a_killed_run_left_unfinished_is_removed(tmp_path):
    names = ("record.json", "model.ticket", "recipe.toml", "checkpoint.safetensors.new")
    left = [tmp_path / f".{name}.abcd1234.part" for name in names]
    other = tmp_path / ".report.html.abcd1234.part"
    for path in (*left, other):
        path.write_bytes(b"half of it")
    run(small("epochs=1"), RunFolder(tmp_path), device=CPU)
    assert [path for path in (*left, other) if path.exists()] == [other]


def test_a_record_that_was_written_while_the_folder_was_locked_is_found(tmp_path, monkeypatch):
    record = run(small("epochs=1"), RunFolder(tmp_path / "done"), device=CPU)

    @contextlib.contextmanager
    def locked(path):
        (path / "record.json").write_text(json.dumps(record))
        yield

    monkeypatch.setattr("iterand.lab.training.folder._locked", locked)
    assert run(small("epochs=1"), RunFolder(tmp_path / "run"), device=CPU, observer=StopAfter(1)) == record


def as_json(of_result=types.MappingProxyType({}), **changes):
    """A record that would do, but for the changes."""
    result = {"test_accuracy": 9.0, "validation_accuracy": 9.0, "weights": 4, "kept": 2, "float32_bytes": 16}
    result |= {"test_loss": 2.0} | of_result
    epochs = [{"epoch": 1, "train_accuracy": 9.0, "validation_accuracy": 9.0}]
    record = {"format": "iterand record 1", "recipe": recipe_file.as_dict(small()), "result": result}
    return json.dumps(record | {"metrics": epochs, "seconds": 1.0, "environment": {}} | changes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it cannot be read"),
        ("[" * 100_000, "it cannot be read"),
        ("\udcff", "it cannot be read"),
        ("null", "its format is None; this version reads 'iterand record 1'"),
        ("[1]", "its format is None"),
        ('{"accuracy": 90}', "its format is None"),
        (as_json(format="iterand record 2"), "its format is 'iterand record 2'"),
        (as_json(result=None), "it has no result"),
        (as_json(result={}), "its result.test_accuracy is None"),
        (as_json({"test_accuracy": "good"}), "its result.test_accuracy is 'good'"),
        (as_json({"test_loss": None}), "its result.test_loss is None"),
        (as_json({"test_loss": math.nan}), "its result.test_loss is nan; it must be a finite number"),
        (as_json({"validation_accuracy": None}), "its result.validation_accuracy is None"),
        (as_json({"ticket_bytes": []}), "its result.ticket_bytes is []"),
        (as_json(recipe={"seed": "x"}), "seed is 'x'; it must be a whole number"),
        (as_json(randomization_milliseconds="fast"), "its randomization_milliseconds is 'fast'"),
    ],
)
def test_a_record_that_cannot_be_used_is_refused_with_the_way_out(tmp_path, text, words):
    path = tmp_path / "record.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(IterandError) as caught:
        run(small(), RunFolder(tmp_path), device=CPU)
    sentence = str(caught.value)
    assert sentence.startswith(f"{path} is not a record that can be used: ")
    assert words in sentence
    assert sentence.endswith("; remove it, choose another --out, or use --fresh to replace the run")
    assert list(tmp_path.iterdir()) == [path]


def test_a_record_of_other_settings_is_refused_with_the_difference(tmp_path):
    (tmp_path / "record.json").write_text(as_json())
    assert run(small(), RunFolder(tmp_path), device=CPU) == json.loads(as_json())
    with pytest.raises(IterandError, match=r"holds a run of other settings: method.rate is 0.3 here and 0.1 there"):
        run(small("rate=0.3"), RunFolder(tmp_path), device=CPU)


def test_a_record_that_cannot_be_used_is_replaced_if_asked(tmp_path):
    (tmp_path / "record.json").write_text("{}")
    record = run(small("epochs=1"), RunFolder(tmp_path), device=CPU, fresh=True)
    assert json.loads((tmp_path / "record.json").read_text()) == record


def test_another_recipe_in_the_folder_is_refused_with_the_difference(tmp_path):
    run(small(), RunFolder(tmp_path), device=CPU)
    with pytest.raises(IterandError, match=r"method.rate is 0.3 here and 0.1 there; .*--fresh"):
        run(small("rate=0.3"), RunFolder(tmp_path), device=CPU)


def test_a_checkpoint_of_other_settings_is_refused_with_the_difference(tmp_path):
    run(small(), RunFolder(tmp_path), device=CPU)
    other = small("period=9")
    session = build_session(other, load_data("digits", CPU), CPU)
    with pytest.raises(CheckpointError, match=r"method\.period is 9 here and 2 there"):
        session.restore(read_checkpoint(tmp_path))


def test_two_runs_in_one_folder_are_refused(tmp_path):
    folder = RunFolder(tmp_path)
    with (
        folder.opened(small()),
        pytest.raises(IterandError, match="another process"),
        RunFolder(tmp_path).opened(small()),
    ):
        raise AssertionError("opened twice")


def test_checkpoints_hold_no_masked_weights(tmp_path):
    run(small(), RunFolder(tmp_path), device=CPU)
    names = read_checkpoint(tmp_path).tensors
    assert not [name for name in names if name.endswith("original")]
    assert [name for name in names if name.endswith("score")]


class Positioned(torch.nn.Module):
    """A layer, a norm, and a parameter that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.position = torch.nn.Parameter(torch.zeros(4))
        self.layer = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)


@pytest.mark.filterwarnings("ignore::iterand.errors.UnmaskedWarning")
def test_norms_that_are_kept_are_trained_and_nothing_else_beside_the_scores():
    model = Positioned()
    trained = {id(parameter) for parameter in prepare(model, small("norms=keep"), 10).parameters}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in trained]
    assert names == ["layer.parametrizations.weight.0.score", "norm.weight", "norm.bias"]


@pytest.mark.parametrize("norms", ["fixed", "keep"])
def test_what_is_excluded_is_not_trained_and_takes_no_gradient(norms):
    model = Positioned()
    model.head = torch.nn.Linear(4, 2)
    settings = small(f"norms={norms}", "exclude=['position', 'norm', 'head']")
    (parameter,) = prepare(model, settings, 10).parameters
    assert parameter is model.layer.parametrizations.weight[0].score
    assert [one for one in model.parameters() if one.requires_grad] == [parameter]


@pytest.mark.parametrize("method", ["sgd", "imp"])
def test_norms_can_stay_untrained_where_weights_are_trained(method):
    model = Positioned()
    settings = small(f"method.name={method}", "rounds=1", "train_norms=false")
    trained = {id(parameter) for parameter in prepare(model, settings, 10).parameters}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in trained]
    assert names == ["position", "layer.weight", "layer.bias"]
    inputs = torch.tensor([[1.0, 2.0, 3.0, 4.0], [3.0, 2.0, 1.0, 8.0]])
    normalized = torch.tensor([[-1.0, 0.0, 1.0, -1.0], [1.0, 0.0, -1.0, 1.0]])  # no scale, no shift
    torch.testing.assert_close(model.norm(inputs), normalized, rtol=0, atol=1e-4)


def test_untrained_norms_are_refused_where_they_mean_nothing():
    with pytest.raises(RecipeError, match=r"method\.train_norms is for sgd and imp, but method\.name is 'iterand'"):
        small("train_norms=false")
    with pytest.raises(ValueError, match="train_norms is false, but the network has no norm that learns"):
        prepare(torch.nn.Linear(4, 4), small("method.name=sgd", "train_norms=false"), 10)


def test_a_folder_whose_name_is_not_utf_8_is_refused(tmp_path):
    folder = tmp_path / os.fsdecode(b"\xff")
    with pytest.raises(IterandError, match=r"the run folder .*\\udcff' has no name in UTF-8; choose another --out"):
        run(small(), RunFolder(folder), device=CPU)
    assert list(tmp_path.iterdir()) == []


def test_errors_of_the_thread_of_tensorboard_are_not_printed(tmp_path, monkeypatch):
    """They are raised in the next call."""
    printed = []
    monkeypatch.setattr(threading, "excepthook", lambda error: printed.append((type(error.thread), error.exc_type)))
    of_log = type("Writer", (threading.Thread,), {"__module__": type(_writer_thread(tmp_path)).__module__})

    def fail(error):
        raise error

    full = OSError(errno.ENOSPC, "full")
    with RunFolder(tmp_path / "run").opened(small()):
        for kind, error in ((of_log, full), (of_log, KeyError("other")), (threading.Thread, full)):
            thread = kind(target=fail, args=(error,))
            thread.start()
            thread.join()
    assert printed == [(of_log, KeyError), (threading.Thread, OSError)]


def _writer_thread(folder):
    """The thread in which TensorBoard writes its log."""
    before = set(threading.enumerate())
    with SummaryWriter(str(folder / "log")):
        (thread,) = set(threading.enumerate()) - before
    return thread


@pytest.mark.parametrize("full", ["add_scalar", "close"])
def test_a_log_that_cannot_be_written_names_the_run_folder(tmp_path, monkeypatch, full):
    monkeypatch.setattr(SummaryWriter, full, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(IterandError, match=r"cannot write to the run folder .*run: No space left on device"):
        run(small(), RunFolder(tmp_path / "run"), device=CPU)


@pytest.mark.parametrize("method", ["sgd", "imp"])
def test_a_frozen_network_is_refused_where_weights_are_trained(method):
    with pytest.raises(ValueError, match=f"method.name is '{method}', but the network has no parameter that requires"):
        prepare(torch.nn.Linear(4, 4).requires_grad_(False), small(f"method.name={method}", "rounds=1"), 10)


def test_methods_differ_in_what_they_do():
    data = load_data("digits", CPU)

    def prepared(method):
        recipe = small(f"method.name={method}")
        session = build_session(recipe, data, CPU)
        return session.model, [type(stepper).__name__ for stepper in session.steppers], session.parameters

    model, steppers, parameters = prepared("sgd")
    assert (steppers, len(parameters)) == ([], len(list(model.parameters())))
    model, steppers, parameters = prepared("edge_popup")
    assert steppers == []
    assert all(a is b for a, b in zip(parameters, iterand.scores(model)))
    assert prepared("iterand")[1] == ["IterativeRandomization"]
    scheduled = prepare(torch.nn.Linear(4, 4), small("sparsity_schedule=linear"), 10)
    assert [type(stepper).__name__ for stepper in scheduled.steppers] == ["IterativeRandomization", "SparsitySchedule"]


def test_convolutions_that_torch_computes_wrongly_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    photos = write_image_folder(tmp_path / "photos", {"": 6}, ("blue", "red"))
    settings = ["data.name=image_folder", f"data.path={photos}", "image_size=32", "network.name=resnet20", "epochs=1"]
    refused = pin(small(*settings, "batch_size=4", "channels_last=true"), None)
    with pytest.raises(RecipeError, match=r"'\S+', a strided 1x1 convolution of 4 channels; set channels_last = false"):
        run(refused, RunFolder(tmp_path / "refused"), device=CPU)
    for way in ("channels_last=false", "width_factor=0.5"):
        trained = recipe_file.override(refused, [way])
        assert run(trained, RunFolder(tmp_path / way), device=CPU)["metrics"]


@pytest.mark.parametrize(("late", "rounds"), [("true", 3), ("false", 2)])  # after 2, 4 and 6 of 6 iterations
def test_late_rounds_can_be_left_out(tmp_path, late, rounds):
    folder = RunFolder(tmp_path / "run")
    run(small(f"late_rounds={late}"), folder, device=CPU)
    ticket = iterand.read_ticket(folder.path / "model.ticket")
    assert {layer.header.rounds for layer in ticket.layers.values()} == {rounds}


def test_edge_popup_is_iterand_at_rate_0(tmp_path):
    edge_popup = run(small("method.name=edge_popup"), RunFolder(tmp_path / "a"), device=CPU)["result"]
    at_rate_0 = run(small("rate=0"), RunFolder(tmp_path / "b"), device=CPU)["result"]
    assert at_rate_0["test_loss"] == edge_popup["test_loss"]


def test_a_loss_that_is_nan_stops_the_run(tmp_path):
    with pytest.raises((IterandError, ValueError), match="NaN"):
        run(small("method.name=sgd", "learning_rate.initial=1e30"), RunFolder(tmp_path), device=CPU)


def test_a_batch_larger_than_the_data_is_refused(tmp_path):
    with pytest.raises(ValueError, match="batch_size is 5000, but there are only 1,197 training examples; lower it"):
        run(small("batch_size=5000"), RunFolder(tmp_path), device=CPU)
    with pytest.raises(ValueError, match="batch_size is 300, but there is only 1 training example; lower it"):
        run(small("train_limit=1"), RunFolder(tmp_path), device=CPU)


def test_run_and_ticket_evaluate_alike(tmp_path):
    result = run(small("rate=0.5"), RunFolder(tmp_path), device=CPU)["result"]
    by_run = evaluate_run(tmp_path, device=CPU)
    by_ticket = evaluate_run(tmp_path / "model.ticket", device=CPU)
    assert by_run["test_loss"] == by_ticket["test_loss"] == result["test_loss"]
    assert by_run["test_accuracy"] == by_ticket["test_accuracy"] == result["test_accuracy"]


def test_without_bfloat16_a_network_is_tested_in_float32(tmp_path, monkeypatch):
    run(small("epochs=1"), RunFolder(tmp_path / "run"), device=CPU)
    recipe = small("epochs=1", "precision=bfloat16")
    monkeypatch.setattr("iterand.lab.training.run._recipe_of", lambda path: recipe)
    ticket, tested = tmp_path / "run" / "model.ticket", []
    monkeypatch.setattr(
        "iterand.lab.training.run.evaluate", lambda *given: tested.append(given[2].training.precision) or {}
    )
    for there in (True, False):
        monkeypatch.setattr(environment, "has_bfloat16", lambda there=there: there)
        with (
            contextlib.nullcontext()
            if there
            else pytest.warns(UserWarning, match="has no bfloat16, so the network is tested")
        ):
            evaluate_run(ticket, device=CPU)
    assert tested == ["bfloat16", "float32"]


def test_evaluating_with_other_images_than_those_of_the_run(tmp_path):
    photos, folder, ticket = tmp_path / "photos", tmp_path / "run", tmp_path / "run" / "model.ticket"
    write_image_folder(photos, {"": 6}, ("blue", "red"))
    settings = ["data.name=image_folder", f"data.path={photos}", "image_size=32", "network.name=conv6", "batch_size=4"]
    recipe = pin(small(*settings, "epochs=1", "width_factor=0.05"), None)
    result = run(recipe, RunFolder(folder), device=CPU)["result"]
    photos.rename(tmp_path / "moved")
    for path in (folder, ticket):
        assert evaluate_run(path, device=CPU, data_dir=tmp_path / "moved")["test_loss"] == result["test_loss"]
    photos = write_image_folder(tmp_path / "more", {"": 20}, ("blue", "red"))
    for path in (folder, ticket):
        with pytest.warns(UserWarning, match="it now tests images that may have been trained with"):
            assert evaluate_run(path, device=CPU, data_dir=photos)["examples"] == 4
    photos = write_image_folder(tmp_path / "three", {"": 6})
    with pytest.warns(UserWarning, match="have changed"), pytest.raises(CheckpointError, match="with other classes"):
        evaluate_run(folder, device=CPU, data_dir=photos)
    with pytest.raises(DataError, match="the data have 3 classes, but the network is for 2; give the folder of its"):
        evaluate_run(ticket, device=CPU, data_dir=photos)


def test_evaluation_is_a_plain_mean():
    data = load_data("digits", CPU)
    recipe = small()
    model = build_session(recipe, data, CPU).model.eval()
    batch = next(data.test.batches(torch.arange(len(data.test)), len(data.test)))
    right = total = 0.0
    with torch.no_grad():
        for image, label in zip(batch.inputs[0], batch.labels):
            logits = model(image[None])[0].double()
            right += int(logits.argmax()) == int(label)
            total += float(logits.logsumexp(0) - logits[label])
    measured = evaluate(model, data.test, recipe, torch.device("cpu"))
    assert measured["accuracy"] == pytest.approx(100 * right / 400)
    assert measured["loss"] == pytest.approx(total / 400, rel=1e-5)


def test_default_folder_comes_from_the_settings(tmp_path):
    assert default_path(small(), tmp_path) == default_path(small("name=small"), tmp_path)
    assert default_path(small(), tmp_path) != default_path(small("rate=0.3"), tmp_path)


def test_data_order_is_a_new_permutation_each_epoch():
    from iterand import philox

    key = philox.key(0, "data order")
    first, second = (philox.permutation(1197, key, epoch).tolist() for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(1197))
    assert first != second
    assert first == philox.permutation(1197, key, 0).tolist()


def test_a_run_whose_last_checkpoint_cannot_be_written_is_not_complete(tmp_path, monkeypatch):
    recipe = recipe_file.override(Recipe(name="x"), ["epochs=2", "network.width_factor=0.25"])
    write = write_checkpoint

    def full(folder, state):
        if state.state["epoch"] == 2:
            raise CheckpointError("disk full")
        write(folder, state)

    monkeypatch.setattr("iterand.lab.training.folder.write_checkpoint", full)
    with pytest.raises(CheckpointError, match="disk full"):
        run(recipe, RunFolder(tmp_path), device=CPU)
    assert not (tmp_path / "record.json").exists()
    monkeypatch.setattr("iterand.lab.training.folder.write_checkpoint", write)
    assert run(recipe, RunFolder(tmp_path), device=CPU)["metrics"][-1]["epoch"] == 2


def test_a_smoothed_label_gives_a_share_to_all_classes_alike():
    outputs, labels = torch.tensor([[2.0, 0.5, -1.0], [0.0, 1.0, 3.0]]), torch.tensor([0, 1])
    logs = outputs.double().log_softmax(1)
    wanted = [-0.7 * logs[row, label] - 0.3 * logs[row].mean() for row, label in enumerate(labels)]
    assert loss(outputs, labels, 0.3).item() == pytest.approx(sum(wanted).item() / 2, rel=1e-5)
    one = torch.tensor([[2.0], [-0.5]])  # stands for the classes 0 and 1
    two = torch.cat([torch.zeros_like(one), one], 1)
    assert loss(one, labels, 0.3).item() == pytest.approx(loss(two, labels, 0.3).item(), rel=1e-5)
    assert loss(one, labels).item() == pytest.approx(loss(two, labels).item(), rel=1e-5)


def test_outputs_are_divided_by_the_temperature_before_the_loss():
    several, labels = torch.tensor([[2.0, 0.5, -1.0], [0.0, 1.0, 3.0]]), torch.tensor([0, 1])
    for outputs in (several, several[:, :1]):  # one output stands for two classes
        hot = training_loss(outputs, labels, TrainingRecipe(temperature=0.25, label_smoothing=0.3))
        assert torch.equal(hot, loss(4 * outputs, labels, 0.3))
        assert torch.equal(training_loss(outputs, labels, TrainingRecipe()), loss(outputs, labels))


def test_the_temperature_of_a_recipe_is_that_of_its_training_alone(tmp_path):
    settings = ["method.name=sgd", "learning_rate.initial=0.05", "temperature=1000", "epochs=1"]
    metrics = run(small(*settings), RunFolder(tmp_path), device=CPU)["metrics"][-1]
    assert metrics["train_loss"] == pytest.approx(math.log(10), abs=0.01)  # all ten classes look alike
    assert metrics["validation_loss"] > math.log(10) + 0.01  # outputs that hardly moved, as they are


def test_labels_of_a_recipe_are_smoothed(tmp_path):
    settings = ["method.name=sgd", "learning_rate.initial=0.05", "batch_size=64", "epochs=4"]
    plain, smoothed = (
        run(small(*settings, f"label_smoothing={share}"), RunFolder(tmp_path / str(share)), device=CPU)["metrics"][-1]
        for share in (0.0, 0.5)
    )
    # Half of every label on ten classes alike: less than this cannot be reached.
    least = -0.55 * math.log(0.55) - 9 * 0.05 * math.log(0.05)
    assert plain["train_loss"] < 0.7 < least < smoothed["train_loss"]


@pytest.mark.parametrize(
    ("data", "steps", "pays"),
    [("imagenet", 1_000_000, True), ("imagenet", 800, False), ("cifar10", 1_000_000, False)],
)
def test_networks_are_compiled_where_that_pays(data, steps, pays):
    recipe = recipe_file.override(Recipe(), [f"data.name={data}"])
    assert compiling_pays(recipe, steps) == pays


def test_a_record_says_how_its_run_was_executed(tmp_path):
    record = run(small("epochs=1"), RunFolder(tmp_path / "run"), device=CPU)
    assert record["environment"]["execution"]["way"] == "eager"


def test_a_run_that_was_refused_at_the_start_leaves_its_folder_free(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(ValueError, match="augmentation"):
        run(small("augmentation=crop"), folder, device=CPU)
    record = run(small("epochs=1"), folder, device=CPU)
    assert record["recipe"]["data"]["augmentation"] == "none"


def test_a_finished_run_is_replaced_only_by_one_that_can_begin(tmp_path):
    folder = RunFolder(tmp_path)
    record = run(small(), folder, device=CPU)
    kept = sorted(path.name for path in tmp_path.iterdir())
    for setting, sentence in (("augmentation=crop", "augmentation"), ("norm_statistics=recomputed", "no batch norm")):
        with pytest.raises(ValueError, match=sentence):
            run(small(setting), folder, device=CPU, fresh=True)
        assert sorted(path.name for path in tmp_path.iterdir()) == kept
        assert run(small(), folder, device=CPU) == record
    assert run(small("rate=0.3"), folder, device=CPU, fresh=True)["recipe"]["method"]["rate"] == 0.3


def test_a_record_names_our_commit_and_a_command_that_can_be_pasted(tmp_path, monkeypatch):
    monkeypatch.delenv("ITERAND_COMMIT", raising=False)
    monkeypatch.setattr("sys.argv", ["iterand", "reproduce", "--only", "figure2/Conv6, IteRand (SC)"])
    assert environment.describe(CPU)["command"] == "iterand reproduce --only 'figure2/Conv6, IteRand (SC)'"
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@y.z"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "a stranger's"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    installed = tmp_path / "environment.py"
    installed.write_text("")
    monkeypatch.setattr(environment, "__file__", str(installed))
    assert environment.describe(CPU)["commit"] is None  # the repository around us is another project's
    subprocess.run([*git, "add", "environment.py"], cwd=tmp_path, check=True)
    assert len(environment.describe(CPU)["commit"]) == 40


@pytest.mark.parametrize(
    "answers",
    [
        {"cat": "processor\t: 0\nmodel name\t: A processor\n"},
        {"cat": "CPU part\t: 0xd0c\n", "lscpu": "Model name:  A processor\n"},
    ],
)
def test_a_record_names_the_processor(tmp_path, monkeypatch, answers):
    for name, answer in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\nprintf '{answer}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.describe(CPU)["hardware"]["cpu"] == "A processor"


def test_a_run_computes_without_the_numbers_that_slow_a_cpu_down():
    def is_flushed():
        return bool((torch.full((2,), 2e-38) * 0.01 == 0).all())  # of a number that is none of them itself

    before = torch.get_num_threads()
    assert not is_flushed()
    with compute_settings(1):
        assert is_flushed()
        assert torch.get_num_threads() == 1
        with compute_settings(0):
            assert is_flushed()
        assert is_flushed()
    assert not is_flushed()
    assert torch.get_num_threads() == before


def test_a_run_leaves_onednn_as_it_was():
    """torch turns it off for good when bfloat16 is multiplied on an ARM processor without it."""
    before = torch.backends.mkldnn.enabled
    with compute_settings(1):
        torch.backends.mkldnn.set_flags(not before)
    assert torch.backends.mkldnn.enabled is before


def test_numpy_finds_its_limits_before_they_seem_to_be_zero(monkeypatch):
    done = []
    monkeypatch.setattr(np, "finfo", done.append)
    monkeypatch.setattr(torch, "set_flush_denormal", done.append)
    with compute_settings(0):
        assert done == [np.float32, np.float64, True]


def test_gradients_that_fade_do_not_make_a_run_slow(tmp_path):
    seen = []

    class Look(loop.NullObserver):
        def step(self, session):
            seen.append(float(torch.tensor(1e-38) * 0.01))

    run(small("epochs=1"), RunFolder(tmp_path), device=CPU, observer=Look())
    assert seen
    assert not any(seen)


NUMBERS = [
    f"{key}={bound!r}"
    for key, entry in recipe_keys().items()
    if entry.type in (int, float)
    for bound in (entry.metadata["low"], entry.metadata["high"])
    if (key, bound) not in (("training.epochs", 2**31 - 1), ("network.width_factor", 1e12), ("training.threads", 1024))
]


@pytest.mark.parametrize("setting", NUMBERS)
def test_steps_with_the_smallest_and_the_largest_number_of_every_key_work_or_get_a_sentence(monkeypatch, setting):
    monkeypatch.setattr(memory, "available", lambda device=None: 1_000_000_000)
    data = load_data("digits", CPU, limit=32)
    for more in ([], ["method.name=sgd"], ["schedule=multi_step", "milestones=[0]"]):
        with contextlib.suppress(IterandError, ValueError):
            session = build_session(small("batch_size=16", "epochs=1", *more, setting), data, CPU)
            step = EagerStep(session)
            for batch in loop._begin_epoch(session, data.train):
                step.train(batch)
                session.advance(len(batch.labels))
            assert session.step == session.steps_per_epoch
