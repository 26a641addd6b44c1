"""Your own network in your own loop: searched with the paper's and the recommended settings, and trained beside them.

pip install scikit-learn
python examples/own_model.py                  # scikit-learn's digits, a few minutes on a laptop
python examples/own_model.py --sparsity 0.5 --json own-model.json
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import iterand

BATCH = 64


def network() -> nn.Sequential:
    """Any module works; this one has 14,000 weights, and batch norms."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(32, 10)),
    )


class Digits:
    """1,437 training images of 8×8 pixels, shuffled every epoch, and 360 test images."""

    def __init__(self) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        self.images, self.labels = images[order[:1437]], labels[order[:1437]]
        self.test_images, self.test_labels = images[order[1437:]], labels[order[1437:]]

    def __len__(self) -> int:
        return len(self.images) // BATCH

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.randperm(len(self.images)).split(BATCH)[: len(self)]:
            yield self.images[rows], self.labels[rows]

    def accuracy(self, model: nn.Module) -> float:
        """In percent, of the test images."""
        with torch.no_grad():
            right = model.eval()(self.test_images).argmax(1) == self.test_labels
        return 100 * float(right.float().mean())


def trained(data: Digits, sparsity: float, seed: int, epochs: int) -> nn.Module:
    """Its weights trained by SGD, none pruned."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    return loop(model, data, optimizer, epochs)


def as_the_paper_does(data: Digits, sparsity: float, seed: int, epochs: int) -> nn.Module:
    """IteRand with the settings of the paper: ranked in each layer, r = 0.1; no weight is trained."""
    model = iterand.prune_(network(), sparsity, weights="signed_constant", seed=seed)
    optimizer = torch.optim.SGD(iterand.scores(model), lr=0.1, momentum=0.9, weight_decay=5e-4)
    return loop(model, data, optimizer, epochs, iterand.IterativeRandomization(model, period=50, rate=0.1))


def as_we_do(data: Digits, sparsity: float, seed: int, epochs: int) -> nn.Module:
    """IteRand with the recommended settings (docs/guides/recommended.md); no weight is trained here either."""
    model = iterand.prune_(network(), sparsity, preset="recommended", seed=seed)
    optimizer = torch.optim.SGD(iterand.scores(model), lr=0.5, momentum=0.9, weight_decay=0.05 / len(data))
    loop(
        model,
        data,
        optimizer,
        epochs,
        iterand.IterativeRandomization(model, period=50, rate=1.0, candidates="negative", redrawn_scores="follow"),
        iterand.SparsitySchedule(model, "cubic", steps=epochs * len(data) // 2),
    )
    update_bn(data, model)
    return model


def loop(
    model: nn.Module,
    data: Digits,
    optimizer: torch.optim.Optimizer,
    epochs: int,
    *steppers: iterand.IterativeRandomization | iterand.SparsitySchedule,
) -> nn.Module:
    """An ordinary loop; steppers step after the optimizer."""
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for images, labels in data:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            for stepper in steppers:
                stepper.step()
        rate.step()
    return model


WAYS: dict[str, Callable[[Digits, float, int, int], nn.Module]] = {
    "SGD on the weights": trained,
    "IteRand, as in the paper": as_the_paper_does,
    "IteRand, as we recommend": as_we_do,
}


def main() -> None:
    """Parse and check the options, then compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--json", type=Path, help="file to write accuracies and sizes to")
    options = parser.parse_args()
    if min(options.seeds, options.epochs) < 1:
        parser.error(f"--seeds is {options.seeds} and --epochs {options.epochs}; both must be at least 1")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json is {options.json}, in a folder that is not there")
    try:
        iterand.prune_(network(), options.sparsity)
    except ValueError as error:
        parser.error(str(error))
    compare(options)


def compare(options: argparse.Namespace) -> None:
    """Run each way with every seed, and print a line for each."""
    data, found = Digits(), {}
    print(f"digits, p = {options.sparsity:g}, epochs: {options.epochs}, seeds: {options.seeds}")
    for name, way in WAYS.items():
        accuracies, sizes = [], []
        for seed in range(options.seeds):
            torch.manual_seed(seed)
            model = way(data, options.sparsity, seed, options.epochs)
            accuracies.append(data.accuracy(model))
            sizes.append(size(model))
        found[name] = {"test_accuracies": accuracies, "bytes": sizes}
        spread = f" ± {statistics.stdev(accuracies):.2f}" if len(accuracies) > 1 else ""
        print(f"{name:26}{statistics.mean(accuracies):6.2f}{spread} %   {statistics.mean(sizes) / 1000:5.1f} kB")
    if options.json:
        record = {"command": " ".join(["python", *sys.argv]), "torch": torch.__version__, "ways": found}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def size(model: nn.Module) -> int:
    """Bytes of the ticket; of a trained network those of its state dict in float32."""
    if not iterand.masked_layers(model):
        return sum(tensor.numel() * 4 for tensor in model.state_dict().values())
    with tempfile.TemporaryDirectory() as folder:
        iterand.save_ticket(model, Path(folder) / "a.ticket")
        return (Path(folder) / "a.ticket").stat().st_size


if __name__ == "__main__":
    main()
