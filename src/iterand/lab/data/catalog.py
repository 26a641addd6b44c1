"""The data sets by name: loading, downloading, checking and packing each."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from iterand.checks import unknown
from iterand.errors import DataError
from iterand.lab.data import cifar10, digits, image_folder, imagenet, imdb
from iterand.lab.data.dataset import (
    AUGMENTATIONS,
    NORMALIZATIONS,
    Dataset,
    Located,
    Options,
    Progress,
    Split,
    data_folder,
)
from iterand.lab.data.download import ARCHIVES, ByteProgress, download, fetch_command, instructions, missing
from iterand.lab.data.packs import Scaling


@dataclass(frozen=True)
class Entry:
    """One data set: the functions that find, load, check and pack it, and the options it has."""

    title: str
    locate: Callable[[Path], Located | None]
    load: Callable[[Located, torch.device, Options], Dataset[Split]]
    check: Callable[[Located, Progress], str]
    augmentations: tuple[str, ...] = ("none",)
    normalizations: tuple[str, ...] = ("default",)
    pack: Callable[[Located, Scaling | None, Progress], dict[str, Path]] | None = None


DATASETS = {
    "digits": Entry("scikit-learn's digits, 1,797 images of 8×8", digits.locate, digits.load, digits.check),
    "cifar10": Entry(
        "CIFAR-10, 60,000 images of 32×32",
        cifar10.locate,
        cifar10.load,
        cifar10.check,
        AUGMENTATIONS,
        NORMALIZATIONS,
    ),
    "imagenet": Entry(
        "ImageNet, or any tree of class folders",
        imagenet.locate,
        imagenet.load,
        imagenet.check,
        ("none", "resized_crop"),
        NORMALIZATIONS,
        imagenet.pack,
    ),
    "imdb": Entry("IMDB, 50,000 film reviews", imdb.locate, imdb.load, imdb.check),
}
"""The data sets that are published."""

IMAGE_FOLDER = "image_folder"
_ENTRIES = DATASETS | {
    IMAGE_FOLDER: Entry(
        "your own images in class folders",
        image_folder.locate,
        image_folder.load,
        image_folder.check,
        AUGMENTATIONS,
        NORMALIZATIONS,
    )
}


def load_data(
    name: str,
    device: torch.device,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    augmentation: str = "none",
    normalization: str = "default",
    limit: int | None = None,
    workers: int | None = None,
    image_size: int = 64,
    train_limit: int | None = None,
) -> Dataset[Split]:
    """Load the data set of this name for this device.

    There are at most ``limit`` examples in each split, and at most ``train_limit`` to train on.

    ``workers`` is the number of processes that decode images, or 0 for threads. The default is $ITERAND_WORKERS, else
    the number of processors if there are enough images. For ``image_folder``, ``data_dir`` is the folder of the images,
    and ``image_size`` the side to which they are resized.
    """
    entry = find(name)
    options = Options(augmentation, normalization, limit, workers, image_size, train_limit)
    options.check(name, entry.augmentations, entry.normalizations)
    return entry.load(located(name, data_folder(data_dir)), device, options)


def find(name: str) -> Entry:
    """The entry of this name."""
    if name not in _ENTRIES:
        raise ValueError(unknown("data set", name, _ENTRIES))
    return _ENTRIES[name]


@dataclass(frozen=True)
class Status:
    """Whether a data set was found, and how to get it if not."""

    name: str
    title: str
    located: Located | None
    advice: str


def status(name: str, root: Path) -> Status:
    """Look for a data set. For ``image_folder``, ``root`` is the folder of the images."""
    entry = find(name)
    located, advice = entry.locate(root), ""
    if located is None:
        advice = fetch_command(name, root) if name in ARCHIVES else instructions(name, root)
    elif name == IMAGE_FOLDER:
        try:
            image_folder.open_folder(root)
        except DataError as error:
            located, advice = None, str(error)
    return Status(name, entry.title, located, advice)


def fetch(name: str, root: Path, progress: ByteProgress) -> Path:
    """Download a data set unless it is there already; returns its path."""
    found, archive = find(name).locate(root), ARCHIVES.get(name)
    if archive is None:
        raise DataError(f"{name} cannot be fetched; {instructions(name, root)}")
    if found is not None and found.path.name != archive.name:
        return found.path
    return download(archive, found.path.parent if found else root, progress)


def check(name: str, root: Path, progress: Progress) -> str:
    """Verify every byte of a data set; returns a summary of what was found."""
    return find(name).check(located(name, root), progress)


def pack(name: str, root: Path, scaling: Scaling | None, progress: Progress) -> dict[str, Path]:
    """Write each part of a data set into one file unless it is there already; returns their paths."""
    entry = find(name)
    if entry.pack is None:
        packable = ", ".join(other for other, its in DATASETS.items() if its.pack)
        raise ValueError(f"{name} cannot be packed, since it is loaded as a whole; what can be is {packable}")
    return entry.pack(located(name, root), scaling, progress)


def located(name: str, root: Path) -> Located:
    """Where a data set is; an error if it is not there, with how to get it."""
    found = find(name).locate(root)
    if found is None:
        raise missing(name, root)
    return found
