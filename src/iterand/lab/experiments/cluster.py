"""The Ray engine: the same tasks and events as the local engine, on the machines of a Ray cluster.

Ray assigns the runs to machines and restarts a run whose worker is lost. Run folders are on a path that all machines
share, so such a run resumes from its last checkpoint.
"""

import importlib.util
import logging
import math
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from iterand.errors import IterandError, MissingExtraError, first_line
from iterand.lab.data.dataset import data_folder
from iterand.lab.experiments.local import Event, Reporter, Task, UnexpectedError, do
from iterand.lab.training.environment import Interrupted, StopRequest, stop_request

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.util.queue import Queue

RETRIES = 3  # of a run whose worker or machine is lost
_ADDRESS_FILE = Path("/tmp/ray/ray_current_cluster")  # written by ray start; stale if Ray was killed
_STORE_BYTES = 100 * 2**20  # records are small; the default is a third of the memory
_SECONDS_TO_ANSWER = 5.0
_SECONDS_TO_SAVE = 30.0
_SECONDS_TO_WAIT = 0.3


@contextmanager
def connected(address: str | None, jobs: int | None = None) -> Iterator["Cluster"]:
    """A Ray cluster: the one at an address (``auto`` finds it), or one of this machine alone that ends with the block.

    Leaving the block stops the runs in progress, which save checkpoints.
    """
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError("ray", "running on a cluster (--engine ray)", "ray")
    import ray

    with ExitStack() as cleanup:
        cleanup.callback(ray.shutdown)
        with stop_request() as request:  # Ray leaves processes behind if it is interrupted while it starts
            _start(address, jobs)
        if request.asked:
            raise Interrupted
        # A new stop_request, since Ray has installed its own signal handlers.
        yield Cluster(ray.cluster_resources().get("GPU", 0.0), cleanup.enter_context(stop_request()), cleanup)


def _start(address: str | None, jobs: int | None) -> None:
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        ray.init("local", num_cpus=jobs, include_dashboard=False, object_store_memory=_STORE_BYTES, **quiet)
        return
    _check_address(address)
    try:
        ray.init(address, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        raise IterandError(_no_cluster(address, error)) from error


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster that this process is connected to."""

    gpus: float
    request: StopRequest
    cleanup: ExitStack

    def device(self, name: str) -> str:
        """The device of the runs: ``auto`` is a GPU where the cluster has one."""
        if name not in ("auto", "cpu", "cuda"):
            raise ValueError(
                f"device is {name!r}; with Ray it must be auto, cpu or cuda, since Ray chooses which GPU a run gets"
            )
        if name == "cuda" and not self.gpus:
            raise ValueError("device is 'cuda', but the Ray cluster has no GPU; use --device cpu")
        return "cuda" if self.gpus and name != "cpu" else "cpu"

    def gpus_per_run(self, asked: float | None, device: str, jobs: int | None) -> float:
        """The share of a GPU for each run: the given one, else as much as lets ``jobs`` runs fit."""
        if asked is None:
            return 1 / math.ceil(max(1.0, (jobs or 1) / self.gpus)) if device == "cuda" else 0.0
        if not 0 < asked <= 1:
            raise ValueError(f"--gpus-per-run is {asked:g}; it must be above 0 and at most 1: a run uses one GPU")
        if device != "cuda":
            raise ValueError(f"--gpus-per-run is {asked:g}, but the runs are to be on the CPU; leave it out")
        return asked

    def run_tasks(self, tasks: Sequence[Task], jobs: int, gpus: float = 0.0) -> Iterator[Event]:
        """Do the tasks, at most ``jobs`` at a time and as the cluster has room, and yield their events."""
        import ray
        from ray.util.queue import Queue
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # The queue of events stays on this machine, since another one may be lost.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        queue = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
        self.cleanup.callback(queue.shutdown, force=True)
        mark = self._mark(tasks[0].folder.absolute().parent)
        work = ray.remote(_work).options(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)
        waiting, running = list(enumerate(tasks)), dict["ObjectRef[Any]", Task]()
        self.cleanup.callback(_stop, running)
        while waiting or running:
            if self.request.asked:
                raise Interrupted
            while waiting and len(running) < jobs:
                number, task = waiting.pop(0)
                running[work.remote(_absolute(task), number, sys.argv, mark, queue)] = task
            ended, _ = ray.wait(list(running), timeout=_SECONDS_TO_WAIT)
            for number, kind, value in queue.get_nowait_batch(queue.size()):
                yield Event(kind, tasks[number], value)
            for reference in ended:
                kind, value = _outcome(reference)
                yield Event(kind, running.pop(reference), value)

    def _mark(self, base: Path) -> Path:
        """A file beside the run folders; a machine that cannot see it does not share the path."""
        try:
            base.mkdir(parents=True, exist_ok=True)
            return Path(self.cleanup.enter_context(NamedTemporaryFile(dir=base, prefix=".shared-")).name)
        except OSError as error:
            raise IterandError(f"cannot write to the folder of the runs {base}: {error.strerror or error}") from error


def _absolute(task: Task) -> Task:
    """The task with absolute paths, for a process with another working folder and environment."""
    return replace(task, folder=task.folder.absolute(), data_dir=data_folder(task.data_dir).absolute())


def _outcome(reference: "ObjectRef[Any]") -> tuple[str, dict[str, Any]]:
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        kind, value = ray.get(reference)
        return kind, value
    except RayTaskError as error:  # before the run started: no iterand on that machine, or no GPU for torch
        return "failed", {"error": f"its worker could not start it: {first_line(error.cause).rstrip('.')}"}
    except RayError as error:
        return "failed", {"error": f"Ray gave it up, {RETRIES} retries included: {first_line(error).rstrip('.')}"}


def _stop(running: dict["ObjectRef[Any]", Task]) -> None:
    """Ask the runs to save and stop; cancel by force those that do not end soon."""
    import ray

    references = list(running)
    for reference in references:
        ray.cancel(reference)  # like Ctrl-C in its process: a run saves a checkpoint at the next step
    left = ray.wait(references, num_returns=len(references), timeout=_SECONDS_TO_SAVE)[1] if references else []
    for reference in left:
        ray.cancel(reference, force=True)


def _check_address(address: str) -> None:
    """Raise at once for an address at which Ray would wait for minutes."""
    if "://" in address:
        raise ValueError(
            f"--address is {address!r}; it must be HOST:PORT or auto, given on a machine of the cluster: "
            "from outside, send the command there with ray job submit"
        )
    if address == "auto" and _ADDRESS_FILE.exists():
        address = _ADDRESS_FILE.read_text().strip()
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), _SECONDS_TO_ANSWER).close()
        except (OSError, OverflowError) as error:
            raise IterandError(_no_cluster(address, error)) from error


def _no_cluster(address: str, error: Exception) -> str:
    return (
        f"no Ray cluster to use at {address!r} ({first_line(error).rstrip('.')}); start one with ray start --head, "
        "set RAY_AUTH_MODE=token if it asks for a token, or leave --address out to use this machine alone"
    )


def _work(task: Task, number: int, command: list[str], mark: Path, queue: "Queue") -> tuple[str, dict[str, Any]]:
    """The work of a Ray worker. It has the main thread, so signals reach the run and can stop it."""
    from ray.exceptions import RayError

    def send(kind: str, value: dict[str, Any]) -> None:
        with suppress(RayError):  # the queue is gone; the run continues
            queue.put_nowait((number, kind, value))

    sys.argv = command  # for the record: the command of the user, not that of the worker
    host = socket.gethostname()
    send("started", {"host": host, "pid": os.getpid()})
    if not mark.exists():
        return "failed", {"error": f"{host} does not see {mark.parent}: --out must lie on a path all machines share"}
    try:
        event = do(task, Reporter(lambda value: send("progress", value)))
    except UnexpectedError as error:
        return "failed", {"error": str(error)}
    return event.kind, event.value
