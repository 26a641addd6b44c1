"""ImageNet, or any tree train/CLASS/*.JPEG and val/CLASS/*.JPEG: read, decoded and augmented as it is used."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from iterand.data import trees
from iterand.data.dataset import Batch, Dataset, Random
from iterand.data.decoders import decoded
from iterand.data.decoding import SIZE, Pixels, Task
from iterand.data.folders import Images
from iterand.data.location import Located
from iterand.data.normalization import Normalizer
from iterand.data.options import Options
from iterand.data.packing import Scaling
from iterand.data.parts import fixed_order, limited
from iterand.data.trees import DataWarning
from iterand.data.views import words_of
from iterand.errors import DataError

_CHECKED_TOGETHER = 64


def locate(root: Path) -> Located | None:
    """A tree, or packs of one, in the subfolder ``imagenet``, or the folder itself if it is one."""
    for folder in (root / "imagenet", root):
        layout = trees.layout(folder)
        if layout is not None:
            return Located(root, folder, layout)
    return None


def load(located: Located, device: torch.device, options: Options) -> Dataset["FolderSplit"]:
    """``train`` split 99 : 1 for training and validation, the same way in all runs; ``val`` is the test part."""
    train, test = trees.open_tree(located.path)
    order = fixed_order(len(train.files))
    held_out = max(1, round(len(order) / 100))
    normalize = Normalizer("imagenet" if options.normalization == "default" else options.normalization, device)

    def part(images: Images, chosen: Tensor) -> FolderSplit:
        return FolderSplit(images, limited(chosen, options.limit), normalize, device, options)

    return Dataset(
        train=part(train, order[held_out:]),
        validation=part(train, order[:held_out]),
        test=part(test, torch.arange(len(test.files))),
        classes=len(train.classes),
    )


def check(located: Located, progress: Callable[[int, int], None]) -> str:
    """Decode every image."""
    parts = trees.open_tree(located.path)
    total, done, corrupt = sum(len(part.files) for part in parts), 0, []
    for part in parts:
        groups = torch.split(torch.arange(len(part.files)), _CHECKED_TOGETHER)
        tasks = (Task(part.contents(group), None) for group in groups)
        with closing(decoded(tasks, size=_CHECKED_TOGETHER, images=len(part.files))) as results:
            for group, (_, problems) in zip(groups, results):
                corrupt += [part.path(int(group[place])) for place in sorted(problems)]
                done += len(group)
                progress(done, total)
    if corrupt:
        named = ", ".join(map(str, corrupt[:5])) + (", ..." if len(corrupt) > 5 else "")
        raise DataError(f"{len(corrupt)} of {total:,} images cannot be decoded: {named}; replace or remove them")
    packs = " and ".join(part.root.name for part in parts if part.root.is_file())
    return f"{total:,} images of {len(parts[0].classes):,} classes, all can be decoded" + (packs and f" (from {packs})")


def pack(located: Located, scaling: Scaling | None, progress: Callable[[int, int], None]) -> dict[str, Path]:
    """Write the files of each part into one."""
    return trees.pack_tree(located.path, scaling, progress)


class FolderSplit:
    """Images that are decoded as they are used; one that cannot be is gray, and named in a warning."""

    image_shape = (3, SIZE, SIZE)
    """What a network gets of each image."""

    def __init__(
        self, images: Images, chosen: Tensor, normalize: Normalizer, device: torch.device, options: Options
    ) -> None:
        self.corrupt: dict[Path, str] = {}
        """What could not be decoded so far, and why."""
        self._images = images
        self._chosen = chosen
        self._normalize = normalize
        self._device = device
        self._augmented = options.augmentation != "none"
        self._workers = options.workers

    def __len__(self) -> int:
        return len(self._chosen)

    def batches(self, order: Tensor, size: int, random: Random | None = None) -> Iterator[Batch]:
        """Batches of normalised float32 images, decoded in the background."""
        groups = torch.split(order.cpu(), size)
        tasks = (self._task(index, random) for index in groups)
        most = max(1, min(size, len(order)))
        with closing(decoded(tasks, size=most, images=len(order), workers=self._workers)) as results:
            for index, (pixels, problems) in zip(groups, results):
                chosen = self._chosen[index]
                self._report(chosen, problems)
                labels = self._images.labels[chosen].to(self._device, non_blocking=True)
                yield Batch((self._normalize(self._moved(pixels)),), labels)

    def _task(self, index: Tensor, random: Random | None) -> Task:
        words = words_of(index, random).numpy() if random is not None and self._augmented else None
        return Task(self._images.contents(self._chosen[index]), words)

    def _moved(self, pixels: Pixels) -> Tensor:
        """Pixels on the device, channels first; through memory the device can copy from while the processor goes on."""
        images = torch.from_numpy(pixels)
        if self._device.type == "cuda":
            images = images.pin_memory()
        return images.to(self._device, non_blocking=True).permute(0, 3, 1, 2)

    def _report(self, chosen: Tensor, problems: dict[int, str]) -> None:
        for place, problem in sorted(problems.items()):
            path = self._images.path(int(chosen[place]))
            if path not in self.corrupt:
                self.corrupt[path] = problem
                warnings.warn(
                    f"cannot decode {path} ({problem}); a gray image stands in its place, as for "
                    f"{len(self.corrupt)} of {len(self):,} so far",
                    DataWarning,
                    stacklevel=3,
                )
