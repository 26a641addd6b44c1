"""Several runs in one process, taking turns step by step: on a GPU each has a stream of its own, so that they overlap.

A run is the same as alone: it shares nothing with the others but, if the network is the same, its compiled code.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from iterand.errors import IterandError
from iterand.experiments.running import run_steps
from iterand.experiments.task import Task
from iterand.training.environment import choose_device, computing
from iterand.training.execution import Execution
from iterand.training.folder import RunFolder
from iterand.training.interrupt import Interrupted, StopRequest, stop_request
from iterand.training.loop import Observer

STREAMS = 32
"""How many streams torch has; two runs on one would share scratch memory."""

Tell = Callable[[Task, str, dict[str, Any]], None]
"""Hears ``done`` with the record of a task, or ``failed`` with its error."""


def run_side_by_side(
    tasks: Sequence[Task], observer: Callable[[Task], Observer], tell: Tell, request: StopRequest | None = None
) -> bool:
    """Do the tasks, one step of each in turn; gives whether all went as foreseen, whatever their end."""
    if len(tasks) > STREAMS:
        raise ValueError(f"{len(tasks)} runs cannot go side by side in one process; there are {STREAMS} streams")
    with nullcontext(request) if request else stop_request() as asked:
        lanes = [_Lane(task, observer(task), asked, len(tasks)) for task in tasks]
        left = lanes
        while left:
            left = [lane for lane in left if lane.advance(tell)]
    return not any(lane.surprised for lane in lanes)


class _Lane:
    """A run, with what it must have for itself while it takes its turn: threads, random generators, a stream."""

    def __init__(self, task: Task, observer: Observer, request: StopRequest, lanes: int) -> None:
        self._task = task
        self._steps = self._begin(observer, request, replace(task.execution, side_by_side=lanes))
        self._shares = lanes > 1
        self._stream = _stream(task.device) if self._shares else nullcontext()
        self._generators: list[Tensor] | None = None
        self.surprised = False
        """Whether it ended by an error that nobody foresaw."""

    def advance(self, tell: Tell) -> bool:
        """Do a step; gives whether there are more."""
        try:
            with self._turn():
                next(self._steps)
        except StopIteration as end:
            tell(self._task, "done", end.value)
        except Interrupted:
            tell(self._task, "failed", {"error": "stopped and saved"})
        except (IterandError, ValueError, OSError) as error:
            tell(self._task, "failed", {"error": str(error)})
        except Exception as error:
            self.surprised = True
            tell(self._task, "failed", {"error": f"{type(error).__name__}: {error}"})
        else:
            return True
        return False

    def _begin(
        self, observer: Observer, request: StopRequest, execution: Execution
    ) -> Generator[None, None, dict[str, Any]]:
        task = self._task
        return (
            yield from run_steps(
                task.recipe,
                RunFolder(task.folder),
                request=request,
                device=choose_device(task.device),
                data_dir=task.data_dir,
                observer=observer,
                execution=execution,
            )
        )

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with computing(self._task.recipe.training.threads), self._stream:
            if not self._shares:
                yield
                return
            others = _generators()
            if self._generators is not None:
                _set_generators(self._generators)
            try:
                yield
            finally:
                self._generators = _generators()
                _set_generators(others)


def _generators() -> list[Tensor]:
    """The states of torch's generators, which layers such as dropout draw from."""
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if on_gpu else ())]


def _set_generators(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for number, state in enumerate(states[1:]):
        torch.cuda.set_rng_state(state, number)


def _stream(device: str) -> AbstractContextManager[Any]:
    if not (device.startswith("cuda") and torch.cuda.is_available()):
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
