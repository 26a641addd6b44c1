"""The experiments: their cells, the paper's numbers beside them, profiles and dry runs."""

import dataclasses

import pytest
import torch
from torch import nn

from iterand.lab.experiments import library, sweep
from iterand.lab.experiments.catalog import experiment_names, find_experiment, tiny
from iterand.lab.experiments.experiment import find_number
from iterand.lab.experiments.library import adapt, find_recipe, profile_names
from iterand.lab.networks import build_network
from iterand.lab.training import recipe_file

# Experiment: cells, cells with a number of the paper, runs of each cell.
SIZES = {
    "digits": (3, 0, 3),
    "figure1": (12, 0, 3),
    "figure2": (60, 60, 3),
    "figure3": (8, 8, 1),
    "figure3-curves": (2, 2, 1),
    "period": (15, 0, 3),
    "period-rate": (16, 0, 3),
    "overhead": (3, 3, 1),
    "sparsity": (28, 28, 3),
    "imp": (30, 30, 3),
    "width": (6, 6, 3),
    "large": (4, 4, 1),
    "imdb": (6, 6, 5),
    "best": (28, 14, 3),
    "few-labels": (10, 0, 3),
    "long": (2, 0, 3),
    "ablation": (22, 0, 3),
    "gain": (30, 0, 3),
    "family": (112, 0, 3),
    "claims": (6, 2, 3),
}
# Copied by hand from the paper: table, axes, mean, deviation, where.
SAMPLE = [
    ("figure2", {"network": "Conv6", "method": "IteRand (SC)", "width": 1.0}, 88.80, 0.20, "Table 3"),
    ("figure2", {"network": "Conv6", "method": "edge-popup (KU)", "width": 0.25}, 67.02, 1.14, "Table 3"),
    ("figure2", {"network": "ResNet18", "method": "IteRand (KU)", "width": 0.5}, 89.96, 0.06, "Table 3"),
    ("figure2", {"network": "ResNet34", "method": "SGD", "width": 2.0}, 95.33, 0.10, "Table 3"),
    ("figure3", {"network": "ResNet101", "method": "IteRand (SC)"}, 72.99, None, "Table 4"),
    ("figure3", {"network": "ResNet34", "method": "edge-popup (SC)"}, 62.14, None, "Table 4"),
    ("overhead", {"method": "SGD"}, 6388.61, None, "Table 5"),
    ("overhead", {"method": "IteRand"}, 6253.69, None, "Table 5"),
    ("sparsity", {"network": "Conv6", "method": "edge-popup (SC)", "sparsity": 0.99}, 12.13, 3.46, "Table 6"),
    ("sparsity", {"network": "ResNet18", "method": "IteRand (SC)", "sparsity": 0.95}, 90.40, 0.42, "Table 6"),
    ("imp", {"network": "ResNet20", "method": "IteRand (SC)", "sparsity": 0.9}, 70.96, 0.55, "Table 7"),
    ("imp", {"network": "ResNet20", "method": "IMP", "sparsity": 0.9}, 86.87, 0.26, "Table 7"),
    ("imp", {"network": "VGG11", "method": "IMP", "sparsity": 0.99}, 88.076, 0.17, "Table 7"),
    ("width", {"method": "edge-popup (KU)", "width": 0.65}, 89.99, 0.08, "Table 8"),
    ("large", {"network": "ResNet50 (ρ = 2)", "method": "IteRand (SC)"}, 74.05, None, "Table 9"),
    ("large", {"network": "WideResNet-50-2", "method": "edge-popup (SC)"}, 71.59, None, "Table 9"),
    ("imdb", {"network": "LSTM", "method": "IteRand (SC)"}, 88.44, 0.28, "Table 10"),
    ("imdb", {"network": "BiLSTM", "method": "SGD"}, 87.62, 0.22, "Table 10"),
    ("randomization", {"network": "ResNet50"}, 200.55, None, "Appendix C.2"),
]


@pytest.mark.parametrize(("table", "axes", "mean", "std", "where"), SAMPLE)
def test_the_papers_numbers(table, axes, mean, std, where):
    number = find_number(table, axes)
    assert (number.mean, number.std) == (mean, std)
    assert number.where.startswith(where)


def test_parameters_of_the_imagenet_tables():
    found = {
        (dict(cell.axes)["network"], cell.paper.parameters)
        for name in ("figure3", "large")
        for cell in find_experiment(name).cells
    }
    assert found == {
        ("ResNet18", 11.16),
        ("ResNet34", 21.26),
        ("ResNet34", 6.38),
        ("ResNet50", 7.04),
        ("ResNet101", 12.72),
        ("WideResNet-50-2", 68.8),
        ("ResNet50 (ρ = 2)", 97.8),
    }


@pytest.mark.parametrize("name", SIZES)
def test_every_cell_is_there_once_with_its_number(name):
    experiment = find_experiment(name)
    cells, numbers, seeds = SIZES[name]
    assert (experiment.name, len(experiment.cells), experiment.seeds) == (name, cells, seeds)
    assert sum(cell.paper is not None for cell in experiment.cells) == numbers
    assert len({cell.label for cell in experiment.cells}) == cells
    assert len({cell.axes for cell in experiment.cells}) == cells
    assert len({recipe_file.digest(cell.recipe) for cell in experiment.cells}) == cells
    assert not experiment.across or all(experiment.across in dict(cell.axes) for cell in experiment.cells)


def test_all_numbers_of_the_tables_are_attached():
    attached = {
        (cell.paper, cell.label) for name in ("figure2", "sparsity", "imp") for cell in find_experiment(name).cells
    }
    assert len(attached) == 60 + 28 + 30
    assert set(SIZES) == set(experiment_names())


def test_a_cell_of_figure_2():
    cell = next(cell for cell in find_experiment("figure2").cells if cell.label == "Conv6, IteRand (KU), ρ = 0.25")
    assert cell.axes == (("network", "Conv6"), ("method", "IteRand (KU)"), ("width", 0.25))
    assert (cell.paper.mean, cell.paper.std) == (73.90, 0.47)
    assert (cell.recipe.network.width_factor, cell.recipe.name) == (0.25, "conv6")
    assert [recipe.seed for recipe in cell.runs(3)] == [0, 1, 2]


def test_experiments_share_their_runs():
    def runs(name, profile="paper"):
        return {recipe_file.digest(cell.recipe) for cell in find_experiment(name, profile).cells}

    assert runs("figure3-curves") < runs("figure3")
    assert runs("overhead") < runs("figure2")
    assert len(runs("width") - runs("figure2")) == 2
    assert len(runs("figure1") & runs("figure2")) == 6
    assert len(runs("period") & runs("figure1")) == 3
    assert len(runs("best") & runs("figure2", "best")) == 3
    assert len(runs("best") & runs("imp", "best")) == 10
    assert len(runs("claims") & runs("family")) == 2
    assert len(runs("claims") & runs("figure2")) == 1
    ours = ("best", "few-labels", "long", "ablation", "gain", "family", "claims")
    for name in ("digits", "figure3", "large", "imdb", *ours):
        assert runs(name) == runs(name, "text") == runs(name, "best")


@pytest.mark.parametrize("name", ["best-conv6", "best-resnet18", "best-resnet20", "best-resnet34", "best-vgg11"])
def test_a_best_recipe_is_the_profile_best_of_the_papers(name):
    of_paper = find_recipe(name.removeprefix("best-"))
    best = find_recipe(name)
    assert best == dataclasses.replace(adapt(of_paper, "best"), description=best.description)
    assert recipe_file.digest(best) != recipe_file.digest(of_paper)


def test_the_profile_best():
    cells = {cell.label: cell.recipe for cell in find_experiment("imp", "best").cells}
    iterand, edge_popup = (cells[f"ResNet20, {method} (SC), p = 0.7"] for method in ("IteRand", "edge-popup"))
    for recipe in (iterand, edge_popup):
        assert (recipe.method.ranking, recipe.method.norms) == ("global", "shifted")
        assert (recipe.learning_rate.schedule, recipe.method.sparsity_schedule) == ("cosine", "cubic")
    assert (iterand.method.candidates, iterand.method.redrawn_scores, iterand.method.rate) == ("negative", "follow", 1)
    assert edge_popup.method.candidates == "pruned"
    assert cells["ResNet20, IMP, p = 0.99"] == find_experiment("imp").cells[-1].recipe
    conv6 = find_experiment("figure2", "best").cells[0].recipe
    assert (conv6.network.name, conv6.method.ranking, conv6.method.norms) == ("conv6", "layer", "fixed")


@pytest.mark.parametrize(
    ("network", "sparsity", "smoothing", "statistics", "ranking", "augmentation", "epochs"),
    [
        ("VGG11", 0.5, 0.1, "recomputed", "layer", "crop_cutout", 320),
        ("VGG11", 0.7, 0.1, "recomputed", "layer", "crop_cutout", 480),
        ("VGG11", 0.9, 0.1, "recomputed", "global", "crop", 160),
        ("VGG11", 0.95, 0.0, "running", "global", "crop", 160),
        ("ResNet20", 0.5, 0.0, "recomputed", "global", "crop", 320),
        ("ResNet20", 0.7, 0.0, "recomputed", "global", "crop", 160),
        ("ResNet20", 0.99, 0.0, "recomputed", "global", "none", 320),
    ],
)
def test_what_the_profile_best_does_by_sparsity(
    network, sparsity, smoothing, statistics, ranking, augmentation, epochs
):
    (recipe,) = (
        cell.recipe
        for cell in find_experiment("best").cells
        if dict(cell.axes) == {"network": network, "method": "IteRand", "sparsity": sparsity}
    )
    training = recipe.training
    assert (training.label_smoothing, training.norm_statistics, training.epochs) == (smoothing, statistics, epochs)
    assert (recipe.method.ranking, recipe.data.augmentation) == (ranking, augmentation)


def test_the_learning_rate_makes_up_for_the_temperature_at_high_sparsity():
    for sparsity, temperature, share, period in ((0.95, 1.0, 0.5, 300), (0.99, 0.25, 0.8, 1000)):
        recipe = find_recipe("best-resnet20", [f"sparsity={sparsity}"])
        rate = recipe.learning_rate.initial
        assert recipe.training.temperature == temperature
        assert rate / temperature == 0.5  # how far a step goes
        assert rate * recipe.optimizer.weight_decay == pytest.approx(5e-5)  # how soon a score forgets
        assert (recipe.method.sparsity_schedule_share, recipe.method.period) == (share, period)


def test_the_ablation_is_short_with_twice_the_weight_decay():
    for cell in find_experiment("ablation").cells:
        recipe = cell.recipe
        whole = find_recipe("best-resnet20", [f"sparsity={recipe.method.sparsity}"])
        assert (recipe.training.epochs, recipe.optimizer.weight_decay) == (40, 2 * whole.optimizer.weight_decay)


def test_the_profile_best_keeps_the_rate_in_experiments_about_the_rate():
    for name in ("figure1", "period-rate"):
        of_paper, best = (find_experiment(name, profile).cells for profile in ("paper", "best"))
        assert [cell.recipe.method.rate for cell in of_paper] == [cell.recipe.method.rate for cell in best]


@pytest.mark.parametrize("name", experiment_names())
def test_dry_runs_are_short_marked_and_still_distinct(name):
    full, small = find_experiment(name), find_experiment(name, scale="tiny")
    assert small.seeds == 1
    assert [cell.label for cell in small.cells] == [cell.label for cell in full.cells]
    assert len({recipe_file.digest(cell.recipe) for cell in small.cells}) == len(small.cells)
    for before, after in zip(full.cells, small.cells):
        recipe = after.recipe
        assert (recipe.scale, before.recipe.scale) == ("tiny", "full")
        assert recipe.name == f"tiny-{before.recipe.name}"
        assert recipe_file.digest(recipe) != recipe_file.digest(before.recipe)
        assert recipe.training.epochs * recipe.data.limit / recipe.training.batch_size <= 16
        assert (recipe.network.name, recipe.method.name) == (before.recipe.network.name, before.recipe.method.name)


def test_periods_of_dry_runs_come_round():
    periods = [
        tiny(recipe_file.override(find_recipe("conv6"), [f"period={period}"])).method.period
        for period in (1, 30, 300, 3000, 30000)
    ]
    assert periods == [1, 2, 3, 4, 5]


def test_names_get_a_suggestion():
    with pytest.raises(ValueError, match="unknown experiment 'figure'; did you mean 'figure3'"):
        find_experiment("figure")
    with pytest.raises(ValueError, match="unknown profile 'papre'; there are paper, text, best"):
        find_experiment("digits", "papre")
    with pytest.raises(ValueError, match="unknown scale 'small'; there are full, tiny"):
        find_experiment("digits", scale="small")
    assert profile_names() == ["paper", "text", "best"]


def multiply_adds(name, shape):
    """Counted while the network runs: outputs times the weights that each needs."""
    network, count = build_network(name), 0

    def add(layer, inputs, output):
        nonlocal count
        count += output.numel() * layer.weight[0].numel()

    for layer in network.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            layer.register_forward_hook(add)
    with torch.no_grad():
        network.eval()(torch.zeros(1, *shape))
    return count


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("digits_conv", (1, 8, 8)),
        *((name, (3, 32, 32)) for name in ("conv6", "resnet18_cifar", "resnet34_cifar", "resnet20", "vgg11")),
        ("resnet18_imagenet", (3, 224, 224)),
    ],
)
def test_cost_of_a_network(name, shape):
    assert pytest.approx(multiply_adds(name, shape), rel=0.1) == sweep.MULTIPLY_ADDS[name]


def test_cost_of_runs():
    recipe = find_recipe("resnet18")
    operations = 6 * 555e6 * 45_000 * 100
    assert sweep.gpu_minutes([recipe]) == pytest.approx(operations / 1e14 / 60)
    assert sweep.gpu_minutes([recipe, recipe]) == pytest.approx(2 * sweep.gpu_minutes([recipe]))
    narrow = recipe_file.override(recipe, ["width_factor=0.25", "limit=128"])
    assert sweep.gpu_minutes([narrow]) == pytest.approx(100 * 2e-3 / 60)  # an epoch is one step, of the shortest kind


def test_our_recipes_follow_the_sparsity_that_is_set():
    cells = {cell.label: cell.recipe for cell in find_experiment("best").cells}
    for network, name in (("VGG11", "best-vgg11"), ("ResNet20", "best-resnet20")):
        for sparsity in (0.5, 0.7, 0.9, 0.95, 0.99):
            recipe = find_recipe(name, [f"method.sparsity={sparsity}"])
            assert recipe_file.digest(recipe) == recipe_file.digest(cells[f"{network}, p = {sparsity:g}"])
    late = find_recipe("best-vgg11", ["select_epoch=best_validation", "sparsity_schedule=constant", "sparsity=0.95"])
    assert late.training.norm_statistics == "running"  # which the sparsity of the paper would not allow beside "best"
    said = find_recipe("best-vgg11", ["sparsity=0.5", "label_smoothing=0.2"])
    assert (said.training.label_smoothing, said.method.ranking) == (0.2, "layer")


def test_a_users_recipe_that_extends_best_follows_its_sparsity(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text('extends = "best-vgg11"\nname = "own"\n[method]\nsparsity = 0.5\n')
    assert recipe_file.digest(find_recipe(str(own))) == recipe_file.digest(find_recipe("best-vgg11", ["sparsity=0.5"]))
    at_95 = find_recipe("best-vgg11", ["sparsity=0.95"])
    assert recipe_file.digest(find_recipe(str(own), ["sparsity=0.95"])) == recipe_file.digest(at_95)


@pytest.mark.parametrize(
    ("sparsity", "epochs"), [(0.0, 320), (0.5, 320), (0.51, 480), (0.7, 480), (0.71, 160), (0.9, 160), (0.99, 160)]
)
def test_a_table_when_applies_up_to_its_limit_and_the_last_one_wins(sparsity, epochs):
    assert find_recipe("best-vgg11", [f"sparsity={sparsity}"]).training.epochs == epochs
    assert find_recipe("best-vgg11", ["epochs=7", f"sparsity={sparsity}"]).training.epochs == 7


@pytest.mark.parametrize(
    ("condition", "holds"),
    [("< 0.5", [0.4]), ("<= 0.5", [0.4, 0.5]), ("> 0.5", [0.6]), (">= 0.5", [0.5, 0.6])],
)
def test_conditions_of_a_table_when(tmp_path, monkeypatch, condition, holds):
    (tmp_path / "base.toml").write_text(f'[[when]]\nsparsity = "{condition}"\nmethod.rate = 0.7\ntraining.epochs = 3\n')
    (tmp_path / "child.toml").write_text('extends = "base"\n[method]\nsparsity = 0.4\n[training]\nepochs = 9\n')
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    monkeypatch.setattr(library, "_names", lambda: ["base", "child"])
    library._of_package.cache_clear()
    try:
        for sparsity in (0.4, 0.5, 0.6):
            expected = 0.7 if sparsity in holds else 0.1
            base = find_recipe("base", [f"sparsity={sparsity}"])
            assert (base.method.rate, base.training.epochs) == (expected, 3 if sparsity in holds else 10)
            child = find_recipe("child", [f"sparsity={sparsity}"])
            assert (child.method.rate, child.training.epochs) == (expected, 9)  # its own settings win
        assert find_recipe("child").method.rate == (0.7 if 0.4 in holds else 0.1)  # its own sparsity decides
    finally:
        library._of_package.cache_clear()


@pytest.mark.parametrize("name", ["best", "digits"])
def test_an_unknown_profile_is_refused_where_it_changes_nothing_too(name):
    with pytest.raises(ValueError, match="unknown profile 'bset'; there are paper, text, best"):
        find_experiment(name, "bset")
