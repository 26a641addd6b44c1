"""Where runs happened: each set of hardware, versions, commit and command once, with a number to refer to."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from iterand.experiments.report import formatting
from iterand.experiments.report.records import Record


@dataclass(frozen=True)
class Machine:
    """One place where runs happened."""

    number: int
    device: str
    versions: str
    commit: str
    command: str


class Machines:
    """All places of the given runs."""

    def __init__(self, runs: Iterable[Record]) -> None:
        self._known: dict[tuple[str, ...], Machine] = {}
        self._runs: dict[Machine, int] = {}
        for run in runs:
            self._runs[self.of(run)] = self._runs.get(self.of(run), 0) + 1

    def of(self, run: Record) -> Machine:
        """Where a run happened."""
        key = _describe(run.environment)
        return self._known.setdefault(key, Machine(len(self._known) + 1, *key))

    def __iter__(self) -> Iterator[tuple[Machine, int]]:
        return iter(self._runs.items())


def _describe(environment: Mapping[str, Any]) -> tuple[str, str, str, str]:
    def said(key: str) -> str:
        return str(environment.get(key) or "unknown")

    known = (f"{name} {environment[name]}" for name in ("iterand", "torch", "python") if environment.get(name))
    versions = ", ".join((*known, said("platform")))
    return formatting.machine(environment), versions, said("commit"), said("command")
