"""ImageNet, or any tree train/CLASS/*.JPEG and val/CLASS/*.JPEG: read, decoded and augmented as it is used."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from iterand.data.archives import unreadable
from iterand.data.dataset import Batch, Dataset, Random
from iterand.data.decoding import SIZE, Decoded, decode
from iterand.data.folders import ClassFolders, same_classes, scan
from iterand.data.location import Located
from iterand.data.normalization import Normalizer
from iterand.data.options import Options
from iterand.data.parts import fixed_order, limited
from iterand.data.prefetch import default_workers, prefetched
from iterand.data.views import words_of
from iterand.errors import DataError

Task = tuple[Path, Sequence[int] | None]
"""A file, and the random words of its example if it is to be augmented."""

_AHEAD = 2  # batches decoded before they are asked for
_CHECKED_TOGETHER = 64


class DataWarning(UserWarning):
    """Something is wrong with the data, but the run can go on."""


def locate(root: Path) -> Located | None:
    """A tree in the subfolder ``imagenet``, or the folder itself if it is one."""
    for folder in (root / "imagenet", root):
        if (folder / "train").is_dir() and (folder / "val").is_dir():
            return Located(root, folder, "class folders")
    return None


def load(located: Located, device: torch.device, options: Options) -> Dataset["FolderSplit"]:
    """``train`` split 99 : 1 for training and validation, the same way in all runs; ``val`` is the test part."""
    train, test = _scan(located)
    order = fixed_order(len(train.files))
    held_out = max(1, round(len(order) / 100))
    normalize = Normalizer("imagenet" if options.normalization == "default" else options.normalization, device)

    def part(images: ClassFolders, chosen: Tensor) -> FolderSplit:
        return FolderSplit(images, limited(chosen, options.limit), normalize, device, options.augmentation != "none")

    return Dataset(
        train=part(train, order[held_out:]),
        validation=part(train, order[:held_out]),
        test=part(test, torch.arange(len(test.files))),
        classes=len(train.classes),
    )


def check(located: Located, progress: Callable[[int, int], None]) -> str:
    """Decode every image."""
    parts = _scan(located)
    total, done, corrupt = sum(len(part.files) for part in parts), 0, []
    for part in parts:
        items = [(part.path(index), None) for index in range(len(part.files))]
        groups = [items[start : start + _CHECKED_TOGETHER] for start in range(0, len(items), _CHECKED_TOGETHER)]
        found = prefetched(_read, groups, workers=default_workers(), ahead=_AHEAD)
        for group, results in zip(groups, found):
            corrupt += [path for (path, _), result in zip(group, results) if result.problem]
            done += len(group)
            progress(done, total)
    if corrupt:
        named = ", ".join(map(str, corrupt[:5])) + (", ..." if len(corrupt) > 5 else "")
        raise DataError(f"{len(corrupt)} of {total:,} images cannot be decoded: {named}; replace or remove them")
    return f"{total:,} images of {len(parts[0].classes):,} classes, all can be decoded"


class FolderSplit:
    """Images by their files; an image that cannot be decoded is gray, and named in a warning."""

    def __init__(
        self, images: ClassFolders, chosen: Tensor, normalize: Normalizer, device: torch.device, augmented: bool
    ) -> None:
        self.corrupt: dict[Path, str] = {}
        """What could not be decoded so far, and why."""
        self._images = images
        self._chosen = chosen
        self._normalize = normalize
        self._device = device
        self._augmented = augmented

    def __len__(self) -> int:
        return len(self._chosen)

    def batches(self, order: Tensor, size: int, random: Random | None = None) -> Iterator[Batch]:
        """Batches of normalised float32 images, decoded in the background."""
        groups = torch.split(order.cpu(), size)
        tasks = (self._tasks(index, random) for index in groups)
        for index, results in zip(groups, prefetched(_read, tasks, workers=default_workers(), ahead=_AHEAD)):
            chosen = self._chosen[index]
            self._report(chosen, results)
            pinned = self._device.type == "cuda"
            pixels = torch.empty(len(results), SIZE, SIZE, 3, dtype=torch.uint8, pin_memory=pinned)
            torch.stack([torch.from_numpy(result.pixels) for result in results], out=pixels)
            labels = self._images.labels[chosen].to(self._device, non_blocking=True)
            images = pixels.to(self._device, non_blocking=True).permute(0, 3, 1, 2)
            yield Batch((self._normalize(images),), labels)

    def _tasks(self, index: Tensor, random: Random | None) -> list[Task]:
        paths = [self._images.path(chosen) for chosen in self._chosen[index].tolist()]
        if random is None or not self._augmented:
            return [(path, None) for path in paths]
        return list(zip(paths, words_of(index, random).tolist()))

    def _report(self, chosen: Tensor, results: list[Decoded]) -> None:
        for index, result in zip(chosen.tolist(), results):
            if result.problem and (path := self._images.path(index)) not in self.corrupt:
                self.corrupt[path] = result.problem
                warnings.warn(
                    f"cannot decode {path} ({result.problem}); a gray image stands in its place, as for "
                    f"{len(self.corrupt)} of {len(self):,} so far",
                    DataWarning,
                    stacklevel=3,
                )


def _read(task: Task) -> Decoded:
    path, words = task
    try:
        content = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None
    return decode(content, words)


def _scan(located: Located) -> tuple[ClassFolders, ClassFolders]:
    train, test = scan(located.path / "train"), scan(located.path / "val")
    same_classes(train, test)
    return train, test
