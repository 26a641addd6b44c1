"""Time of an epoch, and of its augmentation alone."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from iterand import philox
from iterand.errors import DataError
from iterand.lab.benchmarks.table import Notify, Options, Row, Table, attempt
from iterand.lab.benchmarks.timing import Spread, Subject, Timer, burst, spread, subject
from iterand.lab.data import AUGMENTATIONS, Batch, Dataset, Random, Split, load_data
from iterand.lab.data.dataset import Normalizer
from iterand.lab.data.images import ImageSplit
from iterand.lab.training.environment import StopRequest
from iterand.lab.training.folder import FollowerFolder
from iterand.lab.training.loop import steps_per_epoch, train
from iterand.lab.training.session import Session
from iterand.lab.training.steps import Execution, Step, choose_step

_SIZES = (45_000, 5_000)  # of the training and the validation split of CIFAR-10


def measure_augment(options: Options, notify: Notify) -> Table:
    """Images per second for every augmentation."""
    table = Table("augment", ["Normalised float32 batches of random 32×32 images, in the order of an epoch."])
    for augmentation in AUGMENTATIONS:
        notify(f"augment: {augmentation}")
        work = partial(_augment_row, augmentation, subject("conv6"), options)
        table.rows.append(attempt({"augmentation": augmentation}, work, options.device))
    return table


def _augment_row(augmentation: str, chosen: Subject, options: Options) -> Row:
    device = options.device
    count = options.examples or (45_000 if options.on_gpu else 1024 if options.short else 8192)
    images, labels = chosen.images(count, torch.Generator(device).manual_seed(0))
    split = ImageSplit(images, labels, Normalizer("cifar10", device), augmentation)
    key = philox.key(0, "augmentation")
    order = philox.permutation(count, philox.key(0, "data order"), 0, device)

    def epoch() -> None:
        for _ in split.batches(order, options.batch, lambda index: philox.philox(index, 0, key, philox.DATA)):
            pass

    burst(epoch, 1, device)
    milliseconds = spread([burst(epoch, 1, device) for _ in range(options.count(gpu=21, cpu=5, short=3))])
    seconds = milliseconds.scaled(1e-3)
    return {
        "images": count,
        "batch": options.batch,
        "epoch_milliseconds": milliseconds,
        "images_a_second": Spread(count / seconds.median, count / seconds.p90, count / seconds.p10, seconds.n),
    }


def measure_epoch(options: Options, notify: Notify) -> Table:
    """Seconds of an epoch for every recipe: in all, and for data, steps and evaluation."""
    table = Table(
        "epoch",
        [
            "Epochs of the training loop with evaluation on the validation split, without writing files; the first "
            "one is separate, since it compiles and captures graphs.",
            "Data is the time until a batch is ready, steps the time of the updates, both on the device's clock.",
        ],
    )
    for name in options.networks or ("conv6",):
        notify(f"epoch: {name}")
        chosen = subject(name, (*options.settings, f"epochs={1 + options.count(gpu=5, cpu=2, short=1)}"))
        table.rows.append(attempt({"recipe": name}, partial(_epoch_row, chosen, options), options.device))
    return table


def _epoch_row(chosen: Subject, options: Options) -> Row:
    data, source = _data(chosen, options)
    device = options.device
    session = Session(chosen.recipe, chosen.network(), steps_per_epoch(chosen.recipe, data), device)
    clocks = _Clocks(device)
    step = _TimedStep(choose_step(session, data, Execution()), clocks)
    watched = Dataset(_TimedSplit(data.train, clocks), data.validation, data.test, data.classes)
    train(session, step, watched, FollowerFolder(Path()), clocks, StopRequest())
    first, *rest = clocks.epochs
    return {
        "data": source,
        "examples": len(data.train),
        "batch": options.batch,
        "precision": chosen.recipe.training.precision,
        "seconds": spread([epoch["whole"] for epoch in rest]),
        **{f"{part}_seconds": spread([epoch[part] for epoch in rest]) for part in ("data", "steps", "evaluation")},
        "first_seconds": first["whole"],
    }


def _data(chosen: Subject, options: Options) -> tuple[Dataset[Split], str]:
    """The data of a recipe if they are on this machine, else random images of the same shape."""
    recipe, device = chosen.recipe.data, options.device
    limit = options.examples or (None if options.on_gpu else 256 if options.short else 1280)
    try:
        found = load_data(
            recipe.name,
            device,
            options.data_dir,
            augmentation=recipe.augmentation,
            normalization=recipe.normalization,
            limit=limit,
        )
    except DataError:
        generator = torch.Generator(device).manual_seed(0)
        normalize = Normalizer("cifar10", device)
        train_part, validation = (
            ImageSplit(*chosen.images(min(count, limit or count), generator), normalize, recipe.augmentation)
            for count in _SIZES
        )
        return Dataset(train_part, validation, validation, chosen.classes), "random images"
    return found, recipe.name


class _Clocks:
    """An observer of a run that measures the seconds of each epoch."""

    def __init__(self, device: torch.device) -> None:
        self.parts = {part: Timer(device) for part in ("data", "steps", "evaluation")}
        self.epochs: list[dict[str, float]] = []
        self._started = time.perf_counter()

    def step(self, session: Session) -> None:
        """Called after each step; does nothing."""

    def epoch(self, session: Session, metrics: dict[str, Any]) -> None:
        """Store the times of an epoch."""
        parts = {part: timer.total() for part, timer in self.parts.items()}
        now = time.perf_counter()
        self.epochs.append({"whole": now - self._started} | parts)
        self._started = now


class _TimedSplit:
    """A split whose batches are timed."""

    def __init__(self, split: Split, clocks: _Clocks) -> None:
        self._split = split
        self._clock = clocks.parts["data"]

    def __len__(self) -> int:
        return len(self._split)

    def batches(self, order: Tensor, size: int, random: Random | None = None) -> Iterator[Batch]:
        """The batches of the split."""
        batches = self._split.batches(order, size, random)
        while True:
            with self._clock:
                batch = next(batches, None)
            if batch is None:
                return
            yield batch


class _TimedStep:
    """A step that is timed."""

    def __init__(self, step: Step, clocks: _Clocks) -> None:
        self.way = step.way
        self._step = step
        self._parts = clocks.parts

    def train(self, batch: Batch) -> None:
        """Train."""
        with self._parts["steps"]:
            self._step.train(batch)

    def evaluate(self, split: Split) -> dict[str, float]:
        """Evaluate."""
        with self._parts["evaluation"]:
            return self._step.evaluate(split)
