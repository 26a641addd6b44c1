"""What an experiment measures of each run."""

from collections.abc import Callable
from dataclasses import dataclass

from iterand.experiments.experiment import Experiment
from iterand.experiments.report.records import Record


@dataclass(frozen=True)
class Measure:
    """A number that each run has."""

    title: str
    of: Callable[[Record], float]
    lower_is_better: bool = False


_MEASURES = {
    "test_accuracy": Measure("test accuracy (%)", lambda record: float(record.result["test_accuracy"])),
    "validation_accuracy": Measure(
        "validation accuracy (%)", lambda record: float(record.metrics[-1]["validation_accuracy"])
    ),
    "seconds": Measure("training time (s)", lambda record: record.seconds, lower_is_better=True),
}


def measure(experiment: Experiment) -> Measure:
    """What this experiment is about."""
    return _MEASURES[experiment.measure]
