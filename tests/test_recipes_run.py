"""Every recipe of the package as a dry run, on data of the right layout and no meaning."""

import csv

import numpy as np
import pytest
import torch
from PIL import Image

import iterand
from iterand.lab.data import cifar10
from iterand.lab.data.dataset import data_folder
from iterand.lab.data.imdb import locate
from iterand.lab.experiments.catalog import tiny
from iterand.lab.experiments.library import find_recipe, recipe_names
from iterand.lab.training import recipe_file
from iterand.lab.training.folder import RunFolder
from iterand.lab.training.run import evaluate_run, run

CPU = torch.device("cpu")
RECORDS = 100  # images in a file of CIFAR-10


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cifar10, "RECORDS", RECORDS)
        yield write_data(tmp_path_factory.mktemp("data"))


def write_data(root):
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        (folder / f"{name}.bin").write_bytes(bytes(RECORDS * 3_073))  # black images of class 0
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


@pytest.mark.parametrize("name", ["lstm", "bilstm"])
def test_the_forget_gates_of_a_pruned_lstm_stay_open(name, data, tmp_path):
    run(tiny(find_recipe(name)), RunFolder(tmp_path), device=CPU, data_dir=data)
    network = iterand.load_ticket(tmp_path / "model.ticket")
    biases = {key: bias for key, bias in network.recurrent.named_parameters() if key.startswith("bias")}
    for key, bias in biases.items():
        gates = bias.view(4, -1)
        assert (gates[1] == (1 if key.startswith("bias_ih") else 0)).all()
        assert (gates[[0, 2, 3]] == 0).all()
    assert network.word_scale == 10


def test_a_network_without_words_has_no_scale_for_them(tmp_path):
    with pytest.raises(ValueError, match="network 'digits_conv' has no option 'word_scale'"):
        run(recipe_file.override(find_recipe("digits"), ["word_scale=2"]), RunFolder(tmp_path), device=CPU)


def test_an_lstm_runs_on_the_real_reviews(tmp_path):
    """Not that it learns: that takes thousands of steps on a GPU."""
    if locate(data_folder()) is None:
        pytest.skip("IMDB is not in $ITERAND_DATA")
    small = ["limit=64", "epochs=1", "width_factor=0.125", "batch_size=32", "period=1"]
    record = run(recipe_file.override(find_recipe("lstm"), small), RunFolder(tmp_path), device=CPU)
    assert record["metrics"][0]["train_loss"] == pytest.approx(0.693, abs=0.05)  # ln 2: it knows nothing yet
    assert evaluate_run(tmp_path / "model.ticket", device=CPU)["test_loss"] == record["result"]["test_loss"]
