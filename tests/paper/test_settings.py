"""The settings of Appendix B and C, written out from the text, against the recipes of the cells."""

import pytest

from iterand.lab.experiments.catalog import experiment_names, find_experiment
from iterand.lab.training.loop import learning_rate


def cells(name, profile="paper", **axes):
    found = [
        cell
        for cell in find_experiment(name, profile).cells
        if all(dict(cell.axes)[axis] == value for axis, value in axes.items())
    ]
    assert found
    return found


def recipe(name, profile="paper", **axes):
    (cell,) = cells(name, profile, **axes)
    return cell.recipe


@pytest.mark.parametrize(
    ("network", "method", "rate", "decay", "sparsity"),
    [
        ("Conv6", "SGD", 0.01, 1e-4, None),
        ("Conv6", "edge-popup (SC)", 0.3, 1e-4, 0.5),
        ("Conv6", "IteRand (KU)", 0.3, 1e-4, 0.5),
        ("ResNet18", "SGD", 0.1, 5e-4, None),
        ("ResNet18", "edge-popup (KU)", 0.1, 5e-4, 0.6),
        ("ResNet34", "IteRand (SC)", 0.1, 5e-4, 0.6),
        ("ResNet34", "SGD", 0.1, 5e-4, None),
    ],
)
def test_cifar10_of_appendix_b(network, method, rate, decay, sparsity):
    for width in (0.25, 0.5, 1.0, 2.0):
        found = recipe("figure2", network=network, method=method, width=width)
        assert (found.training.epochs, found.training.batch_size, found.optimizer.momentum) == (100, 128, 0.9)
        assert (found.learning_rate.initial, found.learning_rate.schedule) == (rate, "cosine")
        assert found.optimizer.weight_decay == decay
        assert (found.data.name, found.network.width_factor) == ("cifar10", width)
        if sparsity is not None:
            weights = {"SC": "signed_constant", "KU": "kaiming_uniform"}[method[-3:-1]]
            assert (found.method.sparsity, found.method.weight_distribution) == (sparsity, weights)
            assert (found.method.score_distribution, found.method.ranking) == ("kaiming_uniform", "layer")
        if method.startswith("IteRand"):
            assert (found.method.name, found.method.period, found.method.rate) == ("iterand", 300, 0.1)


def test_epochs_have_351_iterations_as_in_appendix_c1():
    found = recipe("figure2", network="Conv6", method="SGD", width=1.0)
    assert found.data.drop_last
    assert 45_000 // found.training.batch_size == 351


def test_the_authors_settings_and_the_texts():
    place = {"network": "Conv6", "width": 1.0}
    authors = recipe("figure2", method="IteRand (SC)", **place)
    assert (authors.data.augmentation, authors.data.normalization) == ("resized_crop", "default")
    text = recipe("figure2", "text", method="IteRand (SC)", **place)
    assert (text.data.augmentation, text.data.normalization) == ("crop", "cifar10")
    assert text.learning_rate.initial == 0.2
    assert recipe("figure2", "text", method="edge-popup (KU)", **place).learning_rate.initial == 0.2
    assert recipe("figure2", "text", method="SGD", **place).learning_rate.initial == 0.01
    resnet = recipe("figure2", "text", network="ResNet18", method="IteRand (SC)", width=1.0)
    assert resnet.learning_rate.initial == 0.1


@pytest.mark.parametrize("name", ["figure3", "figure3-curves", "large"])
def test_imagenet_of_appendix_b(name):
    for cell in find_experiment(name).cells:
        found, method = cell.recipe, dict(cell.axes)["method"]
        assert (found.training.epochs, found.training.batch_size) == (105, 128)
        assert (found.optimizer.weight_decay, found.optimizer.momentum) == (1e-4, 0.9)
        rates = [learning_rate(found.learning_rate, epoch, 105) for epoch in range(105)]
        assert rates[:6] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1, 0.1])
        assert rates[100:] == [1e-5] * 5
        if method != "SGD":
            assert (found.method.sparsity, found.method.weight_distribution) == (0.7, "signed_constant")
        if method == "IteRand (SC)":
            assert (found.method.name, found.method.period, found.method.rate) == ("iterand", 1000, 0.1)


def test_networks_of_imagenet():
    names = {dict(cell.axes)["network"]: cell.recipe.network for cell in find_experiment("figure3").cells}
    assert {key: value.name for key, value in names.items()} == {
        "ResNet18": "resnet18_imagenet",
        "ResNet34": "resnet34_imagenet",
        "ResNet50": "resnet50_imagenet",
        "ResNet101": "resnet101_imagenet",
    }
    large = {dict(cell.axes)["network"]: cell.recipe.network for cell in find_experiment("large").cells}
    assert {key: (value.name, value.width_factor) for key, value in large.items()} == {
        "WideResNet-50-2": ("wide_resnet50_2", 1.0),
        "ResNet50 (ρ = 2)": ("resnet50_imagenet", 2.0),
    }


def test_ablations_vary_what_they_say_and_nothing_else():
    for network in ("Conv6", "ResNet18", "ResNet34"):
        by_rate = {dict(cell.axes)["rate"]: cell.recipe for cell in cells("figure1", network=network)}
        assert list(by_rate) == [0.0, 0.01, 0.1, 1.0]
        assert by_rate[0.0] == recipe("figure2", network=network, method="edge-popup (KU)", width=1.0)
        assert by_rate[0.1] == recipe("figure2", network=network, method="IteRand (KU)", width=1.0)
        assert [by_rate[rate].method.rate for rate in (0.01, 1.0)] == [0.01, 1.0]
        by_period = {dict(cell.axes)["period"]: cell.recipe for cell in cells("period", network=network)}
        assert list(by_period) == [1, 30, 300, 3000, 30000] == [found.method.period for found in by_period.values()]
        assert by_period[300] == by_rate[0.1]
    grid = {(dict(cell.axes)["period"], dict(cell.axes)["rate"]) for cell in find_experiment("period-rate").cells}
    assert grid == {(period, rate) for period in (1, 30, 300, 3000) for rate in (0.001, 0.01, 0.1, 1.0)}
    assert {find_experiment(name).measure for name in ("figure1", "period")} == {"last_validation_accuracy"}
    assert find_experiment("period-rate").measure == "test_accuracy"


def test_sparsities_of_appendix_c3():
    for network in ("Conv6", "ResNet18"):
        for method in ("IteRand (SC)", "edge-popup (SC)"):
            found = [cell.recipe.method.sparsity for cell in cells("sparsity", network=network, method=method)]
            assert found == [0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99]


@pytest.mark.parametrize("method", ["IteRand (SC)", "edge-popup (SC)", "IMP"])
def test_openlth_defaults_in_the_comparison_with_imp(method):
    for network, name in (("VGG11", "vgg11"), ("ResNet20", "resnet20")):
        found = [cell.recipe for cell in cells("imp", network=network, method=method)]
        assert [one.method.sparsity for one in found] == [0.5, 0.7, 0.9, 0.95, 0.99]
        for one in found:
            assert (one.network.name, one.training.batch_size, one.phase_epochs) == (name, 128, 160)
            assert (one.optimizer.momentum, one.optimizer.weight_decay) == (0.9, 1e-4)
            rates = [learning_rate(one.learning_rate, epoch, 160) for epoch in (0, 79, 80, 119, 120, 159)]
            assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
            assert (one.data.augmentation, one.data.normalization) == ("crop", "cifar10")
            assert one.phases == (4 if method == "IMP" else 1)


@pytest.mark.parametrize(("method", "rate"), [("IteRand (SC)", 2.5), ("edge-popup (SC)", 2.5), ("SGD", 1.0)])
def test_imdb_of_appendix_c6(method, rate):
    for network, name in (("LSTM", "lstm"), ("BiLSTM", "bilstm")):
        found = recipe("imdb", network=network, method=method)
        assert (found.network.name, found.training.epochs, found.learning_rate.initial) == (name, 15, rate)
        assert [learning_rate(found.learning_rate, epoch, 15) for epoch in (0, 14)] == [rate, rate]
        assert (found.training.batch_size, found.data.name) == (64, "imdb")
        if method == "IteRand (SC)":
            assert (found.method.sparsity, found.method.period, found.method.rate) == (0.5, 270 // 6, 1.0)
    assert find_experiment("imdb").seeds == 5


def test_widths_of_appendix_c4_and_times_of_c2():
    found = [(dict(cell.axes)["method"], cell.recipe.network.width_factor) for cell in find_experiment("width").cells]
    assert found == [
        ("IteRand (KU)", 0.5),
        ("IteRand (KU)", 1.0),
        ("edge-popup (KU)", 0.5),
        ("edge-popup (KU)", 0.65),
        ("edge-popup (KU)", 1.0),
        ("edge-popup (KU)", 1.3),
    ]
    overhead = find_experiment("overhead")
    assert overhead.measure == "seconds"
    assert {cell.recipe.network.name for cell in overhead.cells} == {"resnet18_cifar"}


def test_every_run_on_images_computes_in_bfloat16():
    for name in experiment_names():
        for cell in find_experiment(name).cells:
            images = cell.recipe.data.name in ("cifar10", "imagenet")
            assert (cell.recipe.training.precision == "bfloat16") == images
