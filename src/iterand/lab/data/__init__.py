"""Data sets by name."""

from iterand.lab.data.catalog import DATASETS, IMAGE_FOLDER, load_data
from iterand.lab.data.dataset import (
    AUGMENTATIONS,
    LARGEST_IMAGE,
    NORMALIZATIONS,
    SMALLEST_IMAGE,
    Batch,
    Dataset,
    Random,
    Split,
)

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "IMAGE_FOLDER",
    "LARGEST_IMAGE",
    "NORMALIZATIONS",
    "SMALLEST_IMAGE",
    "Batch",
    "Dataset",
    "Random",
    "Split",
    "load_data",
]
