"""The digits of scikit-learn: 1,797 images of 8×8, which are part of its installation."""

import importlib.util
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from iterand.errors import extra
from iterand.lab.data.dataset import Dataset, Located, Options, Progress, TensorSplit, fixed_order, limited

_VALIDATION = 200
_TEST = 400


def locate(root: Path) -> Located | None:
    """The folder of scikit-learn, if it is installed."""
    found = importlib.util.find_spec("sklearn")
    return Located(root, Path(found.origin).parent, "scikit-learn") if found and found.origin else None


def load(located: Located, device: torch.device, options: Options) -> Dataset[TensorSplit]:
    """The digits, normalized to mean 0 and deviation 1 over the training split; the split is the same in all runs."""
    rows = torch.from_numpy(_read(located.path))
    images, labels = rows[:, :-1].float().view(-1, 1, 8, 8), rows[:, -1].long()
    sizes = [_VALIDATION, _TEST, len(labels) - _VALIDATION - _TEST]
    validation, test, train = torch.split(fixed_order(len(labels)), sizes)
    images = (images - images[train].mean()) / images[train].std()

    def part(order: torch.Tensor) -> TensorSplit:
        chosen = limited(order, options.limit)
        return TensorSplit(images[chosen].to(device), labels[chosen].to(device))

    return Dataset(part(limited(train, options.train_limit)), part(validation), part(test), classes=10)


def _read(folder: Path) -> NDArray[np.float64]:
    """One row per image: its pixels, then its label."""
    file = folder / "datasets" / "data" / "digits.csv.gz"
    if file.is_file():  # importing scikit-learn takes nearly as long as importing torch
        return np.loadtxt(file, delimiter=",")
    with extra("lab", "the digits data set"):
        from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return np.column_stack((images, labels))


def check(located: Located, progress: Progress) -> str:
    """Load the digits and count them."""
    data = load(located, torch.device("cpu"), Options())
    return f"{sum(map(len, (data.train, data.validation, data.test))):,} images"
