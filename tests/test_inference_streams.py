"""Exported C whose weights are the coded masks and signs of a ticket: the outputs of the other form, bit for bit."""

import copy
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import iterand
from inference_networks import Wired, run_program
from iterand.errors import IterandError
from iterand.inference.c.export import export_c

TICKETS = Path(__file__).parents[1] / "results" / "tickets"
COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)]
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
pytestmark = pytest.mark.skipif(not COMPILERS, reason="needs gcc or clang")


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """export_c does not build what the tests build anyway; those that need it set CC."""
    monkeypatch.setattr("iterand.inference.c.export.find_compiler", lambda: None)


def network():
    """Kernels of 9, 4 and 1 weights, groups, a channel count that needs escapes, and a linear layer of long rows."""
    return nn.Sequential(
        nn.Conv2d(3, 40, 3, padding=1), nn.BatchNorm2d(40), nn.ReLU(), nn.Conv2d(40, 12, 3, 2, 1, groups=4), nn.ReLU(),
        nn.Conv2d(12, 32, 2, bias=False), nn.Conv2d(32, 64, 1), nn.Flatten(), nn.Linear(64 * 9, 30), nn.ReLU(),
        nn.Linear(30, 7),
    )  # fmt: skip


def searched(model, path, sparsity, rate=0.0, rounds=0):
    """A ticket whose weights were redrawn while its mask changed."""
    iterand.prune_(model, sparsity=sparsity, weights="signed_constant", seed=1)
    generator = torch.Generator().manual_seed(3)
    for _ in range(rounds):
        iterand.randomize_(model, rate=rate)
        with torch.no_grad():
            for scores in iterand.scores(model):
                scores += 0.3 * scores.std() * torch.randn(scores.shape, generator=generator)
    iterand.save_ticket(model, path)
    return iterand.read_ticket(path)


def check(model, ticket, shape, folder, *flags, count=2, activations="float32", compiler=None):
    """Both forms of a network give the same bits, and torch's numbers; gives the export with the ticket."""
    images = torch.randn(count, *shape, generator=torch.Generator().manual_seed(1))
    found = []
    for name, coded in (("offsets", None), ("ticket", ticket)):
        done = export_c(model, images, folder / name, activations=activations, ticket=coded)
        options = [*WARNINGS, *flags] if coded else flags[:1]
        found.append(run_program(folder / name, images.numpy().tobytes(), compiler or COMPILERS[0], *options))
        assert (done.weights > 0) == (coded is not None)
    assert found[0] == found[1]
    outputs = np.frombuffer(found[1], np.float32).reshape(count, -1)
    with torch.no_grad():
        expected = model(images).reshape(outputs.shape).numpy()
    assert np.abs(outputs - expected).max() <= (1e-5 if activations == "float32" else 0.1) * np.abs(expected).max()
    return done


# Sparsity, rate and rounds of randomization; how signs and masks are stored then.
SEARCHES = {
    "initial weights": (0.5, 0, 0, {"round"}, {"bits"}),
    "redrawn once": (0.3, 0.1, 1, {"first"}, {"groups"}),
    "from the latest round": (0.3, 0.5, 3, {"latest"}, {"groups"}),
    "every round": (0.5, 1.0, 2, {"round"}, {"bits"}),
    "levels and ordinals": (0.97, 0.1, 5, {"first", "level"}, {"runs"}),
    "levels": (0.9, 1.0, 4, {"level"}, {"runs"}),
    "nothing pruned": (0.0, 1.0, 4, {"round"}, {"constant"}),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_all_ways_to_store_a_ticket(name, tmp_path):
    sparsity, rate, rounds, stored, masks = SEARCHES[name]
    torch.manual_seed(0)
    ticket = searched(network(), tmp_path / "a.ticket", sparsity, rate, rounds)
    headers = [layer.header for layer in ticket.layers.values()]
    assert stored <= {header.stored for header in headers}
    assert masks <= {header.mask_model.kind for header in headers}
    model = iterand.load_ticket(tmp_path / "a.ticket", network()).eval()
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"] if name == "levels and ordinals" else []
    check(model, ticket, (3, 8, 8), tmp_path, "-O0", *sanitize, compiler=COMPILERS[-1] if sanitize else None)


def test_bytes_between_layers_and_channels_that_nobody_reads(tmp_path):
    """Signs are swapped where a scale is negative, and channels without a reader are left out."""
    torch.manual_seed(0)
    ticket = searched(network(), tmp_path / "a.ticket", 0.97, 0.5, 3)
    model = iterand.load_ticket(tmp_path / "a.ticket", network()).eval()
    with torch.no_grad():
        model[1].weight[::3] *= -1
    check(model, ticket, (3, 8, 8), tmp_path, "-O0", activations="int8", count=100)
    code = (tmp_path / "ticket" / "network.c").read_text()
    for name in ("v1_swapped", "v3_rows", "v4_inputs"):
        assert f"static const uint8_t {name}[]" in code


def shared():
    """Two convolutions with one weight, a layer that is not used, and one that is not masked."""
    wiring = lambda m, x: m.d(m.a(torch.relu(m.a(x))).flatten(1))  # noqa: E731
    return Wired(wiring, a=nn.Conv1d(4, 4, 3, padding=1), b=nn.Conv1d(4, 9, 3), d=nn.Linear(24, 3))


def test_shared_unused_and_dense_layers(tmp_path):
    torch.manual_seed(0)
    model = shared()
    iterand.prune_(model, sparsity=0.6, weights="signed_constant", seed=1, exclude=["d.*"])
    iterand.save_ticket(model, tmp_path / "a.ticket")
    ticket = iterand.read_ticket(tmp_path / "a.ticket")
    assert list(ticket.layers) == ["a.weight", "b.weight"]
    check(iterand.load_ticket(tmp_path / "a.ticket", shared()).eval(), ticket, (4, 6), tmp_path, "-O0")


@pytest.mark.parametrize("name", ["best-resnet20-56686411e5", "best-vgg11-f5591dd60a"])
def test_tickets_of_the_repository(name, tmp_path):
    path = TICKETS / f"{name}.ticket"
    model, ticket = iterand.load_ticket(path).eval(), iterand.read_ticket(path)
    done = check(model, ticket, (3, 32, 32), tmp_path, "-O1", count=1)
    code = (tmp_path / "ticket" / "network.c").read_text()
    constants = re.search(r"network_ticket\[\] = \{(.*?)\}", code, re.DOTALL)[1]
    data = bytes(map(int, re.findall(r"\d+", constants)))
    assert path.read_bytes().endswith(data)  # masks and signs as the file has them
    plain = export_c(model, torch.zeros(1, 3, 32, 32), tmp_path / "offsets")
    assert done.bytes < 0.85 * plain.bytes
    page = (tmp_path / "ticket" / "README.md").read_text()
    assert f"Constant data: {done.bytes:,} bytes" in page
    assert f"into {done.weights:,} bytes" in page
    assert f"`--weights offsets` the constant data has {plain.bytes:,} bytes" in page


def test_the_export_is_checked_and_its_example_runs(tmp_path, monkeypatch):
    monkeypatch.undo()
    torch.manual_seed(0)
    ticket = searched(network(), tmp_path / "a.ticket", 0.8, 0.5, 3)
    model = iterand.load_ticket(tmp_path / "a.ticket", network()).eval()
    image = torch.randn(1, 3, 8, 8)
    done = export_c(model, image, tmp_path / "out", ticket=ticket)
    assert done.difference < 1e-5
    (tmp_path / "out" / "input.f32").write_bytes(image.numpy().tobytes())
    page = (tmp_path / "out" / "README.md").read_text()
    for command in re.findall(r"^    (cc .*|\./example.*)$", page, re.MULTILINE):
        printed = subprocess.run(
            command, cwd=tmp_path / "out", shell=True, capture_output=True, check=True, text=True
        ).stdout
    torch.testing.assert_close(torch.tensor([float(line) for line in printed.split()]), model(image)[0].detach())


def test_larger_weights_of_a_network_without_norms(tmp_path):
    def build():
        return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 3))

    path = tmp_path / "a.ticket"
    iterand.save_ticket(iterand.prune_(build(), 0.8, preset="recommended"), path)
    check(iterand.load_ticket(path, build()).eval(), iterand.read_ticket(path), (12,), tmp_path)


def test_damaged_weights_are_noticed(tmp_path):
    torch.manual_seed(0)
    ticket = searched(network(), tmp_path / "a.ticket", 0.8, 1.0, 3)
    model = iterand.load_ticket(tmp_path / "a.ticket", network()).eval()
    export_c(model, torch.randn(1, 3, 8, 8), tmp_path, ticket=ticket)
    code = (tmp_path / "network.c").read_text()
    head, numbers = re.search(r"(.*network_ticket\[\] = \{\n)(.*?)\n\}", code, re.DOTALL).groups()
    data = [int(number) for number in re.findall(r"\d+", numbers)]
    data[-20] ^= 4  # one of the words
    damaged = head + " ".join(f"{byte}," for byte in data) + code[len(head) + len(numbers) :]
    (tmp_path / "network.c").write_text(damaged)
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run_program(tmp_path, bytes(4 * 192), COMPILERS[0])
    assert failed.value.returncode == 2


def refused(model, ticket, folder, sentence):
    with pytest.raises(IterandError, match=re.escape(sentence)):
        export_c(model, torch.randn(1, 3, 20, 20), folder / "out", ticket=ticket)
    assert not (folder / "out").exists()


def test_what_it_cannot_hold_is_refused(tmp_path):
    def build():
        return nn.Sequential(nn.Conv2d(3, 2, 16), nn.Flatten(), nn.Linear(50, 2))

    path = tmp_path / "a.ticket"
    ticket = searched(build(), path, 0.5)
    instead = "; export it with offsets instead"
    large = "'0.weight' has a kernel of 256 weights; a program decodes at most 254" + instead
    refused(iterand.load_ticket(path, build()).eval(), ticket, tmp_path, large)
    refused(
        build().eval(),
        ticket,
        tmp_path,
        "the network's '0.weight' is not as in the ticket; load the ticket with load_ticket",
    )

    model = iterand.prune_(build(), sparsity=0.5, weights="kaiming_uniform", seed=0)
    iterand.save_ticket(model, path)
    other = "'0.weight' has weights of kaiming_uniform; a program decodes signed_constant only" + instead
    refused(iterand.load_ticket(path, build()).eval(), iterand.read_ticket(path), tmp_path, other)


def test_a_ticket_on_a_base_is_refused(tmp_path):
    torch.manual_seed(0)
    base = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(1296, 2))
    model = iterand.prune_(copy.deepcopy(base), 0.5, weights="existing")
    iterand.save_ticket(model, tmp_path / "a.ticket", base="base")
    sentence = "the ticket holds masks of a base and not its weights; export it with offsets instead"
    loaded = iterand.load_ticket(tmp_path / "a.ticket", base).eval()
    refused(loaded, iterand.read_ticket(tmp_path / "a.ticket"), tmp_path, sentence)
