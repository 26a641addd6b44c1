"""The same loop on digits in plain torch, compiled, and by make_step: which networks they find.

python tools/loops_on_digits.py OUT [--device cuda] [--seeds 5]

The records are results/records/benchmarks/loops-on-digits-*.json.
"""

import argparse
import hashlib
import json
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import iterand
from iterand.lab.training import environment

EPOCHS, BATCH, TEST = 30, 64, 360
LOOPS = ("eager", "compiled", "make_step")


def network(seed: int) -> nn.Module:
    """A small convolutional network."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10),
    )  # fmt: skip


def train(loop: str, seed: int, images: Tensor, labels: Tensor) -> tuple[float, str]:
    """Test accuracy in percent, and the digest of the network."""
    model = iterand.prune_(network(seed), 0.5, seed=seed).to(images.device)
    optimizer = torch.optim.SGD(iterand.scores(model), 0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    randomization = iterand.IterativeRandomization(model, period=50, rate=0.1)
    forward: Any = torch.compile(model) if loop == "compiled" else model
    step = iterand.make_step(model, optimizer, F.cross_entropy, steppers=[randomization])
    order = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        model.train()
        for batch in torch.randperm(len(images) - TEST, generator=order).to(images.device).split(BATCH):
            if loop == "make_step":
                step(images[batch], labels[batch])
                continue
            optimizer.zero_grad()
            F.cross_entropy(forward(images[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            randomization.step()
        schedule.step()
    iterand.fold_(model.eval())
    with torch.no_grad():
        correct = (model(images[-TEST:]).argmax(1) == labels[-TEST:]).float().mean().item()
    return 100 * correct, digest(model)


def digest(model: nn.Module) -> str:
    """SHA-256 of the weights."""
    weights = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(weights).hexdigest()[:16]


def main() -> None:
    """Train and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    torch.use_deterministic_algorithms(args.device == "cpu")
    digits = load_digits()
    images = (torch.tensor(digits.images, dtype=torch.float32) / 16).unsqueeze(1).to(args.device)
    labels = torch.tensor(digits.target).to(args.device)
    found: dict[str, Any] = {}
    for loop in LOOPS:
        runs = [train(loop, seed, images, labels) for seed in range(args.seeds)]
        accuracies = [accuracy for accuracy, _ in runs]
        found[loop] = {
            "test_accuracy": accuracies,
            "mean": statistics.mean(accuracies),
            "std": statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0,
            "weights_sha256": [weights for _, weights in runs],
        }
        print(f"{loop:10} {found[loop]['mean']:.2f} ± {found[loop]['std']:.2f} %  n = {args.seeds}")
    described = environment.describe(torch.device(args.device))
    described["command"] = (
        f"python tools/loops_on_digits.py {args.out.name} --device {args.device} --seeds {args.seeds}"
    )
    args.out.write_text(json.dumps({"environment": described, "loops": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
