"""Timing of work on CPUs and GPUs, and the networks that are timed."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from iterand.backend import triton_problem
from iterand.lab.data import Batch
from iterand.lab.experiments.library import find_recipe
from iterand.lab.networks import build_network
from iterand.lab.training import recipe_file
from iterand.lab.training.recipe import Recipe

Work = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)

_LEAD_IN = 2  # calls on a GPU before its clock starts, so that the host is ahead
_BUSY_SIDE = 4096  # of the matrices that keep a GPU busy
_SHORT_NAMES = {"resnet50": "imagenet-resnet50"}
_SHAPES = {"digits": (1, 8, 10), "cifar10": (3, 32, 10), "imagenet": (3, 224, 1000)}  # channels, side, classes


@dataclass(frozen=True)
class Spread:
    """The median of ``n`` measurements, and the 10th and 90th percentile."""

    median: float
    p10: float
    p90: float
    n: int

    def scaled(self, factor: float) -> "Spread":
        """The same in another unit."""
        return Spread(factor * self.median, factor * self.p10, factor * self.p90, self.n)


def spread(values: Sequence[float]) -> Spread:
    """The median and percentiles of some measurements."""
    low, middle, high = (float(value) for value in np.percentile(values, (10, 50, 90)))
    return Spread(middle, low, high, len(values))


def wait(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget(device: torch.device) -> None:
    """Free unused memory and caches."""
    gc.collect()
    if device.type == "cuda":
        if triton_problem(device) is None:
            from iterand.backend.triton import layers

            layers.forget()
        torch.cuda.empty_cache()


def burst(work: Work, times: int, device: torch.device) -> float:
    """Milliseconds per call, of ``times`` calls in a row without a wait between them."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(times):
            work()
        return 1000 * (time.perf_counter() - started) / times
    wait(device)
    begin, end = _event(), _event()
    for _ in range(_LEAD_IN):
        work()
    begin.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / times


def take_turns(
    works: Mapping[Name, Work], rounds: int, seconds: float, device: torch.device
) -> dict[Name, list[float]]:  # fmt: skip
    """Milliseconds per call of each work, once in each round: bursts of about ``seconds``, all works in turn.

    A machine that is slow for a while slows down all works, so ratios within a round stay valid.
    """
    times = {}
    for name, work in works.items():
        burst(work, 1, device)  # compilation and other one-time work
        times[name] = max(1, math.ceil(1000 * seconds / burst(work, 1, device)))
    measured: dict[Name, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            measured[name].append(burst(work, times[name], device))
    return measured


def one_by_one(
    work: Work, repeats: int, device: torch.device, before: Work = lambda: None
) -> tuple[list[float], list[float]]:
    """Milliseconds of single calls: on the device, and on the host until the call returns.

    ``before`` is called before each and not counted. A GPU is kept busy before each call until the host has launched
    everything, so that the device time has no gaps in which the GPU waits for launches.
    """
    on_device: list[float] = []
    on_host: list[float] = []
    keep_busy = _busy(device)
    for number in range(-2, repeats):
        before()
        if device.type != "cuda":
            started = time.perf_counter()
            work()
            on_host.append(1000 * (time.perf_counter() - started))
            on_device.append(on_host[-1])
        else:
            wait(device)
            begin, end = _event(), _event()
            if number >= 0:
                keep_busy(3 * statistics.median(on_host[1:]) + 1)  # the first call compiles
            begin.record()
            started = time.perf_counter()
            work()
            on_host.append(1000 * (time.perf_counter() - started))
            end.record()
            end.synchronize()
            on_device.append(float(begin.elapsed_time(end)))
    return on_device[2:], on_host[2:]


class Timer:
    """Adds up the time of ``with`` blocks; only ``total`` waits for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._started = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        if self._device.type == "cuda":
            self._events.append((_event(), _event()))
            self._events[-1][0].record()
        else:
            self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._started

    def total(self) -> float:
        """Seconds since the last call of ``total``."""
        wait(self._device)
        seconds = self._seconds + sum(float(begin.elapsed_time(end)) for begin, end in self._events) / 1000
        self._seconds, self._events = 0.0, []
        return seconds


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _busy(device: torch.device) -> Callable[[float], None]:
    """A function that gives a GPU at least so many milliseconds of work."""
    if device.type != "cuda":
        return lambda milliseconds: None
    factor = torch.zeros(_BUSY_SIDE, _BUSY_SIDE, device=device)
    product = torch.empty_like(factor)

    def multiply() -> None:
        torch.mm(factor, factor, out=product)

    each = burst(multiply, 10, device)

    def keep_busy(milliseconds: float) -> None:
        for _ in range(math.ceil(milliseconds / each)):
            multiply()

    return keep_busy


@dataclass(frozen=True)
class Subject:
    """A recipe on images, and the shape of these."""

    recipe: Recipe
    channels: int
    side: int
    classes: int

    def network(self) -> nn.Module:
        """Its network, on the CPU."""
        chosen = self.recipe.network
        return build_network(chosen.name, width_factor=chosen.width_factor, classes=chosen.classes or self.classes)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Of one image."""
        return self.channels, self.side, self.side

    def images(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random pixels (uint8) and labels, on the generator's device."""
        shape, device = (count, *self.input_shape), generator.device
        pixels = torch.randint(256, shape, dtype=torch.uint8, device=device, generator=generator)
        return pixels, torch.randint(self.classes, (count,), device=device, generator=generator)

    def batches(self, count: int, size: int, device: torch.device) -> list[Batch]:
        """Random batches, on the device."""
        generator = torch.Generator(device).manual_seed(0)
        drawn = [self.images(size, generator) for _ in range(count)]
        return [Batch(((pixels.float() - 127.5) / 73.9,), labels) for pixels, labels in drawn]


def subject(name: str, settings: tuple[str, ...] = ()) -> Subject:
    """The subject of a recipe's name, with settings applied; ``resnet50`` means ``imagenet-resnet50``."""
    return subject_of(name, recipe_file.override(find_recipe(_SHORT_NAMES.get(name, name)), settings))


def subject_of(name: str, recipe: Recipe) -> Subject:
    """A recipe as a subject; ``name`` is for the error message."""
    if recipe.data.name not in _SHAPES:
        known = ", ".join(_SHAPES)
        raise ValueError(f"{name} is trained on {recipe.data.name}; benchmarks know the shapes of {known}")
    return Subject(recipe, *_SHAPES[recipe.data.name])
