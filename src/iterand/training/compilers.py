"""Torch compiles in processes of its own, which a run needs in its first epochs only."""

import sys
import threading
from typing import Any

from iterand.training.loop import Observer
from iterand.training.session import Session

_EPOCHS = 2  # by then all that a run does was done before


class CompilersLeave:
    """Watches a run for another observer, and sends the compilers away once there is nothing left to compile.

    Torch keeps them to the end of the process, and then waits for theirs, about a second. For a process with one run:
    what another one compiles while they leave would fail.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._epochs = 0

    def step(self, session: Session) -> None:
        """A step is done."""
        self._observer.step(session)

    def epoch(self, session: Session, metrics: dict[str, Any]) -> None:
        """An epoch is done."""
        self._observer.epoch(session, metrics)
        self._epochs += 1
        compilers = sys.modules.get("torch._inductor.async_compile")  # there if anything was compiled
        if self._epochs == _EPOCHS and compilers is not None:
            threading.Thread(target=compilers.shutdown_compile_workers, name="iterand-compilers").start()
