"""Networks as C: the same outputs as torch, the same bits from every compiler and vector, and nothing out of bounds."""

import ctypes
import platform
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import iterand
from inference_networks import CASES, MadeUp, run_program, scramble_
from iterand.errors import IterandError
from iterand.inference.c import export
from iterand.inference.c.emitter import emit
from iterand.inference.c.export import export_c
from iterand.inference.graph import trace
from iterand.inference.plan import make_plan

TICKETS = Path(__file__).parents[1] / "results" / "tickets"
COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)]
NATIVE = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror"]
pytestmark = pytest.mark.skipif(not COMPILERS, reason="needs gcc or clang")


def needs(*programs):
    missing = [name for name in programs if not shutil.which(name)]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def build(source, folder, *flags, compiler=None):
    folder.mkdir(exist_ok=True)
    (folder / "network.h").write_text(source.header)
    (folder / "network.c").write_text(source.code)
    command = [compiler or COMPILERS[0], "-std=c99", "-O0", "-ffp-contract=off", *WARNINGS, *flags]
    subprocess.run([*command, "-fPIC", "-shared", "-o", "network.so", "network.c"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "network.so"))


def run(library, source, images):
    inputs = np.ascontiguousarray(images, np.float32)
    outputs = np.zeros((len(inputs), source.outputs), np.float32)
    arena = np.full(source.arena // 4 + 1, np.nan, np.float32)  # nothing may depend on what was there before
    arena[-1] = 7
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (inputs, outputs, arena)]
    library.network_run_batch(pointers[0], pointers[1], ctypes.c_long(len(inputs)), pointers[2])
    assert arena[-1] == 7
    return outputs


def sparse_(model, seed=0):
    """Prune most weights; every second layer has weights of ±c."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for number, module in enumerate(model.modules()):
            if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Linear)):
                weight = module.weight
                if number % 2:
                    weight.copy_(weight.sign() * 0.37)
                weight[torch.rand(weight.shape, generator=generator) < 0.6] = 0
    return model


def images_for(shape, count=3):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(1))


def check(model, shape, folder, *flags, coded=False):
    graph = trace(model.eval(), torch.zeros(1, *shape))
    source = emit(graph, coded=coded)
    images = images_for(shape)
    found = run(build(source, folder, *flags), source, images.numpy())
    with torch.no_grad():
        expected = model(images).reshape(found.shape).numpy()
    assert np.abs(found - expected).max() <= 1e-5 * max(1e-3, np.abs(expected).max())
    return found


FOLDER = Path(iterand.__file__).parent / "inference" / "c"


class Together:
    """Many networks in one library, which is compiled once: their names begin with their numbers."""

    def __init__(self, models, folder, *flags, coded=None, int8=None):
        self.models = models
        arithmetic = "float32.h" if int8 is None else "int8.h"
        kernels = "\n\n".join((FOLDER / name).read_text() for name in ("planes.h", arithmetic, "layers.h"))
        self.sources = [
            emit(
                trace(model.eval(), torch.zeros(1, *shape)),
                coded=bool(coded and coded[number]),
                activations=None if int8 is None else int8[number],
            )
            for number, (model, shape) in enumerate(models)
        ]
        decoded = max(int(re.search(r"NETWORK_OFFSETS (\d+)", source.code)[1]) for source in self.sources)
        parts = [f"#define NETWORK_OFFSETS {decoded}", "" if int8 is None else "#define NETWORK_INT8", kernels]
        for number, source in enumerate(self.sources):
            own = source.code.partition(kernels)[2].partition("void network_run_batch")[0]
            parts.append(re.sub(r"\b(v\d+|network_run)", rf"n{number}_\1", own))
        folder.mkdir(exist_ok=True)
        (folder / "all.c").write_text("\n".join(parts))
        command = [COMPILERS[0], "-std=c99", "-O0", "-ffp-contract=off", *WARNINGS, *flags, "-fPIC", "-shared"]
        subprocess.run([*command, "-o", "all.so", "all.c"], cwd=folder, check=True)
        self._library = ctypes.CDLL(str(folder / "all.so"))

    def outputs(self, number):
        """The outputs of a network for some images."""
        (_, shape), source = self.models[number], self.sources[number]
        images = images_for(shape)
        outputs, arena = (
            np.zeros((len(images), source.outputs), np.float32),
            np.full(source.arena // 4, np.nan, np.float32),
        )
        for image, output in zip(images.numpy(), outputs):
            pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (image, output, arena)]
            getattr(self._library, f"n{number}_network_run")(*pointers)
        return outputs

    def check(self, number):
        """Compare a network with torch; gives its outputs."""
        model, shape = self.models[number]
        outputs = self.outputs(number)
        with torch.no_grad():
            expected = model(images_for(shape)).reshape(outputs.shape).numpy()
        assert np.abs(outputs - expected).max() <= 1e-5 * max(1e-3, np.abs(expected).max())
        return outputs


@pytest.fixture(scope="module")
def operations(tmp_path_factory):
    torch.manual_seed(0)
    models = [(sparse_(scramble_(make())), shape) for make, shape, _ in CASES.values()]
    coded = [number % 2 == 0 for number in range(len(models))]
    return Together(models, tmp_path_factory.mktemp("operations"), "-DITERAND_VECTOR=4", coded=coded)


@pytest.mark.parametrize("name", CASES)
def test_operations(name, operations):
    operations.check(list(CASES).index(name))


SEEDS = range(10)


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    """Networks made up at random: plain with offsets, and in vectors with codes."""
    models = [(model := sparse_(MadeUp(seed), seed), model.shape) for seed in SEEDS]
    folder = tmp_path_factory.mktemp("made up")
    return [
        Together(models, folder / str(size), f"-DITERAND_VECTOR={size}", "-w", coded=[coded] * len(models))
        for size, coded in ((1, False), (16, True))
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_networks_made_up_at_random(seed, made_up):
    first, second = (together.check(seed) for together in made_up)
    np.testing.assert_array_equal(first.view(np.int32), second.view(np.int32))


def wide():
    """Planes shorter than a vector, of one vector, one block, several; more than 255 weights between two kept ones."""
    layers = [
        nn.Conv2d(3, 40, 3, padding=1), nn.ReLU(), nn.Conv2d(40, 40, 3, 2, 1), nn.ReLU(),
        nn.Conv2d(40, 40, 3, padding=1), nn.MaxPool2d(3, 3), nn.Conv2d(40, 40, 3, padding=1), nn.Flatten(),
        nn.Linear(40 * 4, 600), nn.Linear(600, 7),
    ]  # fmt: skip
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for layer in layers:
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                weight = layer.weight
                weight.copy_(weight.sign() / 4)
                weight[torch.rand(weight.shape) < (0.99 if weight.shape[1] > 3 else 0.3)] = 0
        layers[0].weight[5] = 0  # a channel without weights
    return model


@pytest.fixture(scope="module")
def wide_graph():
    torch.manual_seed(0)
    model = wide().eval()
    return model, trace(model, torch.zeros(1, 3, 14, 15))


@pytest.fixture(scope="module")
def wide_outputs(wide_graph, tmp_path_factory):
    """What plain C computes, without vectors and codes."""
    model, graph = wide_graph
    plain, images = emit(graph), images_for((3, 14, 15))
    expected = model(images).detach().numpy()
    outputs = run(build(plain, tmp_path_factory.mktemp("plain"), "-DITERAND_VECTOR=1"), plain, images.numpy())
    assert np.abs(outputs - expected).max() <= 1e-5 * np.abs(expected).max()
    return outputs


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("compiler", [pytest.param(name, marks=needs(name)) for name in ("gcc", "clang")])
def test_compilers_and_vectors_give_the_same_bits(compiler, coded, wide_graph, wide_outputs, tmp_path):
    source, images = emit(wide_graph[1], coded=coded), images_for((3, 14, 15))
    for flags in (["-O3", NATIVE], ["-O1", "-DITERAND_VECTOR=8", "-w"]):
        found = run(build(source, tmp_path / "".join(flags[:1]), *flags, compiler=compiler), source, images.numpy())
        np.testing.assert_array_equal(found.view(np.int32), wide_outputs.view(np.int32))


CROSS = "aarch64-linux-gnu-gcc"
ARM64 = {"gcc": [CROSS], "clang": ["clang", "--target=aarch64-linux-gnu"]}


@pytest.mark.skipif(platform.machine() in ("aarch64", "arm64"), reason="this is a 64-bit ARM")
@pytest.mark.parametrize("compiler", [pytest.param(name, marks=needs(name, CROSS, "qemu-aarch64")) for name in ARM64])
def test_64_bit_arm_gives_the_same_bits(compiler, wide_graph, wide_outputs, tmp_path):
    inputs = images_for((3, 14, 15)).numpy()
    for coded in (False, True):
        source = emit(wide_graph[1], coded=coded)
        (tmp_path / "network.h").write_text(source.header)
        (tmp_path / "network.c").write_text(source.code)
        command = [*ARM64[compiler], "-O2", "-static"]
        assert run_program(tmp_path, inputs.tobytes(), *command, emulator=["qemu-aarch64"]) == wide_outputs.tobytes()


EXAMPLE = (Path(iterand.__file__).parent / "inference" / "c" / "example.c").read_text()


def sanitized(source, image, folder, *flags):
    """The outputs of the example; the arena is an array of exactly its size, under two sanitizers."""
    for name, text in (("network.h", source.header), ("network.c", source.code), ("example.c", EXAMPLE)):
        (folder / name).write_text(text)
    command = [COMPILERS[-1], "-std=c99", "-O0", "-ffp-contract=off", *flags, *WARNINGS, "-Wno-psabi"]  # clang: quick
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run([*command, *sanitize, "-o", "example", "example.c", "network.c"], cwd=folder, check=True)
    done = subprocess.run([folder / "example"], input=image.numpy().tobytes(), capture_output=True, check=True)
    found = np.array([float(line) for line in done.stdout.split()], np.float32)
    assert done.stderr == f"the largest is output {found.argmax()}\n".encode()
    return found


@pytest.mark.parametrize("vector", [1, 16])
@pytest.mark.parametrize("coded", [False, True])
def test_no_access_out_of_bounds(coded, vector, wide_graph, tmp_path):
    model, graph = wide_graph
    image = images_for((3, 14, 15), 1)
    found = sanitized(emit(graph, coded=coded), image, tmp_path, f"-DITERAND_VECTOR={vector}")
    expected = model(image).detach().numpy()[0]
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["best-resnet20-e21621f5ed", "best-vgg11-f5591dd60a"])
def test_tickets_of_the_repository(name, tmp_path):
    model = iterand.load_ticket(TICKETS / f"{name}.ticket").eval()
    check(model, (3, 32, 32), tmp_path, NATIVE, coded=True)


def test_values_that_live_together_do_not_overlap():
    model = MadeUp(3).eval()
    graph = trace(model, torch.zeros(1, *model.shape))
    plan = make_plan(graph)
    for number, node in enumerate(graph.nodes):
        later = {value.name for other in graph.nodes[number:] for value in other.inputs} | {graph.output.name}
        before = {graph.input.name, *(other.output.name for other in graph.nodes[:number])}
        spans = [range(plan.places[name], plan.places[name] + plan.layouts[name].size) for name in before & later]
        own = plan.places[node.output.name]
        spans.append(range(own, own + plan.layouts[node.output.name].size))
        for one, span in enumerate(spans):
            assert span.stop <= plan.size
            for other in spans[one + 1 :]:
                assert span.stop <= other.start or other.stop <= span.start


def test_memory_is_reused():
    """A chain of convolutions needs two values at a time."""
    model = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(6))).eval()
    plan = make_plan(trace(model, torch.zeros(1, 4, 8, 8)))
    assert plan.size == 2 * plan.layouts["v1"].size


def test_a_channel_of_very_many_weights_is_refused():
    model = nn.Sequential(nn.Flatten(), nn.Linear(70_000, 1, bias=False)).eval()
    with pytest.raises(
        IterandError, match=re.escape("a channel of '1' keeps 70,000 weights; inference in C has at most 65,535")
    ):
        emit(trace(model, torch.zeros(1, 7, 100, 100)))


def test_nan_stays_nan(tmp_path):
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()).eval()
    source = emit(trace(model, torch.zeros(1, 1, 8, 8)))
    images = torch.ones(1, 1, 8, 8)
    images[0, 0, 2, 5] = float("nan")
    found = run(build(source, tmp_path), source, images.numpy())
    np.testing.assert_array_equal(np.isnan(found), torch.isnan(model(images)).numpy())


class Odd(nn.Module):
    """Modules whose names are no C and would end a comment."""

    def __init__(self):
        super().__init__()
        self.add_module('*/ int x; /* "%s" `ls` $(ls)', nn.Linear(4, 3))

    def forward(self, x):
        return next(self.children())(x)


# Folders.


def test_names_do_not_reach_the_source(tmp_path):
    done = export_c(Odd(), torch.randn(2, 4), tmp_path / "out")
    code = (tmp_path / "out" / "network.c").read_text()
    assert done.difference < 1e-6
    assert "int x" not in code
    assert "/* ???int?x???????s???ls????ls? */" in code


def test_the_folder_builds_as_its_readme_says(tmp_path):
    torch.manual_seed(0)
    model = sparse_(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4))).eval()
    done = export_c(model, torch.randn(2, 3, 8, 8), tmp_path / "new" / "out")
    folder = tmp_path / "new" / "out"
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "example.c", "network.c", "network.h"]
    assert done.difference < 1e-5
    page = (folder / "README.md").read_text()
    assert f"Constant data: {done.bytes:,} bytes. Memory while it runs: {done.arena:,} bytes" in page
    commands = re.findall(r"^    (cc .*|\./example.*)$", page, re.MULTILINE)
    image = torch.randn(1, 3, 8, 8)
    (folder / "input.f32").write_bytes(image.numpy().tobytes())
    assert len(commands) == 2
    for command in commands:
        printed = subprocess.run(command, cwd=folder, shell=True, capture_output=True, check=True, text=True).stdout
    torch.testing.assert_close(torch.tensor([float(line) for line in printed.split()]), model(image)[0].detach())


def test_the_example_may_have_any_strides(tmp_path):
    torch.manual_seed(0)
    model = sparse_(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4))).eval()
    images = torch.randn(4, 8, 8, 3, requires_grad=True).permute(0, 3, 1, 2)
    assert export_c(model, images, tmp_path / "out").difference < 1e-5
    assert export_c(model, images, tmp_path / "out", activations="int8").difference < 0.1


def test_an_example_that_is_not_finite_is_refused(tmp_path):
    example = torch.ones(2, 4)
    example[1, 2] = float("nan")
    with pytest.raises(ValueError, match=r"^example has NaN or infinity; give inputs prepared as in training$"):
        export_c(nn.Linear(4, 3), example, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_wrong_outputs_are_not_written(activations, tmp_path, monkeypatch):
    monkeypatch.setattr(export.Library, "__call__", lambda self, batch, threads: np.zeros((len(batch), 2), np.float32))
    with pytest.raises(IterandError, match=r"differ from (torch's|those in float32) by 1 of the largest"):
        export_c(nn.Linear(4, 2).eval(), torch.randn(2, 4), tmp_path / "out", activations=activations)
    assert not (tmp_path / "out").exists()


def test_what_is_the_users_stays(tmp_path):
    (tmp_path / "README.md").write_text("# My project\n")
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)).train()
    export_c(model, torch.randn(2, 4), tmp_path)
    assert (tmp_path / "README.md").read_text() == "# My project\n"
    assert all(module.training for module in model.modules())
    (tmp_path / "README.md").unlink()
    for model in (nn.Linear(4, 2), nn.Linear(4, 3)):
        export_c(model, torch.randn(2, 4), tmp_path)
    assert "the 3\noutputs" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("name", ["network.h", "network.c", "example.c"])
def test_sources_of_the_user_are_not_replaced(name, tmp_path):
    (tmp_path / name).write_text('#include "network.h"\n')
    with pytest.raises(IterandError, match=rf"{name} is not from an export, which would replace it; choose another fo"):
        export_c(nn.Linear(4, 2), torch.randn(2, 4), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == '#include "network.h"\n'


@needs("g++")
@pytest.mark.parametrize("coded", [False, True])
def test_a_program_in_cpp(coded, tmp_path):
    model = iterand.prune_(nn.Sequential(nn.Linear(4, 2)), 0.5, weights="signed_constant")
    iterand.save_ticket(model, tmp_path / "a.ticket")
    plain = iterand.load_ticket(tmp_path / "a.ticket", nn.Sequential(nn.Linear(4, 2)))
    export_c(plain, torch.randn(2, 4), tmp_path, ticket=tmp_path / "a.ticket" if coded else None)
    init = "if (network_init(arena)) return 1;" if coded else ""
    program = (
        f"static float arena[NETWORK_ARENA / 4], in[4], out[2]; int main() {{ {init} network_run(in, out, arena); }}"
    )
    (tmp_path / "main.cpp").write_text(f'#include "network.h"\n{program}\n')
    subprocess.run([COMPILERS[0], "-std=c99", "-c", "network.c"], cwd=tmp_path, check=True)
    subprocess.run(["g++", *WARNINGS, "-o", "main", "main.cpp", "network.o"], cwd=tmp_path, check=True)
    subprocess.run([tmp_path / "main"], check=True)


def test_a_short_input_is_refused(tmp_path):
    export_c(nn.Linear(4, 2).eval(), torch.randn(2, 4), tmp_path)
    subprocess.run([COMPILERS[0], "-std=c99", "-o", "example", "example.c", "network.c"], cwd=tmp_path, check=True)
    done = subprocess.run([tmp_path / "example"], input=b"12345678", capture_output=True, text=False)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"the input has 2 floats; this network takes 4\n"


def test_nothing_is_written_where_a_file_is_in_the_way(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(IterandError, match="out is a file; give the name of a folder"):
        export_c(nn.Linear(4, 2).eval(), torch.randn(2, 4), tmp_path / "out")
    with pytest.raises(IterandError, match=r"the network uses aten\.silu"):
        export_c(nn.Sequential(nn.Linear(4, 2), nn.SiLU()).eval(), torch.randn(2, 4), tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_without_a_compiler_the_folder_is_written_unchecked(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert export_c(nn.Linear(4, 2).eval(), torch.randn(2, 4), tmp_path / "out").difference is None
    assert (tmp_path / "out" / "network.c").exists()
