"""Statistics of batch norms that are those of the network that was found."""

import os
import signal

import pytest
import torch

from iterand.lab.data import Batch, cifar10
from iterand.lab.networks import build_network
from iterand.lab.training import loop, recipe_file
from iterand.lab.training.checkpoint import read_checkpoint
from iterand.lab.training.environment import Interrupted
from iterand.lab.training.folder import RunFolder
from iterand.lab.training.loop import recompute_norms_
from iterand.lab.training.recipe import Recipe
from iterand.lab.training.run import evaluate_run, run
from iterand.lab.training.session import Session
from iterand.lab.training.steps import EagerStep
from iterand.ticket import read_ticket
from made_up_data import cifar_records, write_cifar_binary

CPU = torch.device("cpu")


def session_of(*settings):
    base = ["network.name=resnet20", "width_factor=0.25", "batch_size=8", "learning_rate.initial=0.5", "period=2"]
    recipe = recipe_file.override(Recipe(name="x"), [*base, *settings])
    session = Session(recipe, build_network("resnet20", width_factor=0.25, classes=10, seed=0), 4, CPU)
    session.set_learning_rate(0.5)
    return session


def batches(count):
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield Batch((torch.randn(8, 3, 32, 32, generator=generator),), torch.arange(8) % 10)


@pytest.mark.parametrize("norms", ["fixed", "shifted"])
def test_they_are_plain_means_over_the_batches(norms):
    session = session_of(f"norms={norms}")
    step = EagerStep(session)
    for batch in batches(3):
        step.train(batch)
        session.advance(8)
    before = {name: value.clone() for name, value in session.model.state_dict().items()}
    norm = last_norm(session.model)
    inputs = []
    handle = norm.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    recompute_norms_(session, batches(4))
    handle.remove()
    means = torch.stack([one.mean((0, 2, 3)) for one in inputs]).mean(0)
    variances = torch.stack([one.var((0, 2, 3), unbiased=True) for one in inputs]).mean(0)
    torch.testing.assert_close(norm.running_mean, means)
    torch.testing.assert_close(norm.running_var, variances)
    assert norm.num_batches_tracked == 4
    assert norm.momentum == 0.1
    for name, value in session.model.state_dict().items():
        assert torch.equal(value, before[name]) != ("running" in name or "tracked" in name), name


def last_norm(model):
    return [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)][-1]


def test_a_small_batch_counts_as_little_as_its_examples():
    session = session_of()
    (batch,) = batches(1)
    parts = [Batch((batch.inputs[0][part],), batch.labels[part]) for part in (slice(0, 6), slice(6, 8))]
    inputs = []
    norm = next(module for module in session.model.modules() if isinstance(module, torch.nn.BatchNorm2d))
    norm.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    recompute_norms_(session, parts)
    torch.testing.assert_close(norm.running_mean, torch.cat(inputs).mean((0, 2, 3)))


def test_a_network_without_norms_is_refused_before_it_is_trained(tmp_path):
    recipe = recipe_file.override(Recipe(name="x"), ["norm_statistics=recomputed"])
    with pytest.raises(ValueError, match="digits_conv has no batch norm; leave it out"):
        run(recipe, RunFolder(tmp_path), device=CPU)
    assert not (tmp_path / "metrics.jsonl").exists() or (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_stop_is_heard_while_they_are_recomputed_and_nothing_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10, "RECORDS", 20)
    write_cifar_binary(tmp_path, cifar_records(20))
    settings = ["data.name=cifar10", "network.name=resnet20", "width_factor=0.25", "epochs=1", "batch_size=30"]
    recipe = recipe_file.override(Recipe(name="x"), [*settings, "norm_statistics=recomputed"])
    whole = run(recipe, RunFolder(tmp_path / "whole"), device=CPU, data_dir=tmp_path)

    def stopped(session, batches):
        os.kill(os.getpid(), signal.SIGINT)
        list(batches)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "recompute_norms_", stopped)
        with pytest.raises(Interrupted):
            run(recipe, RunFolder(tmp_path / "broken"), device=CPU, data_dir=tmp_path)
    assert read_checkpoint(tmp_path / "broken").state["step"] == 3  # the last: no step is repeated
    again = run(recipe, RunFolder(tmp_path / "broken"), device=CPU, data_dir=tmp_path)
    assert again["result"] == whole["result"]
    assert again["metrics"] == whole["metrics"]


def test_in_half_precision_the_ticket_is_smaller_and_is_the_network_that_was_tested(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10, "RECORDS", 20)
    write_cifar_binary(tmp_path, cifar_records(20))
    settings = ["data.name=cifar10", "network.name=resnet20", "width_factor=0.25", "epochs=1", "batch_size=30"]
    sizes = {}
    for way in ("recomputed", "recomputed_half"):
        recipe = recipe_file.override(Recipe(name="x"), [*settings, f"norm_statistics={way}"])
        record = run(recipe, RunFolder(tmp_path / way), device=CPU, data_dir=tmp_path)
        tested = evaluate_run(tmp_path / way / "model.ticket", device=CPU, data_dir=tmp_path)
        assert tested["test_loss"] == pytest.approx(record["result"]["test_loss"], abs=1e-9)
        sizes[way] = record["result"]["ticket_bytes"]
    kinds = {tensor.saved_as for tensor in read_ticket(tmp_path / way / "model.ticket").header.tensors.values()}
    assert "F16" in kinds
    assert "F32" not in kinds
    assert sizes["recomputed_half"] < sizes["recomputed"] - 200


@pytest.mark.parametrize("factor", [1e5, 1e-5])
def test_what_float16_cannot_hold_stays(factor):
    session = session_of("norm_statistics=recomputed_half")
    norm = last_norm(session.model)
    recompute_norms_(session, batches(1))
    assert torch.equal(norm.running_mean.half().float(), norm.running_mean)
    assert torch.equal(norm.running_var.half().float(), norm.running_var)
    norm.eps = 1e-20
    norm.register_forward_pre_hook(lambda module, given: (given[0] * factor,))
    outputs = []
    norm.register_forward_hook(lambda module, given, output: outputs.append(output))
    recompute_norms_(session, batches(1))
    session.model.eval()(next(batches(1)).inputs[0])
    trained, tested = outputs
    torch.testing.assert_close(tested, trained, rtol=0.1, atol=0.1)


def test_a_run_differs_in_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10, "RECORDS", 20)
    write_cifar_binary(tmp_path, cifar_records(20))
    settings = ["data.name=cifar10", "data.augmentation=crop", "network.name=resnet20", "width_factor=0.25"]
    settings += ["epochs=2", "batch_size=30", "period=3", "learning_rate.initial=0.5"]
    found, records = {}, {}
    for way in ("running", "recomputed"):
        recipe = recipe_file.override(Recipe(name="x"), [*settings, f"norm_statistics={way}"])
        records[way] = run(recipe, RunFolder(tmp_path / way), device=CPU, data_dir=tmp_path)
        found[way] = read_checkpoint(tmp_path / way).tensors
    assert records["running"]["metrics"][0] == records["recomputed"]["metrics"][0]
    running, recomputed = (records[way]["metrics"][1] for way in ("running", "recomputed"))
    assert running["train_loss"] == recomputed["train_loss"]
    assert running["validation_loss"] != recomputed["validation_loss"]
    for name, value in found["running"].items():
        assert torch.equal(value, found["recomputed"][name]) != ("running_" in name or "tracked" in name), name
