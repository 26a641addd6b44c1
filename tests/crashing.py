"""Runs that end in the middle, and what is left of them."""

import json

from iterand.lab.training.loop import NullObserver


class StopAfter(NullObserver):
    """An observer that ends the run after so many steps, as a crash would."""

    def __init__(self, steps):
        self.left = steps

    def step(self, session):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("crash")


def outcome(folder):
    record = json.loads((folder / "record.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines == record["metrics"]
    return lines, record["result"]
