"""Images sorted into class folders: which files there are, and what they show."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from iterand.data.archives import unreadable
from iterand.errors import DataError

_ENDINGS = (".jpeg", ".jpg", ".png")


@dataclass(frozen=True)
class ClassFolders:
    """The images of ``root``/CLASS/, sorted by class and name; ``labels`` counts the classes in the same order."""

    root: Path
    classes: tuple[str, ...]
    files: tuple[str, ...]
    labels: Tensor

    def path(self, index: int) -> Path:
        """Where an image lies."""
        return self.root / self.classes[int(self.labels[index])] / self.files[index]


def scan(root: Path) -> ClassFolders:
    """Find all images; a class without any is an error."""
    try:
        classes = tuple(sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and entry.name[0] != "."))
        files = [_images(root / name) for name in classes]
    except OSError as error:
        raise unreadable(root, error) from None
    if not classes:
        raise DataError(f"{root} has no class folders; sort its images into one folder for each class")
    labels = torch.repeat_interleave(torch.tensor([len(names) for names in files]))
    return ClassFolders(root, classes, tuple(name for names in files for name in names), labels)


def same_classes(train: ClassFolders, test: ClassFolders) -> None:
    """Refuse two trees whose class folders differ, since their labels would not mean the same."""
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
