"""Time and memory of a training step: dense SGD, edge-popup and IteRand, in every execution (eager, graph, …)."""

import copy
import itertools
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from iterand.backend import triton_problem
from iterand.errors import first_line
from iterand.lab.benchmarks.table import FAILED, NOTE, Notify, Options, Row, Table, attempt
from iterand.lab.benchmarks.timing import Subject, burst, forget, spread, subject, take_turns, wait
from iterand.lab.data import Batch
from iterand.lab.training.session import Session
from iterand.lab.training.steps import EagerStep, Step
from iterand.randomization import IterativeRandomization

METHODS = ("sgd", "edge_popup", "iterand")
PERIOD = 300
"""K_per of all networks here."""

_DENSE_RATE = 0.01  # on random labels a dense network diverges at the learning rate of the scores
_BATCHES = 2
_BURST_SECONDS = 0.15
_WATCHED = 10  # steps in which host syncs are counted
_RANDOMIZATIONS = 20  # timed in a row


def measure(options: Options, notify: Notify) -> Table:
    """Milliseconds, memory and host syncs of a step for every network, execution and method."""
    table = Table(
        "step",
        [
            "A step of the training loop on random inputs; the methods take turns, and ratios are taken within a turn.",
            f"IteRand's milliseconds include a {PERIOD}th of a randomization.",
            "Peak memory is that of a method alone, from its first step on; host syncs are counted over "
            f"{_WATCHED} steps that include a randomization.",
        ],
    )
    default = ("conv6", "resnet18", "resnet50", "resnet20") if options.on_gpu else ("conv6", "resnet20")
    for name in options.networks or (default[:1] if options.little else default):
        for way in chosen_ways(options):
            table.rows += _measure(name, way, options, notify)
    return table


@dataclass(frozen=True)
class Way:
    """A way of executing a step."""

    name: str
    make: Callable[[Session], Step]


def chosen_ways(options: Options) -> list[Way]:
    """The ways given in the options, or all."""
    there = {way.name: way for way in ways(options.device)}
    for name in options.executions:
        if name not in there:
            raise ValueError(f"there is no execution {name!r} on this device; there are {', '.join(there)}")
    return [there[name] for name in options.executions or there]


def ways(device: torch.device) -> list[Way]:
    """The ways of executing a step on a device."""
    found = [Way("eager", EagerStep)]
    if device.type == "cuda" and triton_problem(device) is None:
        from iterand.lab.training.fused import FusedStep

        found += [
            Way("fused", lambda session: FusedStep(session, compile=False, graph=False)),
            Way("compiled", lambda session: FusedStep(session, compile=True, graph=False)),
            Way("graph", lambda session: FusedStep(session, compile=False, graph=True)),
            Way("compiled graph", lambda session: FusedStep(session, compile=True, graph=True)),
        ]
    return found


class Contender:
    """A training run that is measured: session, step and batches."""

    def __init__(self, chosen: Subject, network: nn.Module, way: Way, batches: Sequence[Batch], device: torch.device):
        self.device = device
        self.session = Session(chosen.recipe, copy.deepcopy(network), 1 << 20, device)
        self.step = way.make(self.session)
        self._batches = itertools.cycle(batches)
        self.randomizers = [one for one in self.session.steppers if isinstance(one, IterativeRandomization)]

    def run(self) -> None:
        """One step, as in the loop."""
        batch = next(self._batches)
        self.step.train(batch)
        self.session.advance(len(batch.labels))

    def run_between_randomizations(self) -> None:
        """One step without a randomization after it."""
        self.set_iteration(0)
        self.run()

    def set_iteration(self, iteration: int) -> None:
        """Set the number of steps since the last randomization."""
        for randomizer in self.randomizers:
            randomizer.iteration = iteration

    def randomization(self) -> float | None:
        """Milliseconds of a randomization, the mean of several; None for methods without."""

        def randomize() -> None:
            for randomizer in self.randomizers:
                randomizer.iteration = PERIOD - 1
                randomizer.step()

        if not self.randomizers:
            return None
        randomize()
        return burst(randomize, _RANDOMIZATIONS if self.device.type == "cuda" else 1, self.device)

    def host_syncs(self) -> int:
        """How often the host waits for the device over some steps that include a randomization."""
        self.set_iteration(PERIOD - _WATCHED // 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                for _ in range(_WATCHED):
                    self.run()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)

    def check(self) -> None:
        """Raise ValueError if the network has diverged."""
        if not math.isfinite(float(self.session.loss_sum)):
            raise ValueError("the network diverged on random inputs")


def _measure(name: str, way: Way, options: Options, notify: Notify) -> list[Row]:
    """The rows of all methods for one network and one way."""
    device = options.device
    subjects = {method: _subject(name, method, options) for method in METHODS}
    network = subjects["sgd"].network()
    batches = subjects["sgd"].batches(_BATCHES, options.batch, device)

    def contender(method: str) -> Contender:
        return Contender(subjects[method], network, way, batches, device)

    rows: dict[str, Row] = {}
    for method in METHODS:
        notify(f"step: {name}, {way.name}, {method}")
        precision = subjects[method].recipe.training.precision
        head = {"network": name, "batch": options.batch, "precision": precision, "execution": way.name}
        rows[method] = attempt(head | {"method": method}, partial(_alone, contender, method), device)
    whole = [method for method in METHODS if FAILED not in rows[method]]
    notify(f"step: {name}, {way.name}, in turns")
    try:
        timed = _in_turns({method: contender(method) for method in whole}, options) if whole else {}
    except Exception as error:
        timed = {method: {FAILED: first_line(error)} for method in whole}
    forget(device)
    for method in whole:
        rows[method] |= timed[method]
        peak, dense = rows[method]["peak_bytes"], rows["sgd"].get("peak_bytes")
        rows[method]["memory_ratio"] = peak / dense if peak and dense else None
    return list(rows.values())


def _subject(name: str, method: str, options: Options) -> Subject:
    rate = (f"learning_rate.initial={_DENSE_RATE}",) if method == "sgd" else ()
    return subject(name, (*options.settings, f"method.name={method}", f"period={PERIOD}", *rate))


def _alone(contender: Callable[[str], Contender], method: str) -> Row:
    """Peak memory and host syncs with nothing else in memory, and what the package logged as a note."""
    with _logged() as sentences:
        first = contender(method)
        first.run()  # compilation allocates memory that training does not need
        device = first.device
        del first
    forget(device)
    row: Row = {"peak_bytes": None, "host_syncs": None}
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        alone = contender(method)
        wait(device)
        torch.cuda.reset_peak_memory_stats(device)
        for _ in range(3):
            alone.run()
        wait(device)
        row["peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
        row["host_syncs"] = alone.host_syncs()
    return row | ({NOTE: "; ".join(sentences)} if sentences else {})


def _in_turns(contenders: dict[str, Contender], options: Options) -> dict[str, Row]:
    rounds = options.count(gpu=21, cpu=7, short=5)
    device = options.device
    for one in contenders.values():
        for _ in range(3 if options.on_gpu else 1):
            one.run()
    works = {method: one.run_between_randomizations for method, one in contenders.items()}
    times = take_turns(works, rounds, _BURST_SECONDS, device)
    rows: dict[str, Row] = {}
    for method, one in contenders.items():
        one.check()
        randomization = one.randomization()
        times[method] = [step + (randomization or 0) / PERIOD for step in times[method]]
        rows[method] = {"milliseconds": spread(times[method]), "ratio_to_dense": None}
        if "sgd" in times:
            rows[method]["ratio_to_dense"] = spread([own / dense for own, dense in zip(times[method], times["sgd"])])
        rows[method]["randomization_milliseconds"] = randomization
    return rows


@contextmanager
def _logged() -> Iterator[list[str]]:
    """Collect what the package logs inside the block."""
    sentences: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: sentences.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("iterand")
    logger.addHandler(handler)
    try:
        yield sentences
    finally:
        logger.removeHandler(handler)
