"""How wide a network must be: Figure 2 and Appendix C.4."""

from iterand.experiments.experiment import Experiment
from iterand.experiments.paper.cells import CIFAR10, cell, start

_METHODS = ("IteRand (SC)", "IteRand (KU)", "edge-popup (SC)", "edge-popup (KU)", "SGD")


def figure2() -> Experiment:
    """Three networks, four widths, five pairs of method and distribution."""
    cells = (
        cell("figure2", start(base, method), network=network, method=method, width=width)
        for network, base in CIFAR10.items()
        for method in _METHODS
        for width in (0.25, 0.5, 1.0, 2.0)
    )
    return Experiment(
        "figure2",
        "Accuracy over the width of the network",
        tuple(cells),
        seeds=3,
        where="Figure 2, Table 3",
        plot="curves",
        across="width",
    )


def width() -> Experiment:
    """How much wider edge-popup must be to be as good as IteRand."""
    widths = {"IteRand (KU)": (0.5, 1.0), "edge-popup (KU)": (0.5, 0.65, 1.0, 1.3)}
    cells = (
        cell("width", start("resnet18", method), method=method, width=width)
        for method in widths
        for width in widths[method]
    )
    return Experiment(
        "width",
        "The width at which edge-popup reaches IteRand (ResNet18)",
        tuple(cells),
        seeds=3,
        where="Table 8",
        plot="curves",
        across="width",
    )
