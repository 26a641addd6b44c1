"""Every recipe of the package as a dry run, on data of the right layout and no meaning."""

import csv

import numpy as np
import pytest
import torch
from PIL import Image

from iterand.experiments.library import find_recipe, recipe_names
from iterand.experiments.running import evaluate_run, run
from iterand.experiments.scale import tiny
from iterand.training.folder import RunFolder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    cifar10 = root / "cifar-10-batches-bin"
    cifar10.mkdir()
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        with (cifar10 / f"{name}.bin").open("wb") as file:
            file.truncate(10_000 * 3_073)  # black images of class 0; the file takes no room
    for part in ("train", "val"):
        for name in ("a", "b", "c"):
            folder = root / "imagenet" / part / name
            folder.mkdir(parents=True)
            for number in range(6):
                Image.fromarray(np.full((40, 50, 3), 40 * number, np.uint8)).save(folder / f"{number}.JPEG")
    (root / "imdb").mkdir()
    for part in ("train", "test"):
        with (root / "imdb" / f"{part}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["id", "label", "rating", "text"])
            for number in range(40):
                text = "good film" if number % 2 else "a bad film, and long"
                rows.writerow([f"{number}", number % 2, 5, text])
    return root


@pytest.mark.parametrize("name", recipe_names())
def test_a_dry_run_of(name, data, tmp_path):
    recipe = tiny(find_recipe(name))
    record = run(recipe, RunFolder(tmp_path), device=CPU, data_dir=data)
    assert record["recipe"]["scale"] == "tiny"
    assert len(record["metrics"]) == recipe.training.epochs
    result = record["result"]
    if recipe.method.trains_weights:
        assert not (tmp_path / "model.ticket").exists()
        assert record["randomization_milliseconds"] is None
    else:  # a ticket that rebuilds the network by itself, whatever classes and vocabulary the data have
        assert evaluate_run(tmp_path / "model.ticket", device=CPU, data_dir=data)["test_loss"] == result["test_loss"]
        assert record["randomization_milliseconds"] > 0
    assert evaluate_run(tmp_path, device=CPU, data_dir=data)["test_loss"] == result["test_loss"]
