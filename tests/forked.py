"""The command in processes that are forked from one that has imported torch: a process of its own takes seconds."""

import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_IMPORTED = ["iterand.cli.main", "iterand.lab.training.run", "torch._dynamo"]


class Command:
    """``iterand ARGUMENTS`` in a process, much as ``subprocess.Popen`` has it; what it prints goes to two files."""

    def __init__(
        self, *arguments: object, folder: Path, prepare: Callable[[], None] | None = None, **variables: str
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._printed = folder / "stdout", folder / "stderr"
        _CONTEXT.set_forkserver_preload(_IMPORTED)  # of a server that runs already it changes nothing
        given = [*map(str, arguments)], os.environ | variables, *self._printed, prepare
        self._process = _CONTEXT.Process(target=_run, args=given)
        self._process.start()

    def poll(self) -> int | None:
        """The exit code, once it has ended."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def communicate(self) -> tuple[str, str]:
        """Wait for its end; what it has printed."""
        self._process.join()
        out, err = (path.read_text() if path.exists() else "" for path in self._printed)
        return out, err

    @property
    def returncode(self) -> int | None:
        """The exit code, as ``poll`` gives it."""
        return self.poll()


def _run(
    arguments: list[str], environment: Mapping[str, str], out: Path, err: Path, prepare: Callable[[], None] | None
) -> None:
    from iterand.cli import main

    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["iterand", *arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the server may ignore
    if prepare is not None:
        prepare()
    main.main()


def signalled(epoch: int, number: int) -> None:
    """Let this process get a signal after an epoch."""
    from iterand.cli import train

    class Observer(train.ProgressObserver):
        def epoch(self, session, metrics):
            super().epoch(session, metrics)
            if metrics["epoch"] == epoch:
                os.kill(os.getpid(), number)

    train.ProgressObserver = Observer


def limited(size: int) -> None:
    """Let files of this process be at most so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
