"""The data sets by name, and what can be done with each."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from iterand.checks import unknown
from iterand.errors import DataError
from iterand.lab.data import cifar10, digits, imagenet, imdb
from iterand.lab.data.dataset import AUGMENTATIONS, NORMALIZATIONS, Dataset, Located, Options, Split, data_folder
from iterand.lab.data.download import ARCHIVES, Progress, by_hand, download, missing
from iterand.lab.data.packs import Scaling


@dataclass(frozen=True)
class Entry:
    """One data set: how to find it, load it, check it and pack it, and which options it knows."""

    title: str
    locate: Callable[[Path], Located | None]
    load: Callable[[Located, torch.device, Options], Dataset[Split]]
    check: Callable[[Located, Callable[[int, int], None]], str]
    augmentations: tuple[str, ...] = ("none",)
    normalizations: tuple[str, ...] = ("default",)
    pack: Callable[[Located, Scaling | None, Callable[[int, int], None]], dict[str, Path]] | None = None


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


@dataclass(frozen=True)
class Status:
    """What is there of a data set, or how to get it."""

    name: str
    title: str
    located: Located | None
    advice: str


def find(name: str) -> Entry:
    """The entry of this name."""
    if name not in DATASETS:
        raise ValueError(unknown("data set", name, DATASETS))
    return DATASETS[name]


def load_data(
    name: str,
    device: torch.device,
    data_dir: Path | None = None,
    *,
    augmentation: str = "none",
    normalization: str = "default",
    limit: int | None = None,
    workers: int | None = None,
) -> Dataset[Split]:
    """The data set of this name, for this device; ``limit`` is how many examples of each part to use at most.

    ``workers`` processes decode images, or with 0 threads of this one; by default as many as $ITERAND_WORKERS says,
    else as there are processors, once there is enough to do.
    """
    entry = find(name)
    options = Options(augmentation, normalization, limit, workers)
    options.fit(name, entry.augmentations, entry.normalizations)
    return entry.load(_located(name, data_folder(data_dir)), device, options)


def status(name: str, root: Path) -> Status:
    """What is there of a data set."""
    entry, located, advice = find(name), find(name).locate(root), ""
    if located is None:
        advice = f"iterand data fetch {name}" if name in ARCHIVES else by_hand(name, root)
    return Status(name, entry.title, located, advice)


def fetch(name: str, root: Path, progress: Progress) -> Path:
    """Bring a data set from where it is published; where it lies is the answer, also if it was there before."""
    found, archive = find(name).locate(root), ARCHIVES.get(name)
    if archive is None:
        raise DataError(f"{name} cannot be fetched; {by_hand(name, root)}")
    if found is not None and found.path.name != archive.name:
        return found.path
    return download(archive, found.path.parent if found else root, progress)


def check(name: str, root: Path, progress: Callable[[int, int], None]) -> str:
    """Verify what is there of a data set, down to its last byte; what was found is the answer."""
    return find(name).check(_located(name, root), progress)


def pack(name: str, root: Path, scaling: Scaling | None, progress: Callable[[int, int], None]) -> dict[str, Path]:
    """Write a data set of many files into few; the answer is where each part lies, also if it was there before."""
    entry = find(name)
    if entry.pack is None:
        packable = ", ".join(other for other, its in DATASETS.items() if its.pack)
        raise ValueError(f"{name} cannot be packed, since it is loaded as a whole; what can be is {packable}")
    return entry.pack(_located(name, root), scaling, progress)


def _located(name: str, root: Path) -> Located:
    located = find(name).locate(root)
    if located is None:
        raise missing(name, root)
    return located
