"""Output of the commands: results go to stdout, progress and warnings to stderr."""

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from iterand.lab.training.session import Session

_SECONDS_A_LINE = 10.0  # where progress goes to a file instead of a terminal
_FIRST_LINE_SECONDS = 2.0

out = Console(emoji=False)  # a path may hold :100:
err = Console(stderr=True, emoji=False)


def say(text: str, *, to: Console = out) -> None:
    """Print a line unchanged: names may contain markup characters, and paths are not wrapped."""
    if to is out:
        write(text + "\n")
    else:
        to.print(text, soft_wrap=True, markup=False, highlight=False)


def write(text: str) -> None:
    """Write text to stdout unchanged, in UTF-8."""
    stream: TextIO | None = sys.stdout
    if out.quiet or stream is None:
        return
    try:
        stream.flush()
        if hasattr(stream, "buffer"):
            stream.buffer.write(_as_bytes(text))
        else:
            stream.write(text)
        stream.flush()
    except OSError:  # a closed pipe, or a full disk
        # The interpreter must not try to write the rest of the buffer when it exits.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise


def _as_bytes(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")  # file names that are not UTF-8 keep their bytes
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace")


def accept_any_text() -> None:
    """Escape characters that the encoding of stdout or stderr does not have, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def printable(text: str) -> str:
    """Text with control characters escaped, so that those of an untrusted file do not reach the terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def warn(text: str, kind: str = "[yellow]warning:[/]") -> None:
    """Print a warning, or another kind of message, to stderr."""
    err.print(f"{kind} {escape(text)}", highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print one JSON object, for scripts."""
    write(json.dumps(value) + "\n")


class Bars(Progress):
    """Progress bars that print nothing at all where they are disabled; rich would print an empty line."""

    def stop(self) -> None:
        """Stop the display."""
        if not self.disable:
            super().stop()


def progress_bar() -> Progress:
    """A progress display on stderr."""
    return Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )


@contextlib.contextmanager
def counting(label: str, total: float) -> Iterator[Callable[[float], None]]:
    """Show on stderr how much of a computation is done; call the result with the amount done since the last call."""
    done, printed = 0.0, time.monotonic() - max(0.0, _SECONDS_A_LINE - _FIRST_LINE_SECONDS)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Bars(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(label, total=total)

        def advance(more: float) -> None:
            nonlocal done, printed
            done += more
            progress.update(task, completed=min(done, total))
            if not err.is_terminal and time.monotonic() - printed > _SECONDS_A_LINE:
                printed = time.monotonic()
                say(f"{label}: {min(99, int(100 * done / total))} %", to=err)

        yield advance


class ProgressObserver:
    """Shows a run on a progress bar: epochs, loss, accuracy, time left."""

    def __init__(self, progress: Progress, label: str) -> None:
        self.progress = progress
        self.label = label
        self.task = progress.add_task(label, total=None, note="")
        self._shown = time.monotonic()

    def step(self, session: "Session") -> None:
        """Move the bar twice a second; reading the loss waits for the device."""
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
