"""The live table of ``iterand reproduce``: the state and progress of each run."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.progress import TaskID
from rich.table import Table

from iterand.cli.console import err, progress_bar, say

if TYPE_CHECKING:
    from iterand.lab.experiments.local import Event, Task

_STATES = ("pending", "running", "done", "failed")
_STATE_AFTER = {"started": "running", "progress": "running", "done": "done", "failed": "failed"}
_MOST_BARS = 12  # the rest of the runs is only counted
_SECONDS_A_LINE = 30.0  # where progress goes to a file instead of a terminal


@contextmanager
def watching(tasks: Sequence["Task"]) -> Iterator["RunsTable"]:
    """A live table of these runs on stderr, updated by calling it with events; lines where stderr is no terminal."""
    table = RunsTable(tasks)
    if not err.is_terminal:
        yield table
        return
    with Live(table, console=err, transient=True):
        yield table


class RunsTable:
    """The state and progress of each run."""

    def __init__(self, tasks: Sequence["Task"]) -> None:
        self.states = dict.fromkeys(tasks, "pending")
        self.progress = progress_bar()
        self.bars: dict[Task, TaskID] = {}
        self._errors = set[str]()  # that have been printed
        self._printed = time.monotonic()

    def __call__(self, event: "Event") -> None:
        """Update the table by an event."""
        self.states[event.task] = _STATE_AFTER[event.kind]
        if event.kind == "started":
            self._remove_bar(event.task)  # the run lost its worker and is restarted
            note = f"on {event.value['host']}" if "host" in event.value else ""
            self.bars[event.task] = self.progress.add_task(event.task.label, total=None, note=note)
        elif event.kind == "progress":
            value = event.value
            note = f"loss {value['loss']:.3f}" if "loss" in value else ""
            bar = {"total": value["total"], "completed": value["done"], "note": note}
            self.progress.update(self.bars[event.task], **bar)
        else:
            self._remove_bar(event.task)
        for number, bar_id in enumerate(self.bars.values()):
            self.progress.update(bar_id, visible=number < _MOST_BARS)
        if not err.is_terminal:
            self._print_line(event)

    def __rich__(self) -> Group:
        """A row per experiment, and a bar per run."""
        table = Table("", *_STATES, box=None, header_style="bold")
        for column in table.columns[1:]:
            column.justify = "right"
        of_experiments: dict[str, Counter[str]] = {}
        for task, state in self.states.items():
            of_experiments.setdefault(task.label.partition("/")[0], Counter())[state] += 1
        for name, count in of_experiments.items():
            table.add_row(name, *(str(count[state]) for state in _STATES))
        return Group(table, self.progress)

    def _remove_bar(self, task: "Task") -> None:
        bar = self.bars.pop(task, None)
        if bar is not None:
            self.progress.remove_task(bar)

    def _print_line(self, event: "Event") -> None:
        """A line for each run that ends, and one from time to time."""
        count = Counter(self.states.values())
        if event.kind in ("done", "failed"):
            ended = f"{count['done'] + count['failed']}/{len(self.states)}"
            line = f"{ended} {event.task.label}: {self._outcome(event)}"
        elif time.monotonic() - self._printed > _SECONDS_A_LINE:
            line = ", ".join(f"{count[state]} {state}" for state in _STATES)
        else:
            return
        self._printed = time.monotonic()
        say(line, to=err)

    def _outcome(self, event: "Event") -> str:
        if event.kind == "done":
            return f"test accuracy {event.value['result']['test_accuracy']:.2f} %"
        error = str(event.value["error"])
        if error in self._errors:
            return "failed for the same reason"
        self._errors.add(error)
        return error
