"""Your own images in class folders: any size and format, resized to a square and held in memory."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from iterand import memory
from iterand.checks import counted
from iterand.errors import DataError
from iterand.lab.data.dataset import Dataset, Located, Normalizer, Options, Progress, fixed_order, limited
from iterand.lab.data.decoding import Pixels, decode_square
from iterand.lab.data.images import ImageSplit
from iterand.lab.data.reading import ClassFolders, read, same_classes, unreadable
from iterand.lab.data.workers import prefetched, processors

_VALIDATION = ("val", "valid", "validation")
_TEST = "test"
_LAYOUT = "images are in train/CLASS/ and val/CLASS/ (or test/CLASS/) of data.path, or in CLASS/ for a split by iterand"
_HELD_OUT = 10  # one of so many images of a class is held out
_CHECKED_SIZE = 32
_TOGETHER = 64  # images that are decoded before they are copied
_AHEAD = 2  # such groups that are decoded in advance
_NO_IMAGES = ("desktop.ini", "thumbs.db")  # Windows puts them there
_ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")  # of images beside the class folders
_NAMED = 3  # files that a message names


@dataclass(frozen=True)
class Part:
    """Some of the images of a tree."""

    tree: ClassFolders
    chosen: Tensor


def locate(root: Path) -> Located | None:
    """The folder itself; what is wrong with it is said when it is loaded."""
    return Located(root, root, "class folders")


def load(located: Located, device: torch.device, options: Options) -> Dataset[ImageSplit]:
    """Decode all images, each once; what is held out of the training images is the same in all runs."""
    parts = open_folder(located.path)
    limits = (options.train_limit, None, None)
    chosen = [
        Part(part.tree, limited(limited(part.chosen, limit), options.limit)) for part, limit in zip(parts, limits)
    ]
    size, count = options.image_size, sum(len(part.chosen) for part in chosen)
    hint = "lower image_size or limit; data.name = 'imagenet' reads images of 224×224 as they are used"
    memory.require(3 * size * size * count, f"{count:,} images of {size}×{size}", hint, device)
    normalize = Normalizer(options.normalization, device)
    pixels = torch.split(_decoded(chosen, size), [len(part.chosen) for part in chosen])
    train, validation, test = (
        ImageSplit(images.to(device), part.tree.labels[part.chosen].to(device), normalize, options.augmentation)
        for part, images in zip(chosen, pixels)
    )
    return Dataset(train, validation, test, classes=len(parts[0].tree.classes))


def check(located: Located, progress: Progress) -> str:
    """Decode every image; returns how many there are."""
    parts = open_folder(located.path)
    total, done = sum(len(part.chosen) for part in parts), 0
    for group in _decode_groups(parts, _CHECKED_SIZE):
        done += len(group)
        progress(done, total)
    return f"{total:,} images of {len(parts[0].tree.classes):,} classes, all can be decoded"


def fingerprint(root: Path) -> str:
    """SHA-256 of the names and sizes of all images, to tell whether a folder has changed."""
    trees = {part.tree.root: part.tree for part in open_folder(root)}
    lines = (f"{path.relative_to(root).as_posix()} {tree.digest()}\n" for path, tree in trees.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def open_folder(root: Path) -> tuple[Part, Part, Part]:
    """The training, validation and test images.

    With ``val`` and ``test`` beside ``train``, these are the splits. With one of them, it is the test split, and a
    tenth of each class of ``train`` is the validation split. Without ``train``, two tenths of each class are held out.
    """
    if not root.is_dir():
        problem = "is a file" if root.exists() else "does not exist"
        raise DataError(f"the folder {root} {problem}; {_LAYOUT}")
    if not _folders(root / "train"):  # a class may be called train
        tree = _scan(root)
        test, validation, train = _split(tree, 2)
        return Part(tree, train), Part(tree, validation), Part(tree, test)
    others = [name for name in _VALIDATION if (root / name).is_dir()][:1]
    others += [_TEST] * (root / _TEST).is_dir()
    if not others:
        raise DataError(
            f"{root} has train but neither val nor test beside it; {_LAYOUT}, so add one, or set data.path to "
            f"{root / 'train'}"
        )
    tree, *rest = (_scan(root / name) for name in ("train", *others))
    for other in rest:
        same_classes(tree, other)
    if len(rest) > 1:
        return _whole(tree), _whole(rest[0]), _whole(rest[-1])
    validation, train = _split(tree, 1)
    return Part(tree, train), Part(tree, validation), _whole(rest[0])


def _whole(tree: ClassFolders) -> Part:
    return Part(tree, torch.arange(len(tree.files)))


def _scan(root: Path) -> ClassFolders:
    """All images of a tree; every visible file in a class folder counts as one."""
    classes = _folders(root)
    if not classes:
        raise DataError(f"{root} has no class folders; {_LAYOUT}")
    if len(classes) == 1:
        raise DataError(f"{root} has one class folder only, {classes[0]}; a classifier needs at least two classes")
    stray = sorted(entry.name for entry in os.scandir(root) if _is_image(entry))
    if stray:
        raise DataError(f"{root} has an image {stray[0]} outside its class folders, which would be left out; {_LAYOUT}")
    files = [_files(root / name) for name in classes]
    labels = torch.repeat_interleave(torch.tensor([len(names) for names in files]))
    return ClassFolders(root, tuple(classes), tuple(name for names in files for name in names), labels)


def _folders(root: Path) -> list[str]:
    """The names of the folders in a folder; none if there is no such folder."""
    try:
        return sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and entry.name[0] != ".")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(root, error) from None


def _is_image(entry: os.DirEntry[str]) -> bool:
    """Whether the name is of an image; a list of classes or a license may lie beside the class folders."""
    return entry.name[0] != "." and entry.name.lower().endswith(_ENDINGS) and not entry.is_dir()


def _files(folder: Path) -> list[str]:
    try:
        entries = [entry for entry in os.scandir(folder) if entry.name[0] != "."]
    except OSError as error:
        raise unreadable(folder, error) from None
    inner = sorted(entry.name for entry in entries if entry.is_dir())
    if inner:
        raise DataError(f"{folder} has a folder {inner[0]} inside, which would be left out; {_LAYOUT}")
    special = sorted(entry.name for entry in entries if not entry.is_file())
    if special:  # reading a pipe would wait forever
        raise DataError(f"{folder} has {special[0]}, which is no file but a pipe, a device or a broken link; remove it")
    names = sorted(entry.name for entry in entries if entry.name.lower() not in _NO_IMAGES)
    if not names:
        raise DataError(f"{folder} has no images; put some there or remove the folder")
    return names


def _split(tree: ClassFolders, parts: int) -> list[Tensor]:
    """A tenth of the images of each class, at least one, for each of these parts; the last entry is the rest."""
    chosen: list[list[Tensor]] = [[] for _ in range(parts + 1)]
    for label, name in enumerate(tree.classes):
        images = (tree.labels == label).nonzero().squeeze(1)
        if len(images) <= parts:
            raise DataError(
                f"{tree.root / name} has {counted(len(images), 'image')}; a class needs at least "
                f"{parts + 1}, so that {'one of them validates' if parts == 1 else 'two of them validate and test'}"
            )
        held_out = [max(1, len(images) // _HELD_OUT)] * parts
        shuffled = images[fixed_order(len(images))]
        for part, index in zip(chosen, torch.split(shuffled, [*held_out, len(images) - sum(held_out)])):
            part.append(index)
    return [torch.cat(part) for part in chosen]


def _decoded(parts: Sequence[Part], size: int) -> Tensor:
    """The images of all parts as bytes, [images, 3, size, size]."""
    pixels, done = np.empty((sum(len(part.chosen) for part in parts), 3, size, size), np.uint8), 0
    for group in _decode_groups(parts, size):
        pixels[done : done + len(group)] = np.stack(group).transpose(0, 3, 1, 2)
        done += len(group)
    return torch.from_numpy(pixels)


def _decode_groups(parts: Sequence[Part], size: int) -> Iterator[list[Pixels]]:
    """The images in groups, decoded by threads; all that cannot be decoded are named in one error at the end."""

    def decode(path: str) -> Pixels | str:
        try:
            return decode_square(read(path), size)
        except ValueError as problem:
            return f"{path}: {problem}"

    groups = (part.tree.contents(index) for part in parts for index in torch.split(part.chosen, _TOGETHER))
    bad: list[str] = []
    for results in prefetched(decode, groups, workers=processors(), ahead=_AHEAD):
        bad += [result for result in results if isinstance(result, str)]
        if not bad:
            yield [result for result in results if not isinstance(result, str)]
    if bad:
        more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        raise DataError(
            f"{len(bad)} of {sum(len(part.chosen) for part in parts):,} files cannot be decoded as images: "
            f"{', '.join(bad[:_NAMED])}{more}; replace or remove them"
        )
