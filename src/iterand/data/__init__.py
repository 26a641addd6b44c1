"""Data sets by name."""

from pathlib import Path

from iterand.data.dataset import Dataset, Split
from iterand.data.digits import load_digits

__all__ = ["DATASETS", "Dataset", "Split", "load_data"]

DATASETS = {"digits": load_digits}


def load_data(name: str, data_dir: Path | None = None) -> Dataset:
    """The data set of this name, on the CPU."""
    if name not in DATASETS:
        raise ValueError(f"unknown data set {name!r}; there are {', '.join(sorted(DATASETS))}")
    return DATASETS[name](data_dir)
