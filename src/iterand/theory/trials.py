"""Constructions of one target, many times: does the theorem keep its word?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from iterand.theory import exact
from iterand.theory.bounds import check_count, layers
from iterand.theory.certify import certify, unprotected
from iterand.theory.construct import LARGEST, build, build_draws, construct
from iterand.theory.exact import Tolerance
from iterand.theory.search import Progress, silent
from iterand.theory.target import Part, accuracy, digits, layer_widths, matrices, trained_target


@dataclass(frozen=True)
class Trial:
    """One construction from one seed."""

    seed: int
    held: bool
    """The event of the proof happened."""
    measured: float
    proven: float
    accuracy: float
    unprotected: float
    """The share of test images whose decision the proven error could change."""


@dataclass(frozen=True)
class Summary:
    """What many trials say together."""

    target_widths: list[int]
    target_accuracy: float
    hidden_widths: list[int]
    rounds: int
    exact_failure: float
    trials: int
    within_epsilon: int
    """Trials whose proven error is at most ε."""
    event_held: int
    largest_measured: float
    largest_proven: float
    lowest_accuracy: float
    highest_accuracy: float
    largest_unprotected: float


class Experiment:
    """A target, its test data, and the ε, δ and R of the theorem: what all trials share."""

    def __init__(
        self, target: nn.Sequential, test: Part, epsilon: float, delta: float, rounds: int | None = None
    ) -> None:
        self.target, self.test, self.epsilon, self.delta = target, test, epsilon, delta
        self.widths = layer_widths(target)
        self.rounds = exact.repaired_rounds(epsilon, delta, self.widths) if rounds is None else rounds

    @property
    def draws(self) -> float:
        """How many draws a construction makes, in the mean, roughly."""
        tolerances = exact.network_tolerances(self.epsilon, self.widths)
        copies = exact.repaired_copies(self.epsilon, self.delta, self.widths, self.rounds)
        return build_draws(matrices(self.target), tolerances, self.rounds, copies)

    def run(self, seed: int, progress: Progress = silent) -> tuple[Trial, nn.Sequential]:
        """One construction with its certificate, and the masked model."""
        made = construct(self.target, self.epsilon, self.delta, self.rounds, seed, progress)
        certificate = certify(self.target, made.model)
        trial = Trial(
            seed=seed,
            held=made.held,
            measured=certificate.measured,
            proven=certificate.proven,
            accuracy=accuracy(made.model, self.test),
            unprotected=unprotected(self.target, self.test.inputs, certificate.proven),
        )
        return trial, made.model

    def summary(self, trials: Sequence[Trial]) -> Summary:
        """What these trials say together."""
        settings = self.epsilon, self.delta, self.widths, self.rounds
        tolerances = exact.network_tolerances(self.epsilon, self.widths)
        return Summary(
            target_widths=self.widths,
            target_accuracy=accuracy(self.target, self.test),
            hidden_widths=exact.repaired_widths(*settings),
            rounds=self.rounds,
            exact_failure=exact.network_failure(
                matrices(self.target), tolerances, self.rounds, exact.repaired_copies(*settings)
            ),
            trials=len(trials),
            within_epsilon=sum(trial.proven <= self.epsilon for trial in trials),
            event_held=sum(trial.held for trial in trials),
            largest_measured=max(trial.measured for trial in trials),
            largest_proven=max(trial.proven for trial in trials),
            lowest_accuracy=min(trial.accuracy for trial in trials),
            highest_accuracy=max(trial.accuracy for trial in trials),
            largest_unprotected=max(trial.unprotected for trial in trials),
        )


def digits_experiment(hidden: int, epsilon: float, delta: float, rounds: int | None = None) -> Experiment:
    """The experiment whose target is a network with one hidden layer, trained on digits."""
    check_count("hidden", hidden)
    check_count("rounds", 1 if rounds is None else rounds)
    train, test = digits()
    sizes = layers((train.inputs.shape[1], hidden, int(train.labels.max()) + 1))
    least = sum(2 * inputs * (inputs + outputs) for inputs, outputs in sizes)  # at twice the width, with all the rounds
    if least > LARGEST:
        raise ValueError(
            f"hidden has {hidden}; its construction has at least {least} random weights, and at most {LARGEST} are "
            "built, so lower it"
        )
    return Experiment(trained_target(train, hidden), test, epsilon, delta, rounds)


@dataclass(frozen=True)
class ErrorRow:
    """The error of a construction that takes the nearest of R draws, at twice the width of the target."""

    rounds: int
    measured: float
    proven: float


def error_rows(target: nn.Sequential, rounds: Sequence[int], seed: int = 0) -> Iterator[ErrorRow]:
    """The error over R at twice the width, one row after the other."""
    weights = matrices(target)
    nearest = [Tolerance(0.0, 0.0)] * len(weights)
    for count in rounds:
        made = build(weights, nearest, count, [1] * len(weights), seed)
        certificate = certify(target, made.model)
        yield ErrorRow(count, certificate.measured, certificate.proven)
