"""Distillation: a run that learns the outputs of a teacher beside the labels."""

import json
import math
import re

import pytest
import torch

import iterand
from crashing import StopAfter, outcome
from iterand.errors import RecipeError
from iterand.lab.data import Batch
from iterand.lab.experiments.library import find_recipe, pin
from iterand.lab.networks import build_network
from iterand.lab.training import loop, recipe_file
from iterand.lab.training.folder import RunFolder
from iterand.lab.training.recipe import TrainingRecipe
from iterand.lab.training.run import check_run, evaluate_run, run
from iterand.lab.training.session import Session
from iterand.lab.training.steps import EagerStep, Teacher, loss, training_loss
from test_training import small

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a search, with a ticket in it."""
    path = tmp_path_factory.mktemp("teacher")
    run(small("seed=7"), RunFolder(path), device=CPU)
    return path


def softmax(row):
    total = sum(math.exp(value) for value in row)
    return [math.exp(value) / total for value in row]


def test_the_loss_is_that_of_the_labels_and_the_divergence_from_the_teacher():
    outputs, taught = [[2.0, 0.5, -1.0], [0.0, 1.0, 3.0]], [[0.3, 0.1, 0.2], [-2.0, 0.0, 1.0]]
    labels, share, high = torch.tensor([0, 1]), 0.7, 3.0
    training = TrainingRecipe(teacher="x", teacher_weight=share, teacher_temperature=high, temperature=0.5)
    divergence = 0.0
    for own, wanted in zip(outputs, taught):
        theirs = softmax([value / high for value in wanted])
        ours = softmax([value / 0.5 / high for value in own])  # the loss sees outputs divided by the temperature
        divergence += sum(a * math.log(a / b) for a, b in zip(theirs, ours)) / len(outputs)
    of_labels = loss(2 * torch.tensor(outputs), labels).item()
    found = training_loss(torch.tensor(outputs), labels, training, torch.tensor(taught)).item()
    assert found == pytest.approx((1 - share) * of_labels + share * high**2 * divergence, rel=1e-5)


def test_one_output_stands_for_two_classes():
    one, taught, labels = torch.tensor([[2.0], [-0.5]]), torch.tensor([[0.3], [1.0]]), torch.tensor([0, 1])
    two, of_two = (torch.cat([torch.zeros_like(each), each], 1) for each in (one, taught))
    training = TrainingRecipe(teacher="x")
    found = training_loss(one, labels, training, taught).item()
    assert found == pytest.approx(training_loss(two, labels, training, of_two).item(), rel=1e-5)


def test_a_step_learns_from_the_teacher_and_leaves_it_as_it_is():
    recipe = small("method.name=sgd", "teacher=x", "teacher_weight=1")
    images, generator = torch.randn(8, 1, 8, 8), torch.Generator().manual_seed(0)
    model = build_network("digits_conv", width_factor=1.0, classes=10, seed=1).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    teacher = Teacher(model, small("temperature=0.5"))
    with torch.no_grad():
        wanted = 2 * model(images)  # outputs at the temperature of its training
    assert torch.equal(teacher((images,)), wanted)

    ends = []
    for labels in torch.randint(10, (2, 8), generator=generator):  # which do not count with a weight of 1
        student = build_network("digits_conv", width_factor=0.25, classes=10, seed=0)
        session = Session(recipe, student, 10, CPU)
        EagerStep(session, teacher).train(Batch((images,), labels))
        ends.append(student.state_dict())
    fresh = build_network("digits_conv", width_factor=0.25, classes=10, seed=0).state_dict()
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())
    assert not all(torch.equal(tensor, fresh[name]) for name, tensor in ends[0].items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not model.training


def test_a_run_folder_and_its_ticket_are_the_same_teacher(tmp_path, folder):
    taught = {
        way: run(small(f"teacher={path}"), RunFolder(tmp_path / way), device=CPU)
        for way, path in {"folder": folder, "ticket": folder / "model.ticket"}.items()
    }
    alone = run(small(), RunFolder(tmp_path / "alone"), device=CPU)
    assert taught["folder"]["metrics"] == taught["ticket"]["metrics"]
    assert taught["folder"]["result"]["model_sha256"] != alone["result"]["model_sha256"]
    ticket = iterand.read_ticket(tmp_path / "folder" / "model.ticket")
    assert ticket.recipe["training"]["teacher"] == folder.name  # not where it was
    tested = evaluate_run(tmp_path / "folder" / "model.ticket", device=CPU)  # without the teacher
    assert tested["test_loss"] == pytest.approx(taught["folder"]["result"]["test_loss"], rel=1e-6)


def test_a_broken_run_with_a_teacher_ends_like_an_unbroken_one(tmp_path, monkeypatch, folder):
    recipe = small("sparsity=0.7", f"teacher={folder}")
    run(recipe, RunFolder(tmp_path / "whole"), device=CPU)
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)  # a checkpoint after every step
    for steps in (1, 3):
        with pytest.raises(RuntimeError, match="crash"):
            run(recipe, RunFolder(tmp_path / "broken"), device=CPU, observer=StopAfter(steps))
    run(recipe, RunFolder(tmp_path / "broken"), device=CPU)
    assert outcome(tmp_path / "broken") == outcome(tmp_path / "whole")


def test_a_recipe_knows_its_teacher_by_its_contents(tmp_path, folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one").mkdir()
    for name in ("recipe.toml", "checkpoint.safetensors"):
        (tmp_path / "one" / name).write_bytes((folder / name).read_bytes())
    recipe = pin(find_recipe("digits", ["teacher=one", "epochs=1"]), None)
    assert recipe.training.teacher == str(tmp_path / "one")
    assert len(recipe.training.teacher_sha256) == 64
    moved = recipe_file.override(recipe, [f"teacher={tmp_path / 'other' / 'one'}"])
    assert recipe_file.digest(moved) == recipe_file.digest(recipe)
    assert recipe_file.from_dict(json.loads(json.dumps(recipe_file.as_dict(recipe)))) == recipe
    with (tmp_path / "one" / "checkpoint.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(RecipeError, match=r"the teacher .*one changed; leave training.teacher_sha256 out"):
        pin(recipe, None)


def test_recipes_without_a_teacher_do_not_mention_one():
    assert not [key for key in recipe_file.as_dict(small())["training"] if "teacher" in key]
    with pytest.raises(RecipeError, match=r"training.teacher_weight is for a teacher, but training.teacher is missing"):
        small("teacher_weight=0.7")


def test_teachers_that_cannot_teach_are_refused(tmp_path, folder):
    with pytest.raises(RecipeError, match="nowhere, which is neither a ticket nor a run folder with a checkpoint"):
        pin(small(f"teacher={tmp_path / 'nowhere'}"), None)
    other = (folder / "recipe.toml").read_text().replace('normalization = "default"', 'normalization = "imagenet"')
    (tmp_path / "recipe.toml").write_text(other)
    sentence = "was trained with data.normalization = 'imagenet', but the recipe has 'default'; choose a teacher"
    with pytest.raises(RecipeError, match=sentence):
        check_run(small(f"teacher={tmp_path}"))


def test_a_teacher_with_other_outputs_is_refused_before_a_run_is_replaced(tmp_path):
    run(small("epochs=1", "classes=12"), RunFolder(tmp_path / "teacher"), device=CPU)
    run(small("epochs=1"), RunFolder(tmp_path / "student"), device=CPU)
    before = outcome(tmp_path / "student")
    for path in (tmp_path / "teacher", tmp_path / "teacher" / "model.ticket"):
        recipe = small(f"teacher={path}")
        sentence = f"the teacher {path} has 12 outputs, but the network 10; choose a teacher of the same classes"
        with pytest.raises(RecipeError, match=re.escape(sentence)):
            run(recipe, RunFolder(tmp_path / "student"), device=CPU, fresh=True)
        with pytest.raises(RecipeError, match=re.escape(sentence)):
            check_run(recipe)
    assert outcome(tmp_path / "student") == before


def test_a_run_does_not_replace_its_teacher(tmp_path):
    run(small("epochs=1"), RunFolder(tmp_path), device=CPU)
    before = outcome(tmp_path)
    for path in (tmp_path, tmp_path / "model.ticket"):
        with pytest.raises(
            RecipeError, match=r"the teacher .* would be replaced by the run in .*; choose another --out"
        ):
            run(small(f"teacher={path}"), RunFolder(tmp_path), device=CPU, fresh=True)
    assert outcome(tmp_path) == before
