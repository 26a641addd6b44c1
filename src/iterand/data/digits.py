"""Scikit-learn's digits: 1,797 images of 8×8, which come with the installation."""

from pathlib import Path

import numpy as np
import torch

from iterand.data.dataset import Dataset, TensorSplit

_VALIDATION = 200
_TEST = 400


def load_digits(data_dir: Path | None, device: torch.device) -> Dataset[TensorSplit]:
    """The digits, normalised to mean 0 and deviation 1 over the training part; one fixed split for all runs."""
    from sklearn.datasets import load_digits  # takes as long to import as torch

    digits = load_digits()
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(digits.target))
    images = torch.from_numpy(digits.images[order]).float().unsqueeze(1)
    labels = torch.from_numpy(digits.target[order]).long()
    sizes = [_VALIDATION, _TEST, len(labels) - _VALIDATION - _TEST]
    train_images = torch.split(images, sizes)[2]
    images = ((images - train_images.mean()) / train_images.std()).to(device)
    parts = zip(torch.split(images, sizes), torch.split(labels.to(device), sizes))
    validation, test, train = (TensorSplit(*part) for part in parts)
    return Dataset(train, validation, test, classes=10)
