"""Networks with int8 activations: exactly as defined, close to float32, the same from every compiler and vector."""

import platform
import re

import numpy as np
import pytest
import torch
from torch import nn

import int8_reference
import iterand
from inference_networks import CASES, MadeUp, run_program, scramble_
from iterand.errors import IterandError
from iterand.inference.c.emitter import emit
from iterand.inference.c.export import export_c
from iterand.inference.graph import trace, without_unread_channels
from iterand.inference.quantization import Bytes, calibrate
from test_inference_c import (
    ARM64,
    COMPILERS,
    CROSS,
    NATIVE,
    TICKETS,
    Together,
    build,
    images_for,
    needs,
    run,
    sanitized,
    sparse_,
    wide,
)
from test_inference_compiled import network

pytestmark = pytest.mark.skipif(not COMPILERS, reason="needs gcc or clang")


def sample_for(shape, count=24):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(2))


def quantized(model, shape):
    graph = trace(model.eval(), torch.zeros(1, *shape))
    return graph, calibrate(graph, sample_for(shape))


@pytest.fixture(scope="module")
def operations(tmp_path_factory):
    torch.manual_seed(0)
    models = [(sparse_(scramble_(make())), shape) for make, shape, _ in CASES.values()]
    return Together(models, tmp_path_factory.mktemp("operations"), int8=[quantized(*one)[1] for one in models])


@pytest.mark.parametrize("name", CASES)
def test_operations(name, operations):
    number = list(CASES).index(name)
    model, shape = operations.models[number]
    graph, codes = quantized(model, shape)
    graph = without_unread_channels(graph)
    found = operations.outputs(number)
    expected = [int8_reference.run(graph, codes, image) for image in images_for(shape).numpy()]
    np.testing.assert_array_equal(found, np.array(expected, np.float32).reshape(found.shape))


SEEDS = range(8)


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    models = [(model := sparse_(MadeUp(seed), seed), model.shape) for seed in SEEDS]
    codes = [quantized(*one)[1] for one in models]
    return Together(models, tmp_path_factory.mktemp("made up"), NATIVE, "-w", coded=[True] * 8, int8=codes)


@pytest.mark.parametrize("seed", SEEDS)
def test_networks_made_up_at_random(seed, made_up):
    model, shape = made_up.models[seed]
    graph, codes = quantized(model, shape)
    found = made_up.outputs(seed)
    expected = [int8_reference.run(graph, codes, image) for image in images_for(shape).numpy()]
    np.testing.assert_array_equal(found, np.array(expected, np.float32).reshape(found.shape))


def long_lists():
    """More than 128 weights of a sign in a channel, in planes of many pixels, of few, and of one."""
    torch.manual_seed(1)
    layers = [nn.Conv2d(40, 40, 3, padding=1), nn.Conv2d(40, 60, 3, 2, 1), nn.Flatten(), nn.Linear(540, 40)]
    model = nn.Sequential(*layers[:1], nn.ReLU(), layers[1], nn.ReLU(), *layers[2:], nn.ReLU(), nn.Linear(40, 5))
    with torch.no_grad():
        for layer in model:
            if hasattr(layer, "weight"):
                layer.weight.copy_(layer.weight.sign() * 0.1)
        model[0].weight[3] = 0.1  # 360 additions, whose sum may be too large for 16 bits
    return model.eval()


X86 = [["-O1", "-msse4.1"], ["-O1", "-mavx2"]] if platform.machine() in ("x86_64", "AMD64") else []


@pytest.mark.parametrize(("make", "shape"), [(wide, (3, 14, 15)), (long_lists, (40, 6, 6))])
def test_compilers_and_vectors_give_the_same_bits(make, shape, tmp_path):
    torch.manual_seed(0)
    graph, codes = quantized(make().eval(), shape)
    plain, coded = (emit(graph, coded=coded, activations=codes) for coded in (False, True))
    images = torch.cat([images_for(shape), torch.full((1, *shape), 9.0)]).numpy()  # the last one saturates
    reference = np.array([int8_reference.run(graph, codes, image) for image in images])
    builds = [
        ("scalar", ["-DITERAND_VECTOR=1"]),
        *((flags[-1], flags) for flags in X86),
        ("best", ["-O2", NATIVE]),
    ]
    pairs = [(COMPILERS[0], one) for one in builds] + [(compiler, builds[-1]) for compiler in COMPILERS[1:]]
    for number, (compiler, (name, flags)) in enumerate(pairs):
        source = (plain, coded)[number % 2]
        library = build(source, tmp_path / f"{compiler}{name}", *flags, compiler=compiler)
        np.testing.assert_array_equal(run(library, source, images), reference)


@pytest.mark.skipif(platform.machine() in ("aarch64", "arm64"), reason="this is a 64-bit ARM")
@pytest.mark.parametrize("compiler", [pytest.param(name, marks=needs(name, CROSS, "qemu-aarch64")) for name in ARM64])
def test_64_bit_arm_gives_the_same_bits(compiler, tmp_path):
    torch.manual_seed(0)
    graph, codes = quantized(wide().eval(), (3, 14, 15))
    source, inputs = emit(graph, activations=codes), images_for((3, 14, 15)).numpy()
    expected = np.array([int8_reference.run(graph, codes, image) for image in inputs], np.float32)
    (tmp_path / "network.h").write_text(source.header)
    (tmp_path / "network.c").write_text(source.code)
    found = run_program(tmp_path, inputs.tobytes(), *ARM64[compiler], "-O2", "-static", emulator=["qemu-aarch64"])
    assert found == expected.tobytes()


def test_sums_that_do_not_fit_saturate():
    """The reference itself: 360 additions of 255 are limited to 16 bits."""
    assert int8_reference.sums(np.ones(360), np.full((360, 1), 255)) == 32767
    assert int8_reference.sums(-np.ones(360), np.full((360, 1), 255)) == -32768
    assert int8_reference.sums(np.ones(128), np.full((128, 1), 255)) == 128 * 255


def test_steps_are_larger_where_sums_would_not_fit(tmp_path):
    torch.manual_seed(0)
    first, second = nn.Conv1d(1, 6, 5), nn.Linear(900, 8)
    with torch.no_grad():
        first.bias += 2
        second.weight.copy_(torch.where(second.weight > -0.02, 0.05, 0.0))  # sums of hundreds of positive numbers
    model = nn.Sequential(
        first, nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), second, nn.ReLU(), nn.Linear(8, 3)
    )  # fmt: skip
    inputs = images_for((1, 304), 64)
    graph = trace(model.eval(), torch.zeros(1, 1, 304))
    codes = calibrate(graph, inputs)
    largest = first(inputs).max().item()
    assert codes["v1"].scale > 1.5 * largest / 255  # the value before pooling and flattening
    assert codes["v1"] == codes["v2"] == codes["v3"]
    source = emit(graph, activations=codes)
    found = run(build(source, tmp_path, "-O2", NATIVE), source, inputs.numpy())
    with torch.no_grad():
        expected = model(inputs).numpy()
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


def test_trained_tickets_are_close_to_float32(tmp_path):
    model = iterand.load_ticket(TICKETS / "best-resnet20-87c5297945.ticket").eval()
    graph = trace(model, torch.zeros(1, 3, 32, 32))
    images = images_for((3, 32, 32), 64)
    source = emit(graph, activations=calibrate(graph, images[:32]))
    found = run(build(source, tmp_path, "-O2", NATIVE), source, images.numpy())
    with torch.no_grad():
        expected = model(images).numpy()
    assert np.sqrt(np.square(found - expected).mean()) < 0.01 * np.abs(expected).max()
    assert (found.argmax(1) == expected.argmax(1)).mean() > 0.9
    plan = emit(graph)
    assert source.arena < plan.arena / 3.5  # a byte instead of four


@pytest.mark.parametrize("vector", [[], ["-DITERAND_VECTOR=1"], [NATIVE]])
def test_no_access_out_of_bounds(vector, tmp_path):
    torch.manual_seed(0)
    graph, codes = quantized(wide().eval(), (3, 14, 15))
    source, image = emit(graph, coded=True, activations=codes), images_for((3, 14, 15), 1)
    found = sanitized(source, image, tmp_path, *vector)
    np.testing.assert_array_equal(found, int8_reference.run(graph, codes, image[0].numpy()))


# Ranges.


def test_a_byte_stands_for_zero_exactly():
    torch.manual_seed(0)
    graph, codes = quantized(wide().eval(), (3, 14, 15))
    assert set(codes) == {"v0", *(node.output.name for node in graph.nodes[:-1])}  # the last one gives floats
    for one in codes.values():
        assert one.decode(np.array([one.zero], np.uint8)) == 0
        assert one.encode(np.zeros(1, np.float32)) == one.zero
    assert codes["v0"].zero > 100
    assert codes["v1"].zero == 0  # after a ReLU


def test_ranges_are_those_of_the_sample():
    graph = trace(nn.Sequential(nn.Conv1d(1, 1, 1), nn.ReLU(), nn.MaxPool1d(2)).eval(), torch.zeros(1, 1, 4))
    sample = torch.tensor([[[-1.0, 0.5, 4.0, 2.0]], [[-2.0, 0.0, 1.0, 3.1]]])
    codes = calibrate(graph, sample)
    assert codes["v0"] == Bytes(6 / 255, 85)
    assert codes["v0"].encode(sample.numpy()).tolist() == [[[43, 106, 255, 170]], [[0, 85, 128, 217]]]
    assert codes["v2"] == codes["v1"]  # pooling only selects
    assert codes["v1"].zero == 0


def test_a_value_that_is_always_zero():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1)).eval()
    nn.init.zeros_(model[0].weight)
    assert calibrate(trace(model, torch.zeros(1, 2)), torch.ones(3, 2))["v1"] == Bytes(1.0, 0)


@pytest.mark.parametrize("number", [torch.inf, torch.nan])
def test_a_sample_that_is_not_finite_is_refused(number):
    graph = trace(nn.Sequential(nn.Linear(3, 2)).eval(), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="an activation is not finite for this sample"):
        calibrate(graph, torch.full((2, 3), number))


# compile_ticket and export_c.


@pytest.fixture(scope="module")
def ticket(tmp_path_factory):
    torch.manual_seed(0)
    model = iterand.prune_(network(), 0.7, weights="signed_constant")
    model(torch.randn(16, 3, 8, 8))
    path = tmp_path_factory.mktemp("ticket") / "mine.ticket"
    iterand.save_ticket(model.eval(), path)
    return path


def test_compile_ticket(ticket):
    sample = sample_for((3, 8, 8), 64)
    run = iterand.compile_ticket(ticket, network(), activations="int8", sample=sample)
    exact = iterand.compile_ticket(ticket, network(), input_shape=(3, 8, 8))
    assert (run.input_shape, run.output_shape, run.is_compiled) == ((3, 8, 8), (5,), True)
    outputs, expected = run(sample), exact(sample)
    assert not torch.equal(outputs, expected)
    assert (outputs - expected).abs().max() < 0.03 * expected.abs().max()
    assert torch.equal(
        iterand.compile_ticket(ticket, network(), activations="int8", sample=sample.numpy())(sample), outputs
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activations": "int8"}, 'activations="int8" needs a sample: a batch of inputs, from which ranges are chosen'),
        ({"activations": "int4"}, "activations is 'int4'; it is one of 'float32', 'int8'"),
        ({"sample": np.zeros((2, 3))}, 'a sample is given, which activations="float32" has no use for; leave it out'),
        ({"activations": "int8", "sample": np.zeros(3)}, "sample is torch.float64 of shape (3,); it must be a batch"),
        (
            {"activations": "int8", "sample": np.zeros((0, 3, 8, 8))},
            "sample is torch.float64 of shape (0, 3, 8, 8); it",
        ),
        (
            {"activations": "int8", "sample": "inputs.npy"},
            "sample is a str; it must be a batch of floating-point inputs",
        ),
        (
            {"activations": "int8", "sample": torch.zeros(2, 3, 8, 8)},
            "all numbers of the sample are 0, which says nothing about ranges; it must be a batch",
        ),
        (
            {"activations": "int8", "sample": torch.zeros(2, 3, 8, 8).byte()},
            "sample is torch.uint8 of shape (2, 3, 8, 8)",
        ),
        (
            {"activations": "int8", "sample": torch.randn(2, 3, 8, 8), "input_shape": (3, 9, 9)},
            "input_shape is (3, 9, 9) and the inputs of the sample are (3, 8, 8)",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, ticket):
    with pytest.raises(ValueError, match=re.escape(message)):
        iterand.compile_ticket(ticket, network(), **arguments)


def test_export(ticket, tmp_path):
    model = iterand.load_ticket(ticket, network())
    floats = export_c(model, sample_for((3, 8, 8)), tmp_path / "float32")
    done = export_c(model, sample_for((3, 8, 8)), tmp_path / "int8", activations="int8")
    assert 0 < done.difference < 0.05
    assert done.arena < floats.arena / 2
    assert "#define NETWORK_INT8" in (tmp_path / "int8" / "network.c").read_text()
    with pytest.raises(ValueError, match="activations is 'bytes'"):
        export_c(model, sample_for((3, 8, 8)), tmp_path / "other", activations="bytes")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("seed", [0, 4])
def test_a_narrow_range_far_from_zero(seed, tmp_path):
    """An alarm that is almost always off: its bias is many times as large as its output."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 400)
    model = iterand.prune_(alarm(), 0.5, weights="signed_constant", seed=seed, biases="keep").eval()
    with torch.no_grad():
        model[0].bias.fill_(0.0).sub_(model[0](inputs).topk(3, 0).values[-1])
        expected = model(inputs)
    iterand.save_ticket(model, tmp_path / "a.ticket")
    found = iterand.compile_ticket(tmp_path / "a.ticket", alarm(), activations="int8", sample=inputs)(inputs)
    assert 1 <= (found > 0).sum() <= 6
    assert (found - expected).abs().max() < 0.5 * expected.max()


def alarm():
    return nn.Sequential(nn.Linear(400, 1), nn.ReLU())


def normed():
    return nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def sample_of_sizes(sizes, path):
    """A ticket of a network for features of these sizes, and a sample."""
    torch.manual_seed(0)
    model = iterand.prune_(normed(), 0.5, weights="signed_constant")
    for _ in range(100):
        model(sizes * (torch.randn(64, 8) + 3))
    iterand.save_ticket(model.eval(), path)
    return sizes * (torch.randn(256, 8) + 3)


@pytest.mark.parametrize("way", ["compile", "export"])
@pytest.mark.parametrize("power", [0, 1.6, 4])
def test_inputs_of_different_sizes_are_warned_of_and_refused(power, way, tmp_path, caplog):
    sample = sample_of_sizes(torch.logspace(0, power, 8), path := tmp_path / "a.ticket")

    def difference():
        if way == "compile":
            return iterand.compile_ticket(path, normed(), activations="int8", sample=sample).difference
        return export_c(iterand.load_ticket(path, normed()), sample, tmp_path / "c", activations="int8").difference

    sentence = "with int8 the outputs for the sample differ from those in float32 by"
    if power == 4:
        with pytest.raises(IterandError, match=sentence):
            difference()
    else:
        low, high = (0.1, 0.5) if power else (0, 0.1)
        assert low < difference() < high
    said = [record.getMessage() for record in caplog.records if record.name == "iterand"]
    assert [one.startswith(sentence) for one in said] == [True] * (0 < power < 4)
