"""Is the search behind dense SGD because its norms are not trained? (docs/explanation/beyond.md)

Run from the repository: python tools/probe_untrained_norms.py DATA_DIR FILE [DEVICE]. FILE is written after every run;
runs that it has already are not repeated.

ResNet18 is trained with 20,000 of CIFAR-10's training images and validated with the other 30,000, because differences
of less than a point need many images. Test images are not used. Settings are those of the recipes best-resnet18 and
best-resnet18-sgd; epochs and weight decay were adapted to the smaller data before these runs.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from iterand.lab.data import Dataset, Split
from iterand.lab.data.cifar10 import CLASSES, locate, read
from iterand.lab.data.dataset import Normalizer, fixed_order
from iterand.lab.data.images import ImageSplit
from iterand.lab.experiments.library import find_recipe
from iterand.lab.training.environment import choose_device, compute_settings, describe, stop_request
from iterand.lab.training.folder import RunFolder
from iterand.lab.training.loop import NullObserver, train
from iterand.lab.training.recipe import Recipe
from iterand.lab.training.run import build_session
from iterand.lab.training.steps import Execution, choose_step

SEARCH, DENSE = ["sparsity=0.9", "weight_decay=3e-4"], ["weight_decay=2e-3"]
RUNS = (  # label, recipe, settings
    ("dense SGD", "best-resnet18-sgd", DENSE),
    ("dense SGD, norms untrained", "best-resnet18-sgd", [*DENSE, "train_norms=false"]),
    ("dense SGD, norms untrained", "best-resnet18-sgd", ["weight_decay=1e-3", "train_norms=false"]),
    ("search", "best-resnet18", SEARCH),
    ("search", "best-resnet18", [*SEARCH, "seed=1"]),
)


def divided(folder: Path, recipe: Recipe, device: torch.device, training: int = 20_000) -> Dataset[Split]:
    """The training images in two parts; the second also takes the place of the test images."""
    located = locate(folder)
    if located is None:
        raise SystemExit(f"cifar10 is not in {folder}; get it with 'iterand data fetch cifar10 --data-dir {folder}'")
    records = np.concatenate([rows for name, rows in read(located).items() if name != "test_batch"])
    order = fixed_order(len(records)).numpy()
    held_out = len(records) // 10  # the validation images of all runs are among those here

    def part(chosen: Any) -> ImageSplit:
        rows = torch.from_numpy(records[chosen]).to(device)
        images, labels = rows[:, 1:].reshape(-1, 3, 32, 32).contiguous(), rows[:, 0].long()
        return ImageSplit(images, labels, Normalizer(recipe.data.normalization, device), recipe.data.augmentation)

    held = part(np.concatenate([order[:held_out], order[held_out + training :]]))
    return Dataset(part(order[held_out : held_out + training]), held, held, CLASSES)


def measure(recipe: Recipe, data: Dataset[Split], device: torch.device) -> dict[str, Any]:
    """Train by a recipe; the metrics of its last epoch."""
    with TemporaryDirectory() as place, compute_settings(recipe.training.threads), stop_request() as stop:
        folder = RunFolder(Path(place) / "run")
        with folder.opened(recipe):
            session = build_session(recipe, data, device)
            step = choose_step(session, data, Execution())
            folder.start(recipe, {})
            folder.start_log([])
            train(session, step, data, folder, NullObserver(), stop)
    return session.metrics[-1]


def main(data_dir: str, file: str, device_name: str = "auto") -> None:
    """Do the runs that the file does not have."""
    device, path = choose_device(device_name), Path(file)
    described = describe(device) | {"command": f"python tools/probe_untrained_norms.py data {path.name}"}
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"environment": described, "runs": []}
    known = {(run["label"], run["command"]) for run in found["runs"]}
    for label, name, settings in RUNS:
        command = f"{name} {' '.join(settings)}"
        if (label, command) in known:
            continue
        recipe = find_recipe(name, [*settings, "epochs=80"])
        data = divided(Path(data_dir), recipe, device)
        run = {"label": label, "command": command, "seed": recipe.seed} | measure(recipe, data, device)
        found["runs"].append(run)
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        print(label, command, f"{run['validation_accuracy']:.2f} %")


if __name__ == "__main__":
    main(*sys.argv[1:])
