"""How many weights can go: Appendix C.3."""

from iterand.experiments.experiment import Experiment
from iterand.experiments.paper.cells import CIFAR10, cell, start

OPENLTH = {"VGG11": "vgg11", "ResNet20": "resnet20"}
"""The networks of the comparison that the authors did in OpenLTH, ..."""
SPARSITIES = (0.5, 0.7, 0.9, 0.95, 0.99)
"""... and how many of their weights go."""


def sparsity() -> Experiment:
    """Seven sparsities."""
    cells = (
        cell("sparsity", start(CIFAR10[network], method), network=network, method=method, sparsity=sparsity)
        for network in ("Conv6", "ResNet18")
        for method in ("IteRand (SC)", "edge-popup (SC)")
        for sparsity in (0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99)
    )
    return Experiment(
        "sparsity",
        "Accuracy over the share of pruned weights",
        tuple(cells),
        seeds=3,
        where="Table 6",
        plot="curves",
        across="sparsity",
    )


def imp() -> Experiment:
    """Against iterative magnitude pruning, which does train weights."""
    cells = (
        cell("imp", start(base, method), network=network, method=method, sparsity=sparsity)
        for network, base in OPENLTH.items()
        for method in ("IteRand (SC)", "edge-popup (SC)", "IMP")
        for sparsity in SPARSITIES
    )
    return Experiment(
        "imp",
        "Pruning alone against iterative magnitude pruning",
        tuple(cells),
        seeds=3,
        where="Table 7",
        plot="curves",
        across="sparsity",
    )
