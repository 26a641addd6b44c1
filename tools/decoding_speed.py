"""Images per second of ``iterand.lab.data.workers.decoded`` and of a plain DataLoader with as many worker processes.

    python tools/decoding_speed.py TREE [--images N] [--rounds N] [--json FILE]

TREE holds ``train`` and ``val``. Both decode the same random resized crops of ``TREE/train`` by the same function, in
batches of uint8 pixels that are copied into one buffer. The DataLoader gets a whole batch per request, decodes it into
shared memory, keeps its workers between rounds, and prefetches two batches per worker; its workers use one thread. The
two take turns, in alternating order; a ratio compares two runs of one round. Workers are started, and decode some
batches, before the first round. On a machine that others use too, compare images per second of processor time.
"""

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import PIL
import torch
from pipeline import processor_seconds
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from iterand import philox
from iterand.lab.data.decoding import SIZE, Task, decode_part
from iterand.lab.data.imagenet import open_tree
from iterand.lab.data.images import words_of
from iterand.lab.data.workers import decoded
from iterand.lab.training.environment import describe


class Tasks:
    """The batches of a run: a sampler whose indices are tasks."""

    def __init__(self, tree: Path, size: int, images: int) -> None:
        self.files = open_tree(tree)[0]
        order = torch.cat([self._order(epoch) for epoch in range(-(-images // len(self.files.files)))])[:images]
        self.groups, self.images = torch.split(order, size), images

    def __iter__(self) -> Iterator[Task]:
        for group in self.groups:
            yield Task(self.files.contents(group), words_of(group, self._words).numpy())

    def _order(self, epoch: int) -> Tensor:
        return philox.permutation(len(self.files.files), philox.key(0, "data order"), epoch)

    @staticmethod
    def _words(index: Tensor) -> Any:
        return philox.philox(index, 0, philox.key(0, "augmentation"), philox.DATA)


class Decode(Dataset[tuple[Tensor, dict[int, str]]]):
    """Decodes a task in a worker of a DataLoader."""

    def __getitem__(self, task: Task) -> tuple[Tensor, dict[int, str]]:
        results = [decode_part(task, index) for index in range(len(task.contents))]
        problems = {index: result.problem for index, result in enumerate(results) if result.problem}
        return default_collate([result.pixels for result in results]), problems  # in shared memory


def unchanged(batch: Any) -> Any:
    """What a worker returns, as it is."""
    return batch


class Ours:
    """``decoded``."""

    def __init__(self, tasks: Tasks, size: int, workers: int) -> None:
        self.tasks, self.size, self.workers = tasks, size, workers

    def __iter__(self) -> Iterator[Tensor]:
        for pixels, _ in decoded(self.tasks, size=self.size, images=self.tasks.images, workers=self.workers):
            yield torch.from_numpy(pixels)


class Theirs:
    """A plain DataLoader."""

    def __init__(self, tasks: Tasks, size: int, workers: int) -> None:
        options: dict[str, Any] = {"batch_size": None, "sampler": tasks, "collate_fn": unchanged}
        self.loader = DataLoader(Decode(), num_workers=workers, prefetch_factor=2, persistent_workers=True, **options)

    def __iter__(self) -> Iterator[Tensor]:
        for pixels, _ in self.loader:
            yield pixels


def measure(batches: Ours | Theirs, size: int, images: int) -> dict[str, float]:
    """Images per second, and per second of processor time in this process and its workers."""
    buffer = torch.empty(size, SIZE, SIZE, 3, dtype=torch.uint8)
    done, start, used = 0, time.perf_counter(), processor_seconds()
    for pixels in batches:
        buffer[: len(pixels)].copy_(pixels)
        done += len(pixels)
    assert done == images
    passed, used = time.perf_counter() - start, processor_seconds() - used
    return {
        "seconds": round(passed, 2),
        "images_per_second": round(done / passed, 1),
        "images_per_processor_second": round(done / used, 1),
    }


def compare(tree: Path, size: int, workers: int, images: int, rounds: int) -> dict[str, Any]:
    """Both in turn; medians, and the median over rounds of the ratio of the DataLoader to ``decoded``."""
    tasks = Tasks(tree, size, images)
    contestants = {"decoded": Ours(tasks, size, workers), "dataloader": Theirs(tasks, size, workers)}
    whole, tasks.groups = tasks.groups, tasks.groups[: 4 * workers]
    for batches in contestants.values():
        for _ in batches:
            pass
    tasks.groups = whole
    found: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name in list(contestants)[:: 1 if number % 2 == 0 else -1]:
            found[name].append(measure(contestants[name], size, images))
    keys = ("images_per_second", "images_per_processor_second")
    medians = {name: {key: statistics.median(one[key] for one in runs) for key in keys} for name, runs in found.items()}
    pairs = list(zip(found["dataloader"], found["decoded"]))
    ratio = {key: round(statistics.median(theirs[key] / ours[key] for theirs, ours in pairs), 3) for key in keys}
    print(f"batch {size:3}, {workers} workers: DataLoader / decoded = {ratio}; medians {medians}", flush=True)
    settings = {"batch_size": size, "workers": workers, "images": images, "n": rounds}
    return {**settings, "dataloader_to_decoded": ratio, "medians": medians, "rounds": found}


def main() -> None:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path)
    parser.add_argument("--images", type=int, default=3200, help="per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # in workers, where it is copied
    pairs = [(size, workers) for workers in (1, 2) for size in (64, 128)]
    results = [compare(arguments.tree, *pair, arguments.images, arguments.rounds) for pair in pairs]
    record = {
        **describe(torch.device("cpu")),
        "command": f"python tools/decoding_speed.py TREE --images {arguments.images} --rounds {arguments.rounds}",
        "data": f"{len(open_tree(arguments.tree)[0].files)} JPEG files of 224×224",
        "pillow": PIL.__version__,
        "load_average": os.getloadavg()[0],
        "comparisons": results,
    }
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
