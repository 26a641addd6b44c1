"""Exported C on a Cortex-M4 and M7 under qemu: the bits of a computer, and sizes and instructions that are right."""

import importlib.util
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import iterand
from inference_networks import CASES, MadeUp, run_program, scramble_
from iterand.inference.c.emitter import emit
from iterand.inference.c.export import export_c
from iterand.inference.graph import trace

ROOT = Path(__file__).parents[1]
TICKETS = ROOT / "results" / "tickets"
EXAMPLE = ROOT / "examples" / "microcontroller"


def load_tool():
    spec = importlib.util.spec_from_file_location("microcontroller", ROOT / "tools" / "microcontroller.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load_tool()
HOST = next(filter(shutil.which, ("gcc", "clang")), None)
pytestmark = [
    pytest.mark.skipif(bool(tool.missing()), reason=tool.missing() or ""),
    pytest.mark.skipif(not HOST, reason="needs gcc or clang"),
]


def sparse_(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for number, module in enumerate(model.modules()):
            if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Linear)):
                module.weight.copy_(module.weight.sign() * 0.37 if number % 2 else module.weight)
                module.weight[torch.rand(module.weight.shape, generator=generator) < 0.6] = 0
    return model.eval()


def check(folder, images, outputs, cpus=tool.CPUS, **options):
    """Outputs of an exported folder under qemu are those of the host; gives them and the measurements."""
    inputs = images.numpy().tobytes()
    expected = run_program(folder, inputs, HOST, "-O1")
    assert len(expected) == 4 * outputs * len(images)
    every = []
    for cpu in cpus:
        measured, found = tool.measure(folder, inputs, folder / cpu, cpu=cpu, **options)
        assert found == expected
        every.append(measured)
    return expected, every


def check_network(model, shape, folder, **options):
    source = emit(trace(model, torch.zeros(1, *shape)), coded=True)
    (folder / "network.h").write_text(source.header)
    (folder / "network.c").write_text(source.code)
    images = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    check(folder, images, source.outputs, **options)


@pytest.mark.parametrize("name", ["1d", "groups", "average pooling", "residual of two convolutions"])
def test_operations(name, tmp_path):
    make, shape, _ = CASES[name]
    torch.manual_seed(0)
    check_network(sparse_(scramble_(make())), shape, tmp_path)


@pytest.mark.parametrize(("seed", "optimize"), [(3, "-O2"), (4, "-Os")])
def test_networks_made_up_at_random(seed, optimize, tmp_path):
    model = sparse_(MadeUp(seed), seed)
    check_network(model, model.shape, tmp_path, optimize=optimize)


def test_a_ticket_of_the_repository(tmp_path, monkeypatch):
    """Both forms of the weights; what the linked program needs is what the export says, and some code."""
    monkeypatch.setattr("iterand.inference.c.export.find_compiler", lambda: None)  # it is built here anyway
    path = TICKETS / "best-resnet20-56686411e5.ticket"
    model, ticket = iterand.load_ticket(path).eval(), iterand.read_ticket(path)
    images = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    done = export_c(model, images, tmp_path / "offsets")
    outputs, every = check(tmp_path / "offsets", images, 10)
    for measured in every:
        arrays = done.arena + 4 * (3 * 32 * 32 + 10) + measured["stack"]
        assert arrays <= measured["memory"] < arrays + 200
        assert done.bytes < measured["flash"] < done.bytes + 20_000
        assert 2 * 4_000_000 < measured["instructions"] < 10 * 4_000_000  # it has 4.0 million additions

    coded = export_c(model, images, tmp_path / "ticket", ticket=ticket)
    same, [decoded] = check(tmp_path / "ticket", images, 10, ["cortex-m4"])
    plain = every[0]
    assert same == outputs
    assert decoded["flash"] < plain["flash"] - 2_000
    assert coded.weights <= decoded["memory"] - plain["memory"] < coded.weights + 100
    assert abs(decoded["instructions"] - plain["instructions"]) < 0.02 * plain["instructions"]
    assert 270_896 < decoded["instructions_init"] < 150 * 270_896  # weights of the ticket


def test_bytes_between_layers(tmp_path, monkeypatch):
    monkeypatch.setattr("iterand.inference.c.export.find_compiler", lambda: None)
    model = sparse_(MadeUp(4), 4)
    images = torch.randn(100, *model.shape, generator=torch.Generator().manual_seed(1))
    export_c(model, images, tmp_path, activations="int8")
    check(tmp_path, images[:2], model(images[:1]).numel())


LOOP = """
#include "network.h"
#include <stdint.h>
void network_run(const float *input, float *output, float *arena) {
    volatile uint32_t memory[300];
    uint32_t left = %d;
    for (int i = 0; i < 300; i++) memory[i] = 1;
    (void)arena;
    __asm volatile("1: subs %%0, #1\\n bne 1b" : "+r"(left) : : "cc");
    output[0] = input[0] + (float)memory[7];
}
"""
LOOP_HEADER = """
#define NETWORK_INPUTS 1
#define NETWORK_OUTPUTS 1
#define NETWORK_ARENA 4
void network_run(const float *input, float *output, float *arena);
"""


def test_instructions_and_stack_are_what_they_are(tmp_path):
    """A loop of two instructions that lasts longer than the timer counts, and 1200 bytes of stack."""
    (tmp_path / "network.h").write_text(LOOP_HEADER)
    found = []
    for number, rounds in enumerate((1_000_000, 350_000_000)):
        (tmp_path / "network.c").write_text(LOOP % rounds)
        measured, outputs = tool.measure(tmp_path, np.float32([1.5]).tobytes(), tmp_path / str(number))
        assert np.frombuffer(outputs, np.float32) == [2.5]
        assert 1200 <= measured["stack"] <= 1600
        found.append(measured["instructions"])
    assert abs(found[1] - found[0] - 2 * 349_000_000) <= 400
    assert 2_000_000 <= found[0] <= 2_010_000


def test_a_program_that_fails_says_so(tmp_path):
    (tmp_path / "network.h").write_text(LOOP_HEADER)
    (tmp_path / "network.c").write_text(LOOP.replace("output[0] =", "*(volatile float *)0xfffffff0 =") % 1)
    with pytest.raises(RuntimeError, match="fault"):
        tool.measure(tmp_path, bytes(4), tmp_path / "build")


def test_another_network_or_option_builds_another_program(tmp_path):
    def text(*options):
        command = ["make", "--no-print-directory", "-f", EXAMPLE / "Makefile", f"BUILD={tmp_path / 'build'}"]
        done = subprocess.run([*command, *options, "size"], cwd=tmp_path, check=True, capture_output=True, text=True)
        return int(done.stdout.splitlines()[-1].split()[0])

    for name, width in (("small", 4), ("large", 40)):
        export_c(
            sparse_(nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))),
            torch.randn(2, 8),
            tmp_path / name,
        )
    small, large = text("NETWORK=small"), text("NETWORK=large")
    assert small < large
    assert text("NETWORK=small") == small
    assert text("NETWORK=small", "OPTIMIZE=-O3") > small


def test_less_than_an_input_is_refused(tmp_path):
    export_c(nn.Linear(4, 2).eval(), torch.randn(2, 4), tmp_path)
    (tmp_path / "input.f32").write_bytes(b"12345678")
    command = ["make", "-f", EXAMPLE / "Makefile", "NETWORK=.", f"BUILD={tmp_path / 'build'}", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "input.f32 is shorter than one input" in done.stdout + done.stderr
