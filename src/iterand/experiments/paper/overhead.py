"""What randomization costs: Appendix C.2."""

from iterand.experiments.experiment import Experiment
from iterand.experiments.paper.cells import cell, start

_METHODS = {"IteRand": "IteRand (SC)", "edge-popup": "edge-popup (SC)", "SGD": "SGD"}


def overhead() -> Experiment:
    """Seconds of a whole training; the runs are three of those of Figure 2."""
    cells = (cell("overhead", start("resnet18", full), method=method) for method, full in _METHODS.items())
    return Experiment(
        "overhead",
        "How long a training takes (ResNet18), beside whatever else ran on its machine",
        tuple(cells),
        seeds=1,
        where="Table 5",
        plot="bars",
        measure="seconds",
    )
