"""Scikit-learn's digits: 1,797 images of 8×8, which come with the installation."""

from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits as sklearn_digits

from iterand.data.dataset import Dataset, Split

_VALIDATION = 200
_TEST = 400


def load_digits(data_dir: Path | None = None) -> Dataset:
    """The digits, normalised to mean 0 and deviation 1 over the training part; one fixed split for all runs."""
    digits = sklearn_digits()
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(digits.target))
    images = torch.from_numpy(digits.images[order]).float().unsqueeze(1)
    labels = torch.from_numpy(digits.target[order]).long()
    sizes = [_VALIDATION, _TEST, len(labels) - _VALIDATION - _TEST]
    train_images = torch.split(images, sizes)[2]
    images = (images - train_images.mean()) / train_images.std()
    validation, test, train = (Split(*part) for part in zip(torch.split(images, sizes), torch.split(labels, sizes)))
    return Dataset(train, validation, test, classes=10)
