"""ImageNet and other trees of class folders, as images or packed."""

import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from iterand.errors import DataError
from iterand.lab.data.dataset import (
    Batch,
    Dataset,
    Located,
    Normalizer,
    Options,
    Progress,
    Random,
    fixed_order,
    limited,
)
from iterand.lab.data.decoding import SIZE, Pixels, Task
from iterand.lab.data.images import words_of
from iterand.lab.data.packs import Scaling, header_of, open_pack, write_pack
from iterand.lab.data.reading import ClassFolders, Images, same_classes, scan
from iterand.lab.data.workers import decoded

PARTS = ("train", "val")
_CHECKED_TOGETHER = 64


class DataWarning(UserWarning):
    """Something is wrong with the data, but the run can continue."""


def locate(root: Path) -> Located | None:
    """Find a tree or its packs in the subfolder ``imagenet``, or in the folder itself."""
    for folder in (root / "imagenet", root):
        layout = _layout(folder)
        if layout is not None:
            return Located(root, folder, layout)
    return None


def _layout(folder: Path) -> str | None:
    """Which parts are class folders and which are packs; None unless both parts are there."""
    folders = [part for part in PARTS if (folder / part).is_dir()]
    packs = [part for part in PARTS if _pack_path(folder, part).is_file()]
    if {*folders, *packs} != {*PARTS}:
        return None
    packed = "packed" if packs == [*PARTS] else f"{''.join(packs)} packed"
    return ", ".join(["class folders"] * bool(folders) + [packed] * bool(packs))


def load(located: Located, device: torch.device, options: Options) -> Dataset["FolderSplit"]:
    """``train``, split 99 : 1 into training and validation, the same in all runs; ``val`` is the test split."""
    train, test = open_tree(located.path)
    order = fixed_order(len(train.files))
    held_out = max(1, round(len(order) / 100))
    normalize = Normalizer(options.normalization, device)

    def part(images: Images, chosen: Tensor) -> FolderSplit:
        return FolderSplit(images, limited(chosen, options.limit), normalize, device, options)

    return Dataset(
        train=part(train, limited(order[held_out:], options.train_limit)),
        validation=part(train, order[:held_out]),
        test=part(test, torch.arange(len(test.files))),
        classes=len(train.classes),
    )


class FolderSplit:
    """Images that are decoded when they are used; a warning names each that cannot be decoded, and it becomes gray."""

    image_shape = (3, SIZE, SIZE)
    """The shape of one image as a network gets it."""

    def __init__(
        self, images: Images, chosen: Tensor, normalize: Normalizer, device: torch.device, options: Options
    ) -> None:
        self.corrupt: dict[Path, str] = {}
        """The images that could not be decoded so far, and why."""
        self._images = images
        self._chosen = chosen
        self._normalize = normalize
        self._device = device
        self._augmented = options.augmentation != "none"
        self._workers = options.workers

    def __len__(self) -> int:
        return len(self._chosen)

    def batches(self, order: Tensor, size: int, random: Random | None = None) -> Iterator[Batch]:
        """Batches of normalized float32 images, decoded in the background."""
        groups = torch.split(order.cpu(), size)
        tasks = (self._task(index, random) for index in groups)
        most = max(1, min(size, len(order)))
        with closing(decoded(tasks, size=most, images=len(order), workers=self._workers)) as results:
            for index, (pixels, problems) in zip(groups, results):
                chosen = self._chosen[index]
                self._report(chosen, problems)
                labels = self._images.labels[chosen].to(self._device, non_blocking=True)
                yield Batch((self._normalize(self._to_device(pixels)),), labels)

    def _task(self, index: Tensor, random: Random | None) -> Task:
        words = words_of(index, random).numpy() if random is not None and self._augmented else None
        return Task(self._images.contents(self._chosen[index]), words)

    def _to_device(self, pixels: Pixels) -> Tensor:
        """Copy pixels to the device, channels first; through pinned memory the copy to a GPU is asynchronous."""
        images = torch.from_numpy(pixels)
        if self._device.type == "cuda":
            images = images.pin_memory()
        return images.to(self._device, non_blocking=True).permute(0, 3, 1, 2)

    def _report(self, chosen: Tensor, problems: dict[int, str]) -> None:
        for number, problem in sorted(problems.items()):
            path = self._images.path(int(chosen[number]))
            if path not in self.corrupt:
                self.corrupt[path] = problem
                warnings.warn(
                    f"cannot decode {path} ({problem}); a gray image stands in its place, as for "
                    f"{len(self.corrupt)} of {len(self):,} so far",
                    DataWarning,
                    stacklevel=3,
                )


def check(located: Located, progress: Progress) -> str:
    """Decode every image; returns how many there are."""
    parts = open_tree(located.path)
    total, done, corrupt = sum(len(part.files) for part in parts), 0, []
    for part in parts:
        groups = torch.split(torch.arange(len(part.files)), _CHECKED_TOGETHER)
        tasks = (Task(part.contents(group), None) for group in groups)
        with closing(decoded(tasks, size=_CHECKED_TOGETHER, images=len(part.files))) as results:
            for group, (_, problems) in zip(groups, results):
                corrupt += [part.path(int(group[number])) for number in sorted(problems)]
                done += len(group)
                progress(done, total)
    if corrupt:
        named = ", ".join(map(str, corrupt[:5])) + (", ..." if len(corrupt) > 5 else "")
        raise DataError(f"{len(corrupt)} of {total:,} images cannot be decoded: {named}; replace or remove them")
    packs = " and ".join(part.root.name for part in parts if part.root.is_file())
    return f"{total:,} images of {len(parts[0].classes):,} classes, all can be decoded" + (packs and f" (from {packs})")


def pack(located: Located, scaling: Scaling | None, progress: Progress) -> dict[str, Path]:
    """Write the pack of each part beside it, unless there is one of the same files."""
    folder = located.path
    for part in PARTS:
        if not (folder / part).is_dir():
            raise DataError(f"{folder} has no class folders in {part}; a pack is written from them")
    trees = {part: scan(folder / part) for part in PARTS}
    same_classes(*trees.values())
    total = sum(len(tree.files) for tree in trees.values())
    before = 0

    def advance(images: int, _: int) -> None:
        progress(before + images, total)

    for part, tree in trees.items():
        _write(_pack_path(folder, part), tree, scaling, advance)
        before += len(tree.files)
        progress(before, total)
    return {part: _pack_path(folder, part) for part in PARTS}


def _write(path: Path, tree: ClassFolders, scaling: Scaling | None, progress: Progress) -> None:
    header = header_of(tree, scaling)
    try:
        there = path.is_file() and open_pack(path).header == header
    except DataError:
        there = False  # damaged: written again
    if not there:
        write_pack(path, tree, header, scaling, progress)


def open_tree(folder: Path) -> tuple[Images, Images]:
    """The images of ``train`` and ``val``, which must have the same classes."""
    train, test = (_open(folder, part) for part in PARTS)
    same_classes(train, test)
    return train, test


def _open(folder: Path, part: str) -> Images:
    """The pack of a part, unless there is none or the files have changed since; else the files."""
    path = _pack_path(folder, part)
    if not path.is_file():
        return scan(folder / part)
    packed = open_pack(path)
    if (folder / part).is_dir() and (tree := scan(folder / part)).digest() != packed.header.tree:
        warnings.warn(
            f"{path} was written from other files than are in {folder / part} now, and is not used; "
            "'iterand data pack' writes it again",
            DataWarning,
            stacklevel=4,
        )
        return tree
    if packed.header.short_side:
        warnings.warn(
            f"{path} holds images scaled to a short side of {packed.header.short_side} and compressed again, with "
            "other pixels than the files had; remove it to use those",
            DataWarning,
            stacklevel=4,
        )
    return packed


def _pack_path(folder: Path, part: str) -> Path:
    return folder / f"{part}.pack"
