"""Several runs in one process, taking turns step by step: on a GPU each has a stream of its own, so that they overlap.

A run is the same as alone: it shares nothing with the others but, if the network is the same, its compiled code.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from iterand.errors import IterandError
from iterand.experiments.running import run_steps
from iterand.experiments.task import Task
from iterand.training.environment import choose_device
from iterand.training.folder import RunFolder
from iterand.training.interrupt import Interrupted, StopRequest, stop_request
from iterand.training.loop import Observer

STREAMS = 32
"""How many streams torch has; two runs on one would share scratch memory."""

Tell = Callable[[Task, str, dict[str, Any]], None]
"""Hears ``done`` with the record of a task, or ``failed`` with its error."""


def run_side_by_side(tasks: Sequence[Task], observer: Callable[[Task], Observer], tell: Tell) -> None:
    """Do the tasks, one step of each in turn."""
    if len(tasks) > STREAMS:
        raise ValueError(f"{len(tasks)} runs cannot go side by side in one process; there are {STREAMS} streams")
    with stop_request() as request:
        lanes = []
        for task in tasks:
            execution = replace(task.execution, side_by_side=len(tasks))
            steps = _steps(replace(task, execution=execution), observer(task), request)
            lanes.append((task, steps, _stream(task.device) if len(tasks) > 1 else nullcontext()))
        while lanes:
            lanes = [lane for lane in lanes if _advance(*lane, tell)]


def _advance(
    task: Task, steps: Generator[None, None, dict[str, Any]], lane: AbstractContextManager[Any], tell: Tell
) -> bool:
    """Do a step; gives whether there are more."""
    try:
        with lane:
            next(steps)
    except StopIteration as end:
        tell(task, "done", end.value)
    except Interrupted:
        tell(task, "failed", {"error": "stopped and saved"})
    except (IterandError, ValueError, OSError) as error:
        tell(task, "failed", {"error": str(error)})
    except Exception as error:
        tell(task, "failed", {"error": f"{type(error).__name__}: {error}"})
    else:
        return True
    return False


def _steps(task: Task, observer: Observer, request: StopRequest) -> Generator[None, None, dict[str, Any]]:
    return (
        yield from run_steps(
            task.recipe,
            RunFolder(task.folder),
            request=request,
            device=choose_device(task.device),
            data_dir=task.data_dir,
            observer=observer,
            execution=task.execution,
        )
    )


def _stream(device: str) -> AbstractContextManager[Any]:
    if not (device.startswith("cuda") and torch.cuda.is_available()):
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
