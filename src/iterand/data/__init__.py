"""Data sets by name."""

from iterand.data.catalog import DATASETS, load_data
from iterand.data.dataset import Batch, Dataset, Random, Split
from iterand.data.options import AUGMENTATIONS, NORMALIZATIONS

__all__ = ["AUGMENTATIONS", "DATASETS", "NORMALIZATIONS", "Batch", "Dataset", "Random", "Split", "load_data"]
