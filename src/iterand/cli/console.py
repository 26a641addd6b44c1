"""What the commands share: results go to stdout, progress to stderr."""

import json
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from iterand.training.session import Session

_SECONDS_A_LINE = 10.0  # where progress goes to a file instead of a terminal

out = Console()
err = Console(stderr=True)


def say(text: str, *, to: Console = out, end: str = "\n") -> None:
    """A line as it is: what users named is no markup, and a path is not broken."""
    to.print(text, end=end, soft_wrap=True, markup=False, highlight=False)


def warn(text: str, kind: str = "[yellow]warning:[/]") -> None:
    """A sentence on stderr."""
    err.print(f"{kind} {escape(text)}", highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """One JSON object for scripts."""
    say(json.dumps(value))


class Bars(Progress):
    """Progress bars; where they are disabled nothing is printed, not even the empty line that rich may end with."""

    def stop(self) -> None:
        """End the display."""
        if not self.disable:
            super().stop()


def progress_bar() -> Progress:
    """A progress display on stderr."""
    return Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )


class ProgressObserver:
    """Shows a run on a progress bar: epochs, loss, accuracy, time left."""

    def __init__(self, progress: Progress, label: str) -> None:
        self.progress = progress
        self.label = label
        self.task = progress.add_task(escape(label), total=None, note="")
        self._shown = time.monotonic()

    def step(self, session: "Session") -> None:
        """Move the bar; read the running loss twice a second, since reading waits for the device."""
        now = time.monotonic()
        if now - self._shown > 0.5 and session.seen and err.is_terminal:
            self._shown = now
            loss, accuracy = float(session.loss_sum) / session.seen, 100 * int(session.correct) / session.seen
            done = session.epoch * session.steps_per_epoch + session.step
            self._update(session, done, f"epoch {session.epoch + 1}  loss {loss:.3f}  train {accuracy:.1f} %")

    def epoch(self, session: "Session", metrics: dict[str, Any]) -> None:
        """Show the validation accuracy of the epoch."""
        note = f"epoch {metrics['epoch']}  loss {metrics['train_loss']:.3f}  val {metrics['validation_accuracy']:.1f} %"
        self._update(session, session.epoch * session.steps_per_epoch, note)
        if not err.is_terminal and time.monotonic() - self._shown > _SECONDS_A_LINE:
            self._shown = time.monotonic()
            say(f"{self.label}: {note}", to=err)

    def _update(self, session: "Session", done: int, note: str) -> None:
        total = session.recipe.training.epochs * session.steps_per_epoch
        self.progress.update(self.task, total=total, completed=done, note=note)
