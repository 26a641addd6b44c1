"""Data sets by name."""

from iterand.lab.data.catalog import DATASETS, load_data
from iterand.lab.data.dataset import AUGMENTATIONS, NORMALIZATIONS, Batch, Dataset, Random, Split

__all__ = ["AUGMENTATIONS", "DATASETS", "NORMALIZATIONS", "Batch", "Dataset", "Random", "Split", "load_data"]
