"""Trees of class folders: the images in them, their classes and labels."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from iterand.errors import DataError
from iterand.lab.data.reading import Content, unreadable

_ENDINGS = (".jpeg", ".jpg", ".png")


class Images(Protocol):
    """Images with their labels, sorted by class and name."""

    @property
    def root(self) -> Path:
        """The folder or file that contains them."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of the class of each label."""
        ...

    @property
    def files(self) -> tuple[str, ...]:
        """The name of each image."""
        ...

    @property
    def labels(self) -> Tensor:
        """The label of each image: the index of its class."""
        ...

    def path(self, index: int) -> Path:
        """The path of an image, to name it in messages."""
        ...

    def contents(self, index: Tensor) -> Sequence[Content]:
        """What to read for some of the images."""
        ...


@dataclass(frozen=True)
class ClassFolders:
    """The images of ``root``/CLASS/, sorted by class and name; a label is the index of its class."""

    root: Path
    classes: tuple[str, ...]
    files: tuple[str, ...]
    labels: Tensor

    def path(self, index: int) -> Path:
        """The path of an image."""
        return self.root / self.classes[int(self.labels[index])] / self.files[index]

    def contents(self, index: Tensor) -> list[str]:
        """The paths of some images."""
        return [f"{self.root}/{name}" for name in self._names(index)]

    def digest(self) -> str:
        """A digest of all names and sizes, to tell whether two trees hold the same files."""
        found = hashlib.sha256()
        try:
            for name in self._names(torch.arange(len(self.files))):
                size = os.stat(f"{self.root}/{name}").st_size  # noqa: PTH116 - a million paths stay strings
                found.update(os.fsencode(f"{name}\0{size}\n"))
        except OSError as error:
            raise unreadable(self.root, error) from None
        return found.hexdigest()

    def _names(self, index: Tensor) -> list[str]:
        labels = self.labels[index].tolist()
        return [f"{self.classes[label]}/{self.files[number]}" for label, number in zip(labels, index.tolist())]


def scan(root: Path) -> ClassFolders:
    """Find all images of a tree; a class without images is an error."""
    try:
        classes = tuple(sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and entry.name[0] != "."))
        files = [_images(root / name) for name in classes]
    except OSError as error:
        raise unreadable(root, error) from None
    if not classes:
        raise DataError(f"{root} has no class folders; sort its images into one folder for each class")
    labels = torch.repeat_interleave(torch.tensor([len(names) for names in files]))
    return ClassFolders(root, classes, tuple(name for names in files for name in names), labels)


def same_classes(train: Images, test: Images) -> None:
    """Refuse two trees whose class folders differ, since their labels would have different meanings."""
    for one, other in ((train, test), (test, train)):
        absent = sorted(set(one.classes) - set(other.classes))
        if absent:
            raise DataError(f"{other.root} has no class folder {absent[0]}, but {one.root} has; they must be the same")


def _images(folder: Path) -> list[str]:
    names = sorted(entry.name for entry in os.scandir(folder) if entry.name.lower().endswith(_ENDINGS))
    names = [name for name in names if name[0] != "."]
    if not names:
        raise DataError(f"{folder} has no images ({', '.join(_ENDINGS)}); put some there or remove the folder")
    return names
