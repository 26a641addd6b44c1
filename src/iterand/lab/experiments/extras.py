"""Experiments beyond the paper: digits, the recommended recipes, an ablation, other kinds of masks and their claims."""

import json

from iterand.lab.experiments.experiment import Axis, Cell, Experiment, PaperNumber, find_number
from iterand.lab.experiments.library import find_recipe
from iterand.lab.experiments.paper import CIFAR10, OPENLTH, SPARSITIES
from iterand.lab.training import recipe_file
from iterand.lab.training.recipe import Recipe

DENSE = {"Conv6": "conv6", "ResNet18": "resnet18", "ResNet20": "resnet20", "VGG11": "vgg11"}
"""The networks whose weights are also trained, with the data and the epochs of the recipes ``best-*``."""

PRUNED = {"ResNet20": (0.5, 0.9, 0.99), "VGG11": (0.5, 0.99)}
"""The sparsities at which iterative magnitude pruning is run with the data and the settings of dense SGD."""

UNTRAINED_NORMS: dict[str, list[str]] = {
    "ResNet18": [],
    "ResNet20": [],
    "VGG11": ["learning_rate.initial=0.05"],
}
"""The networks of which dense SGD is also run without trained norms, and what its settings then differ in."""

_ANY_PRUNED = ["candidates=pruned", "redrawn_scores=stay", "rate=0.1"]
WITHOUT = {
    "all of it": [],
    "ranked in each layer": ["ranking=layer"],
    "any pruned weight redrawn, r = 0.1": _ANY_PRUNED,
    "nothing redrawn": ["method.name=edge_popup"],
    "norms fixed": ["norms=fixed"],
    "p constant": ["sparsity_schedule=constant"],
    "running statistics": ["norm_statistics=running"],
}
"""The cells of the ablation: the settings that turn one part of the recipes ``best-*`` off."""

_BLOCKS = [f"stages.{stage}.*.branch.2.convolution" for stage in range(4)]
_BIPROP = ["binarize=true", "weight_distribution=kaiming_normal", "rank_by=magnitude"]
_LOGITS = ["learning_rate.initial=300", "weight_decay=0"]  # for a mask of probabilities σ(s), with the slope σ'
_BERNOULLI = ["mask=bernoulli", *_LOGITS, "sparsity_schedule=constant", *_ANY_PRUNED]
_GEM_MINER = ["mask=gem_miner", "score_distribution=unit_uniform", "sparsity_schedule=geometric"]
FAMILY = {
    "binary": [],
    "Bernoulli": _BERNOULLI,
    "signed": ["mask=signed", *_ANY_PRUNED],
    "multi-coated": ["mask=multicoat", "coats=3"],
    "biprop": [*_BIPROP, *_ANY_PRUNED],
    "GEM-Miner": [*_GEM_MINER, "learning_rate.initial=3", "weight_decay=0", *_ANY_PRUNED],  # scores from 0 to 1
    "recycling": ["redraw_from=kept", "rate=1.0"],
    "shared blocks": [f"share={json.dumps(_BLOCKS)}"],
}
"""The other ways to prune random networks: what they change in a recipe."""
_ONE_COAT = ["mask=binary", "coats=1"]
_TENTH = 4_500
_FEW_LABELS_DECAY = {("best-resnet18-sgd", 0.0): 3e-3, ("best-resnet18", 0.9): 1e-3}  # a tenth of the steps, too
_LONG = 300
_FAMILY_NETWORKS = {"Conv6": "conv6", "ResNet18": "resnet18"}


def digits() -> Experiment:
    """Three methods in a minute, without a download."""
    iterand = find_recipe("digits")
    edge_popup = recipe_file.override(iterand, ["method.name=edge_popup"])
    sgd = recipe_file.override(iterand, ["method.name=sgd", "learning_rate.initial=0.02"])
    cells = tuple(
        Cell(label, recipe, (("method", label),))
        for label, recipe in (("SGD", sgd), ("edge-popup", edge_popup), ("IteRand", iterand))
    )
    return Experiment("digits", "The point of the paper on a laptop: three methods, one narrow network", cells, seeds=3)


def best() -> Experiment:
    """The recommended recipes at cells of the paper's tables, beside dense SGD and IMP on the same data."""
    cells = [_cell(network, "dense SGD", find_recipe(f"best-{base}-sgd"), 0.0) for network, base in DENSE.items()]
    for network, changes in UNTRAINED_NORMS.items():
        recipe = find_recipe(f"best-{DENSE[network]}-sgd", ["train_norms=false", *changes])
        cells.append(_cell(network, "dense SGD, norms untrained", recipe, 0.0))
    number = find_number("sparsity", {"network": "ResNet18", "method": "IteRand (SC)", "sparsity": 0.9})
    cells.append(_cell("ResNet18", "IteRand", find_recipe("best-resnet18", ["sparsity=0.9"]), 0.9, number))
    for network, base in CIFAR10.items():
        number = find_number("figure2", {"network": network, "method": "IteRand (SC)", "width": 1.0})
        recipe = find_recipe(f"best-{base}")
        cells.append(_cell(network, "IteRand", recipe, recipe.method.sparsity, number))
    for network, base in OPENLTH.items():
        for sparsity in SPARSITIES:
            number = find_number("imp", {"network": network, "method": "IMP", "sparsity": sparsity})
            recipe = find_recipe(f"best-{base}", [f"sparsity={sparsity}"])
            cells.append(_cell(network, "IteRand", recipe, sparsity, number))
    cells.append(_cell("ResNet20", "one coat", find_recipe("best-resnet20", ["sparsity=0.5", *_ONE_COAT]), 0.5))
    cells.append(_cell("ResNet20", "best-tiny", find_recipe("best-tiny"), 0.95))
    for network, sparsities in PRUNED.items():
        for sparsity in sparsities:
            recipe = find_recipe(f"best-{DENSE[network]}-imp", [f"sparsity={sparsity}"])
            cells.append(_cell(network, "IMP", recipe, sparsity))
    title = "Recommended settings, beside the paper's IteRand (Conv6, ResNet18, ResNet34), its IMP (VGG11, ResNet20), "
    title += "and dense SGD and IMP on the same data"
    return Experiment("best", title, tuple(cells), seeds=3, where="ours")


def _cell(network: str, method: str, recipe: Recipe, sparsity: float, number: PaperNumber | None = None) -> Cell:
    axes: tuple[Axis, ...] = (("network", network), ("method", method), ("sparsity", sparsity))
    words = (network, method if method != "IteRand" else "", f"p = {sparsity:g}" if sparsity else "")
    return Cell(", ".join(filter(None, words)), recipe, axes, number)


def few_labels() -> Experiment:
    """Dense SGD, the paper's settings and the recommended ones on data for which only weight decay was ever chosen."""
    cells = list[Cell]()
    for network, base, sparsities in (("Conv6", "conv6", (0.5,)), ("ResNet18", "resnet18", (0.6, 0.9))):
        named = [("dense SGD", f"best-{base}-sgd", 0.0)]
        named += [("the paper's", base, sparsity) for sparsity in sparsities]
        named += [("ours", f"best-{base}", sparsity) for sparsity in sparsities]
        for method, name, sparsity in named:
            changes = [f"train_limit={_TENTH}", *([f"sparsity={sparsity}"] if sparsity else [])]
            cells.append(_cell(network, method, find_recipe(name, changes), sparsity))
            if (name, sparsity) in _FEW_LABELS_DECAY:
                chosen = [*changes, f"weight_decay={_FEW_LABELS_DECAY[name, sparsity]}"]
                cells.append(_cell(network, f"{method}, weight decay chosen", find_recipe(name, chosen), sparsity))
    title = f"CIFAR-10 with a tenth of its labels: {_TENTH:,} training images"
    return Experiment("few-labels", title, tuple(cells), seeds=3, where="ours")


def long() -> Experiment:
    """The search and dense SGD, trained three times as long."""
    changes = [f"epochs={_LONG}"]
    cells = (
        _cell("ResNet18", "dense SGD", find_recipe("best-resnet18-sgd", changes), 0.0),
        _cell("ResNet18", "IteRand", find_recipe("best-resnet18", [*changes, "sparsity=0.9"]), 0.9),
    )
    title = f"{_LONG} epochs of ResNet18 with the recommended settings: dense SGD and the search at p = 0.9"
    return Experiment("long", title, cells, seeds=3, where="ours")


def ablation() -> Experiment:
    """What each part of the recommended settings adds, in a short search: a quarter of the epochs, twice the decay."""
    cells = list[Cell]()
    for sparsity in (0.5, 0.9, 0.99):
        whole = find_recipe("best-resnet20", [f"sparsity={sparsity}"])
        short = ["epochs=40", f"weight_decay={2 * whole.optimizer.weight_decay}"]
        without = WITHOUT | ({"one coat": _ONE_COAT} if whole.method.coats > 1 else {})
        for label, changes in without.items():
            axes = (("sparsity", sparsity), ("recipe", label))
            cells.append(Cell(f"p = {sparsity:g}, {label}", recipe_file.override(whole, [*short, *changes]), axes))
    title = "Ablation of the recommended settings: ResNet20, 40 epochs, one part left out at a time"
    return Experiment("ablation", title, tuple(cells), seeds=3, where="ours")


def gain() -> Experiment:
    """Larger weights in networks without norms, by how much is pruned."""
    cells = list[Cell]()
    exponents = {"1": 0.0, "(1 − p)^(−1/4)": -0.25, "(1 − p)^(−1/2)": -0.5}
    shares = (0.5, 0.8, 0.9, 0.95)
    for network, base, sparsities in (
        ("Digits, ρ = 0.25", find_recipe("digits"), shares),
        ("Digits", find_recipe("digits", ["width_factor=1"]), shares),
        ("Conv6", find_recipe("best-conv6"), (0.5, 0.9)),
    ):
        for sparsity in sparsities:
            for label, exponent in exponents.items():
                factor = round((1 - sparsity) ** exponent, 2)
                recipe = recipe_file.override(base, [f"sparsity={sparsity}", f"gain={factor}"])
                axes = (("network", network), ("sparsity", sparsity), ("gain", label))
                cells.append(Cell(f"{network}, p = {sparsity:g}, gain {label}", recipe, axes))
    title = "The gain of the weights, in networks without norms"
    return Experiment("gain", title, tuple(cells), seeds=3, where="ours")


def family() -> Experiment:
    """Other kinds of masks, with and without randomization, under the paper's settings and under ours."""
    cells = list[Cell]()
    for network, base in _FAMILY_NETWORKS.items():
        for settings, recipe in (("the paper's", find_recipe(base)), ("ours", find_recipe(f"best-{base}"))):
            for sparsity in (0.5, 0.9):
                for kind, changes in FAMILY.items():
                    if kind == "shared blocks" and network == "Conv6":
                        continue  # it has no two layers of one shape
                    for method in ("edge_popup", "iterand"):
                        if kind == "recycling" and method == "edge_popup":
                            continue  # nothing would be redrawn
                        chosen = [f"sparsity={sparsity}", f"method.name={method}", *changes]
                        randomized = "IteRand" if method == "iterand" else "never redrawn"
                        axes = (("network", network), ("settings", settings), ("sparsity", sparsity))
                        label = f"{network}, {settings}, p = {sparsity:g}, {kind}, {randomized}"
                        more = (("kind", kind), ("randomization", randomized))
                        cells.append(Cell(label, recipe_file.override(recipe, chosen), (*axes, *more)))
    title = "Other kinds of masks on CIFAR-10, never redrawn and with IteRand"
    return Experiment("family", title, tuple(cells), seeds=3, where="ours")


def claims() -> Experiment:
    """What the papers of other kinds of masks claim, on networks that they were published for."""
    coats = find_recipe("resnet18", ["method.name=edge_popup"])
    recycled = find_recipe("conv6", ["sparsity=0.9"])
    biprop = ["augmentation=crop", "sparsity=0.8", "norms=keep", "method.name=edge_popup", *_BIPROP]
    zhou = ["augmentation=none", "method.name=edge_popup", *_BERNOULLI]
    cells = (
        Cell(
            "ResNet18, biprop, norms trained, p = 0.8",
            find_recipe("resnet18", biprop),
            (("method", "biprop"),),
            PaperNumber(94.8, None, "Diffenderfer and Kailkhura (2021)"),
        ),
        Cell(
            "Conv6, Bernoulli supermask, images not augmented, p = 0.5",
            find_recipe("conv6", zhou),
            (("method", "Bernoulli"),),
            PaperNumber(76.5, None, "Zhou et al. (2019)"),
        ),
        Cell("ResNet18, one coat, p = 0.6", coats, (("method", "one coat"),)),
        Cell(
            "ResNet18, three coats, p = 0.6",
            recipe_file.override(coats, FAMILY["multi-coated"]),
            (("method", "three coats"),),
        ),
        Cell("Conv6, fresh draws, p = 0.9", recycled, (("method", "fresh draws"),)),
        Cell(
            "Conv6, recycled draws, p = 0.9",
            recipe_file.override(recycled, FAMILY["recycling"]),
            (("method", "recycled draws"),),
        ),
    )
    return Experiment("claims", "What the papers of other kinds of masks claim", cells, seeds=3, where="ours")
