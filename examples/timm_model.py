"""A timm model searched on scikit-learn's digits, with the recommended settings.

pip install timm scikit-learn
python examples/timm_model.py                    # timm's smallest ResNet, a few minutes on a laptop
python examples/timm_model.py --model resnet18 --sparsity 0.95 --ticket resnet18.ticket
"""

import argparse
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, TensorDataset

import iterand


def digits() -> tuple[TensorDataset, Tensor, Tensor]:
    """1,437 images for training, and 360 with their labels for testing; 32×32 pixels."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 8 - 1
    images, labels = F.interpolate(images, size=32), torch.tensor(found.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), images[test], labels[test]


def search(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], sparsity: float, epochs: int) -> None:
    """Prune the model and train its scores."""
    iterand.prune_(model, sparsity, preset="recommended")
    steppers = iterand.recommended_steppers(model, steps=epochs * len(loader))
    optimizer = torch.optim.SGD(iterand.scores(model), lr=0.5, momentum=0.9, weight_decay=0.05 / len(loader))
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            for stepper in steppers:
                stepper.step()
        rate.step()
    update_bn(loader, model)


def main() -> None:
    """Search, test, and save the ticket."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="test_resnet", help="a name that timm.create_model knows")
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--ticket", type=Path, default=Path("timm.ticket"), help="file to write")
    options = parser.parse_args()

    torch.manual_seed(0)
    train, images, labels = digits()
    loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)
    model = timm.create_model(options.model, in_chans=1, num_classes=10)
    search(model, loader, options.sparsity, options.epochs)
    print(iterand.summary(model))
    iterand.save_ticket(model, options.ticket)
    plain = iterand.load_ticket(options.ticket, timm.create_model(options.model, in_chans=1, num_classes=10))
    with torch.no_grad():
        accuracy = 100 * float((plain.eval()(images).argmax(1) == labels).float().mean())
    print(f"{accuracy:.1f} % of the test images, {options.ticket.stat().st_size / 1000:.1f} kB in {options.ticket}")


if __name__ == "__main__":
    main()
