"""How often and how much to randomize: Figure 1 and Appendix C.1.

Figure 1 says that its weights are KU. Appendix C.1 does not say which they are; KU is our reading, as for Figure 1.
"""

from iterand.experiments.experiment import Cell, Experiment
from iterand.experiments.paper.cells import CIFAR10, cell, start

_METHOD = "IteRand (KU)"


def figure1() -> Experiment:
    """The rate r; at r = 0 nothing is ever redrawn, which is edge-popup (Section 3.2), and run as such."""
    cells = list[Cell]()
    for network, base in CIFAR10.items():
        nothing = cell("figure1", start(base, _METHOD), network=network, rate=0.0)
        cells.append(Cell(nothing.label, start(base, "edge-popup (KU)"), nothing.axes))
        cells += (cell("figure1", start(base, _METHOD), network=network, rate=rate) for rate in (0.01, 0.1, 1.0))
    return Experiment(
        "figure1",
        "Which share of the pruned weights to redraw (KU)",
        tuple(cells),
        seeds=3,
        where="Figure 1",
        plot="bars",
        across="rate",
        measure="validation_accuracy",
    )


def period() -> Experiment:
    """The period K_per."""
    cells = (
        cell("period", start(base, _METHOD), network=network, period=period)
        for network, base in CIFAR10.items()
        for period in (1, 30, 300, 3000, 30000)
    )
    return Experiment(
        "period",
        "How many iterations lie between two randomizations (KU)",
        tuple(cells),
        seeds=3,
        where="Figure 4",
        plot="curves",
        across="period",
        measure="validation_accuracy",
    )


def period_rate() -> Experiment:
    """Both."""
    cells = (
        cell("period-rate", start("resnet18", _METHOD), period=period, rate=rate)
        for rate in (0.001, 0.01, 0.1, 1.0)
        for period in (1, 30, 300, 3000)
    )
    return Experiment(
        "period-rate",
        "Period and rate together (ResNet18, KU)",
        tuple(cells),
        seeds=3,
        where="Figure 5",
        plot="heat map",
        across="period",
    )
