"""The experiments of the paper, in its order: a function for each figure and table."""

from dataclasses import replace

from iterand.lab.experiments.experiment import Cell, Experiment, find_number
from iterand.lab.experiments.library import find_recipe, recipe_names
from iterand.lab.training import recipe_file
from iterand.lab.training.recipe import Recipe

CIFAR10 = {"Conv6": "conv6", "ResNet18": "resnet18", "ResNet34": "resnet34"}
"""The networks of Figure 2, and the recipe each starts from."""
OPENLTH = {"VGG11": "vgg11", "ResNet20": "resnet20"}
"""The networks of Table 7, which the authors ran in OpenLTH, and the recipe each starts from."""
SPARSITIES = (0.5, 0.7, 0.9, 0.95, 0.99)
"""The sparsities of Table 7."""

_KAIMING_UNIFORM = "IteRand (KU)"
_SIGNED_CONSTANT = ("IteRand (SC)", "edge-popup (SC)")
_METHOD_SETTINGS = {"IteRand": "iterand", "edge-popup": "edge_popup", "SGD": "sgd", "IMP": "imp"}
_WEIGHTS = {"SC": "signed_constant", "KU": "kaiming_uniform"}
_SETTINGS = {  # axes that are settings, with their symbols in the paper
    "width": ("network.width_factor", "ρ"),
    "sparsity": ("method.sparsity", "p"),
    "period": ("method.period", "K_per"),
    "rate": ("method.rate", "r"),
}


def figure1() -> Experiment:
    """The rate r; r = 0 redraws nothing, so it is run as edge-popup (Section 3.2)."""
    cells = list[Cell]()
    for network, base in CIFAR10.items():
        nothing = cell("figure1", start(base, _KAIMING_UNIFORM), network=network, rate=0.0)
        cells.append(Cell(nothing.label, start(base, "edge-popup (KU)"), nothing.axes))
        cells += (
            cell("figure1", start(base, _KAIMING_UNIFORM), network=network, rate=rate) for rate in (0.01, 0.1, 1.0)
        )
    return Experiment(
        "figure1",
        "The rate r: the share of the pruned weights that is redrawn (KU)",
        tuple(cells),
        seeds=3,
        where="Figure 1",
        across="rate",
        measure="last_validation_accuracy",
    )


def figure2() -> Experiment:
    """Three networks, four widths, five pairs of method and distribution."""
    cells = (
        cell("figure2", start(base, method), network=network, method=method, width=width)
        for network, base in CIFAR10.items()
        for method in ("IteRand (SC)", "IteRand (KU)", "edge-popup (SC)", "edge-popup (KU)", "SGD")
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


def figure3() -> Experiment:
    """Accuracy over the number of parameters on ImageNet."""
    methods = {
        "ResNet18": ("SGD",),
        "ResNet34": ("SGD", *_SIGNED_CONSTANT),
        "ResNet50": _SIGNED_CONSTANT,
        "ResNet101": _SIGNED_CONSTANT,
    }
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
    """Accuracy over the epochs; the runs are two of those of Figure 3a."""
    cells = (
        cell("figure3", start("imagenet-resnet50", method), network="ResNet50", method=method)
        for method in _SIGNED_CONSTANT
    )
    return Experiment(
        "figure3-curves",
        "Accuracy during the training of ResNet50 on ImageNet",
        tuple(cells),
        seeds=1,
        where="Figure 3b",
        plot="training",
    )


def period() -> Experiment:
    """The period K_per."""
    cells = (
        cell("period", start(base, _KAIMING_UNIFORM), network=network, period=period)
        for network, base in CIFAR10.items()
        for period in (1, 30, 300, 3000, 30000)
    )
    return Experiment(
        "period",
        "The period K_per: iterations between two randomizations (KU)",
        tuple(cells),
        seeds=3,
        where="Figure 4",
        plot="curves",
        across="period",
        measure="last_validation_accuracy",
    )


def period_rate() -> Experiment:
    """The period K_per and the rate r together."""
    cells = (
        cell("period-rate", start("resnet18", _KAIMING_UNIFORM), period=period, rate=rate)
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


def overhead() -> Experiment:
    """Seconds of a training run; the runs are three of those of Figure 2."""
    methods = {"IteRand": "IteRand (SC)", "edge-popup": "edge-popup (SC)", "SGD": "SGD"}
    cells = (cell("overhead", start("resnet18", full), method=method) for method, full in methods.items())
    return Experiment(
        "overhead",
        "Training time (ResNet18)",
        tuple(cells),
        seeds=1,
        where="Table 5",
        measure="seconds",
    )


def sparsity() -> Experiment:
    """Accuracy at seven sparsities."""
    cells = (
        cell("sparsity", start(CIFAR10[network], method), network=network, method=method, sparsity=sparsity)
        for network in ("Conv6", "ResNet18")
        for method in _SIGNED_CONSTANT
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
    """IteRand and edge-popup beside iterative magnitude pruning, which trains weights."""
    cells = (
        cell("imp", start(base, method), network=network, method=method, sparsity=sparsity)
        for network, base in OPENLTH.items()
        for method in ("IteRand (SC)", "edge-popup (SC)", "IMP")
        for sparsity in SPARSITIES
    )
    return Experiment(
        "imp",
        "Pruning random weights beside iterative magnitude pruning",
        tuple(cells),
        seeds=3,
        where="Table 7",
        plot="curves",
        across="sparsity",
    )


def width() -> Experiment:
    """How much wider a network edge-popup needs for the accuracy of IteRand."""
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


def large() -> Experiment:
    """Two large networks on ImageNet."""
    wide = {method: start("imagenet-wide-resnet50-2", method) for method in _SIGNED_CONSTANT}
    twice = {
        method: recipe_file.override(start("imagenet-resnet50", method), ["width_factor=2.0"])
        for method in _SIGNED_CONSTANT
    }
    cells = (
        cell("large", recipes[method], network=network, method=method)
        for network, recipes in (("WideResNet-50-2", wide), ("ResNet50 (ρ = 2)", twice))
        for method in _SIGNED_CONSTANT
    )
    return Experiment(
        "large", "Large networks on ImageNet", tuple(cells), seeds=1, where="Table 9", plot="parameters"
    )  # fmt: skip


def imdb() -> Experiment:
    """Two recurrent networks, three methods."""
    cells = (
        cell("imdb", start(base, method), network=network, method=method)
        for network, base in (("LSTM", "lstm"), ("BiLSTM", "bilstm"))
        for method in ("IteRand (SC)", "edge-popup (SC)", "SGD")
    )
    return Experiment("imdb", "Film reviews: sentiment (IMDB)", tuple(cells), seeds=5, where="Table 10")


def start(base: str, method: str) -> Recipe:
    """The recipe for a method by its name in the tables, such as ``edge-popup (KU)``.

    Where there is a recipe ``BASE-METHOD``, the method has its own settings, so that one is used.
    """
    name, _, weights = method.removesuffix(")").partition(" (")
    own = f"{base}-{_METHOD_SETTINGS[name]}"
    recipe = find_recipe(own if own in recipe_names() else base)
    changed = replace(recipe.method, name=_METHOD_SETTINGS[name])
    if weights:
        changed = replace(changed, weight_distribution=_WEIGHTS[weights])
    return replace(recipe, method=changed)


def cell(table: str, recipe: Recipe, **axes: str | float) -> Cell:
    """The cell of a table with these axis positions; axes that are settings change the recipe."""
    settings = [f"{_SETTINGS[axis][0]}={value}" for axis, value in axes.items() if axis in _SETTINGS]
    words = [f"{_SETTINGS[axis][1]} = {value:g}" if axis in _SETTINGS else value for axis, value in axes.items()]
    return Cell(
        ", ".join(map(str, words)),
        recipe_file.override(recipe, settings),
        tuple(axes.items()),
        find_number(table, axes),
    )
