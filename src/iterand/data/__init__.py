"""Data sets by name."""

from pathlib import Path

import torch

from iterand.data.dataset import Batch, Dataset, Random, Split
from iterand.data.digits import load_digits

__all__ = ["DATASETS", "Batch", "Dataset", "Random", "Split", "load_data"]

DATASETS = {"digits": load_digits}


def load_data(name: str, device: torch.device, data_dir: Path | None = None) -> Dataset[Split]:
    """The data set of this name, for this device."""
    if name not in DATASETS:
        raise ValueError(f"unknown data set {name!r}; there are {', '.join(sorted(DATASETS))}")
    return DATASETS[name](data_dir, device)
