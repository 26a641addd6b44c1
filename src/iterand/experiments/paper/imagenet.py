"""ImageNet: Figure 3 and Appendix C.5."""

from iterand.experiments.experiment import Experiment
from iterand.experiments.paper.cells import cell, start
from iterand.training import recipe_file

_PRUNING = ("IteRand (SC)", "edge-popup (SC)")


def figure3() -> Experiment:
    """Accuracy over the number of parameters."""
    methods = {"ResNet18": ("SGD",), "ResNet34": ("SGD", *_PRUNING), "ResNet50": _PRUNING, "ResNet101": _PRUNING}
    cells = (
        cell("figure3", start(f"imagenet-{network.lower()}", method), network=network, method=method)
        for network in methods
        for method in methods[network]
    )
    return Experiment(
        "figure3",
        "Accuracy over the number of parameters on ImageNet",
        tuple(cells),
        seeds=1,
        where="Figure 3a, Table 4",
        plot="parameters",
    )


def figure3_curves() -> Experiment:
    """How the accuracy grows; the runs are two of those of Figure 3a."""
    cells = (
        cell("figure3", start("imagenet-resnet50", method), network="ResNet50", method=method) for method in _PRUNING
    )
    return Experiment(
        "figure3-curves",
        "Accuracy during the training of ResNet50 on ImageNet",
        tuple(cells),
        seeds=1,
        where="Figure 3b",
        plot="training",
    )


def large() -> Experiment:
    """Two large networks."""
    wide = {method: start("imagenet-wide-resnet50-2", method) for method in _PRUNING}
    twice = {
        method: recipe_file.override(start("imagenet-resnet50", method), ["width_factor=2.0"]) for method in _PRUNING
    }
    cells = (
        cell("large", recipes[method], network=network, method=method)
        for network, recipes in (("WideResNet-50-2", wide), ("ResNet50 (ρ = 2)", twice))
        for method in _PRUNING
    )
    return Experiment(
        "large", "Large networks on ImageNet", tuple(cells), seeds=1, where="Table 9", plot="parameters"
    )  # fmt: skip
