"""The C decoder of tickets: it gives what ``read_ticket`` gives, and refuses what it refuses, under sanitizers."""

import hashlib
import importlib.util
import io
import json
import os
import random
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import iterand
from iterand import distributions, philox
from iterand.errors import TicketError
from iterand.ticket import codec, draws, format, read, save
from ticket_models import FOLDER, GOLDEN, drawn_in_rounds, mixed, searched

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "iterand" / "inference" / "c"
COMPILERS = [name for name in ("gcc", "clang", "cc") if shutil.which(name)]
COMPILERS = COMPILERS[:2] if {"gcc", "clang"} <= set(COMPILERS) else COMPILERS[:1]
STRICT = ["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror"]
SANITIZERS = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
ARM = shutil.which("arm-none-eabi-gcc")
pytestmark = pytest.mark.skipif(not COMPILERS, reason="no C compiler is installed")

DRIVER = r"""
#include "ticket.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    uint32_t count;
    ticket_tensor tensor[4096];
    unsigned char *bytes[4096];
} network;

static void put(uint32_t value) {
    unsigned char bytes[4];
    for (int k = 0; k < 4; k++) bytes[k] = (unsigned char)(value >> 8 * k);
    fwrite(bytes, 1, 4, stdout);
}

static int get(uint32_t *value) {
    unsigned char bytes[4];
    if (fread(bytes, 1, 4, stdin) != 4) return 0;
    *value = bytes[0] | bytes[1] << 8 | bytes[2] << 16 | (uint32_t)bytes[3] << 24;
    return 1;
}

static size_t size_of(const ticket_tensor *tensor) {
    size_t element = tensor->role == TICKET_MASKED ? sizeof(float) : ticket_element_size(tensor->dtype);
    return tensor->elements * element;
}

static unsigned char *add(network *n, const ticket_tensor *tensor) {
    if (n->count == 4096) abort();
    n->tensor[n->count] = *tensor;
    return n->bytes[n->count++] = malloc(size_of(tensor));
}

static void *where(void *context, const ticket_tensor *tensor) {
    network *n = context;
    for (uint32_t k = 0; k < n->count; k++)
        if (n->tensor[k].name == tensor->name) return n->bytes[k];
    return add(n, tensor);
}

/* All kept weights one at a time. */
static ticket_status one_by_one(ticket *t, const ticket_tensor *layer, float *weights) {
    ticket_status status;
    uint32_t index, seen = 0, last = 0;
    float weight;
    for (uint32_t k = 0; k < layer->elements; k++) weights[k] = 0;
    while ((status = ticket_next_weight(t, &index, &weight)) == TICKET_OK) {
        if ((seen && index <= last) || index >= layer->elements) abort();
        weights[index] = weight;
        last = index;
        seen++;
    }
    if (status == TICKET_END && seen != layer->kept) abort();
    return status == TICKET_END ? TICKET_OK : status;
}

static ticket_status decode(ticket *t, network *n, uint32_t way) {
    ticket_tensor layer;
    ticket_status status = ticket_read_all(t, where, n);
    if (status != TICKET_OK) return status;
    for (uint32_t k = 0; way == 1 && k < n->count && k < 3; k++) {
        size_t size = size_of(&n->tensor[k]);
        unsigned char *again = malloc(size);
        if (ticket_read(t, n->tensor[k].name, again, size) != TICKET_OK) abort();
        if (size && memcmp(again, n->bytes[k], size)) abort();
        free(again);
    }
    for (uint32_t number = 0; (status = ticket_next_layer(t, &layer)) == TICKET_OK; number++) {
        float *weights = (float *)add(n, &layer);
        if (ticket_read_all(t, where, n) != TICKET_ORDER || ticket_begin(t, NULL, 0) != TICKET_ORDER) abort();
        if (way == 2 && number % 2) {
            memset(weights, 0, size_of(&layer));
            continue;
        }
        status = way == 1 ? one_by_one(t, &layer, weights) : ticket_dense(t, weights, layer.elements);
        if (status != TICKET_OK) return status;
    }
    return status == TICKET_END ? ticket_finish(t) : status;
}

int main(int count, char **arguments) {
    uint32_t size, way;
    static int32_t normal[32768];
    ticket_normal_table(normal);
    if (count > 1 && strcmp(arguments[1], "table") == 0) return fwrite(normal, 4, 32768, stdout) != 32768;
    for (int status = 0; count > 1 && status <= TICKET_ORDER; status++) puts(ticket_message((ticket_status)status));
    if (count > 1) return 0;
    while (get(&size) && get(&way)) {
        unsigned char *file = malloc(size), *header = NULL;
        uint32_t *work = NULL;
        size_t bytes;
        static network n;
        static ticket t;
        n.count = 0;
        if (fread(file, 1, size, stdin) != size) return 1;
        ticket_status status = ticket_measure(file, size, &bytes);
        if (status == TICKET_OK) {
            header = malloc(bytes);
            if (bytes && ticket_open(&t, file, size, header, bytes - 1) != TICKET_MEMORY) abort();
            status = ticket_open(&t, file, size, header, bytes);
        }
        if (status == TICKET_OK) {
            t.normal_table = way == 1 ? normal : NULL;
            ticket_tensor none;
            work = malloc(4 * t.work_words);
            if (ticket_next_layer(&t, &none) != TICKET_ORDER) abort();
            if (t.work_words && ticket_begin(&t, work, t.work_words - 1) != TICKET_MEMORY) abort();
            status = ticket_begin(&t, work, t.work_words);
            if (status == TICKET_OK && ticket_find(&t, "none of these", &none) != TICKET_NAME) abort();
            if (status == TICKET_OK) status = decode(&t, &n, way);
            if (status != TICKET_OK && ticket_finish(&t) != status) abort(); /* an error stays */
        }
        put(status);
        if (status == TICKET_OK) {
            const char *name, *same;
            uint32_t aliases = 0;
            while (ticket_alias(&t, aliases, &name, &same) == TICKET_OK) aliases++;
            put((uint32_t)t.work_words);
            put(n.count + aliases);
            for (uint32_t k = 0; k < n.count + aliases; k++) {
                ticket_tensor tensor = n.tensor[k < n.count ? k : 0];
                uint32_t at = k;
                name = tensor.name;
                if (k >= n.count) {
                    ticket_alias(&t, k - n.count, &name, &same);
                    if (ticket_find(&t, name, &tensor) != TICKET_OK) abort();
                    for (at = 0; n.tensor[at].name != tensor.name;) at++;
                }
                put((uint32_t)strlen(name));
                fwrite(name, 1, strlen(name), stdout);
                put(tensor.role);
                put(tensor.dtype);
                put(tensor.dimensions);
                for (uint32_t d = 0; d < tensor.dimensions; d++) put(tensor.shape[d]);
                put((uint32_t)size_of(&tensor));
                fwrite(n.bytes[at], 1, size_of(&tensor), stdout);
            }
        }
        for (uint32_t k = 0; k < n.count; k++) free(n.bytes[k]);
        free(file);
        free(header);
        free(work);
    }
    return 0;
}
"""
FUZZED = int(os.environ.get("ITERAND_FUZZED_FILES", "100"))
DENSE, ONE_BY_ONE, SKIPPING = range(3)  # ways to read a layer; the last leaves out every second one


def build(folder: Path, compiler: str, *flags: str) -> Path:
    program = folder / f"decoder-{compiler}"
    (folder / "driver.c").write_text(DRIVER)
    command = [compiler, "-std=c99", *flags, f"-I{SOURCES}", str(folder / "driver.c"), str(SOURCES / "ticket.c")]
    subprocess.run([*command, "-o", str(program)], check=True, capture_output=True)
    return program


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("decoder")
    try:
        return build(folder, COMPILERS[0], *SANITIZERS)
    except subprocess.CalledProcessError:  # some systems have no sanitizers; test_no_warnings tells other errors
        return build(folder, COMPILERS[0], "-O1")


class Answer(NamedTuple):
    status: int
    state: dict[str, Tensor]
    words: int


def decode(program: Path, files: Sequence[bytes], way: int = DENSE) -> list[Answer]:
    """What the C decoder says of these files, one process for all."""
    frames = b"".join(struct.pack("<II", len(data), way) + data for data in files)
    done = subprocess.run([program], input=frames, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    stream = io.BytesIO(done.stdout)
    answers = [_answer(stream) for _ in files]
    assert not stream.read()
    return answers


def _answer(stream: io.BytesIO) -> Answer:
    def number() -> int:
        return struct.unpack("<I", stream.read(4))[0]

    status = number()
    if status:
        return Answer(status, {}, 0)
    words, state = number(), {}
    for _ in range(number()):
        name = stream.read(number()).replace(b"\xc0\x80", b"\0").decode()
        role, dtype = number(), list(format.DTYPES.values())[number()]
        shape = [number() for _ in range(number())]
        content = bytearray(stream.read(number()))
        in_file = dtype if role else torch.float32
        flat = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        state[name] = flat.view(in_file).to(dtype).reshape(shape)
        if not role:
            assert torch.equal(state[name].float(), flat.view(in_file).reshape(shape))  # exact as float32
    return Answer(0, state, words)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def check_same(answer: Answer, data: bytes) -> None:
    """The answer is the state dict that Python finds, to the bit."""
    assert answer.status == 0, f"status {answer.status}: {inflated(data)[:2000]!r}"
    expected = read.parse(data).state_dict()
    assert answer.state.keys() == expected.keys()
    for name, tensor in expected.items():
        found = answer.state[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        assert bits(found) == bits(tensor), name


def check_all_ways(program: Path, files: Sequence[bytes]) -> list[Answer]:
    answers = decode(program, files)
    for data, dense, single in zip(files, answers, decode(program, files, ONE_BY_ONE)):
        check_same(dense, data)
        check_same(single, data)
    for data, dense, skipping in zip(files, answers, decode(program, files, SKIPPING)):
        assert skipping.status == 0  # the checksum of the network is right although layers were left out
        for name in list(read.parse(data).layers)[::2]:
            assert torch.equal(dense.state[name], skipping.state[name])
    return answers


@pytest.mark.parametrize("compiler", COMPILERS)
def test_no_warnings(compiler, tmp_path):
    for level in ("-O2", "-Os"):
        command = [compiler, *STRICT, level, "-c", str(SOURCES / "ticket.c"), "-o", str(tmp_path / "ticket.o")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def golden_files() -> dict[str, bytes]:
    """Those whose distributions the decoder knows."""
    return {name: (FOLDER / f"{name}.ticket").read_bytes() for name in GOLDEN if name != "recycled"}


@pytest.mark.parametrize("compiler", COMPILERS[1:])
def test_other_compilers_decode_the_same(compiler, tmp_path):
    check_all_ways(build(tmp_path, compiler, "-O2"), list(golden_files().values()))


@pytest.mark.skipif(not ARM, reason="arm-none-eabi-gcc is not installed")
def test_it_is_small_on_a_microcontroller(tmp_path):
    target = ["-mcpu=cortex-m4", "-mthumb", "-Os", "-ffreestanding", "-c"]
    command = [ARM, *STRICT, *target, str(SOURCES / "ticket.c"), "-o", str(tmp_path / "ticket.o")]
    subprocess.run(command, check=True, capture_output=True)
    sizes = subprocess.run(["arm-none-eabi-size", "-A", tmp_path / "ticket.o"], capture_output=True, text=True).stdout
    sections = {line.split()[0]: int(line.split()[1]) for line in sizes.splitlines() if line.startswith(".")}
    assert sections[".text"] < 14_500
    assert sections[".data"] == sections[".bss"] == 0  # no state outside of what the caller gives
    undefined = subprocess.run(["arm-none-eabi-nm", "-u", tmp_path / "ticket.o"], capture_output=True, text=True)
    calls = {name for name in undefined.stdout.split() if name != "U" and not name.startswith("__aeabi_")}
    assert calls <= {"memcpy", "memmove", "memset", "memcmp", "strcmp", "strlen"}


def test_the_header_can_be_included_from_cpp(tmp_path):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("no C++ compiler is installed")
    (tmp_path / "a.cpp").write_text('#include "ticket.h"\nticket t;\n')
    command = [compiler, "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}", "-c", str(tmp_path / "a.cpp")]
    subprocess.run([*command, "-o", str(tmp_path / "a.o")], check=True)


def test_every_status_has_a_sentence(program):
    lines = subprocess.run([program, "messages"], capture_output=True, text=True, check=True).stdout.splitlines()
    names = re.findall(r"^    (TICKET_\w+),?", (SOURCES / "ticket.h").read_text().partition("} ticket_status")[0], re.M)
    assert len(lines) == len(set(lines)) == len(names)
    assert not any("unknown" in line for line in lines)


def test_golden_files(program):
    assert sorted(path.stem for path in FOLDER.glob("*.ticket")) == sorted(GOLDEN)
    check_all_ways(program, list(golden_files().values()))
    recycled = (FOLDER / "recycled.ticket").read_bytes()
    assert decode(program, [recycled])[0].status == status("DISTRIBUTION")


def test_trained_tickets(program):
    paths = sorted((ROOT / "results" / "tickets").glob("*.ticket"))
    assert paths
    for path, answer in zip(paths, decode(program, [path.read_bytes() for path in paths])):
        check_same(answer, path.read_bytes())
        largest = max(tensor.numel() for tensor in answer.state.values())
        assert 4 * answer.words < largest / 8 + 4096  # about one bit per weight of the largest layer


class Parts(nn.Module):
    """Masked tensors of all numbers of dimensions, some of them tied, and tensors of many types."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.embedding = nn.Embedding(11, 5, padding_idx=0)
        self.last = nn.Linear(5, 11)
        self.last.weight = self.embedding.weight
        self.register_buffer("mean_of_norm", self.norm.running_mean)
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("wide", torch.arange(5, dtype=torch.float64) / 3)
        self.register_buffer("flags", torch.arange(40) % 3 == 0)
        self.register_buffer("narrow", torch.arange(9).to(torch.bfloat16))
        self.register_buffer("complex", torch.arange(4).to(torch.complex64) * (1 + 2j))
        self.register_buffer("größe\0x", torch.arange(-2000, 2000, dtype=torch.int16))
        self.register_buffer("repeated", (torch.arange(70_000) // 7 % 61).to(torch.int32))


def saved(model: nn.Module, half: bool = False, **options: Any) -> bytes:
    model = searched(model, **options)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer += torch.linspace(0.1, 2, buffer.numel())
    return save.ticket_bytes(model, half=half, metrics={"ä": [1e-9, -0.0, None, True, '\n"\\\U0001f600']})


@pytest.fixture(scope="module")
def made() -> list[bytes]:
    linear = lambda: nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))  # noqa: E731
    return [
        saved(Parts(), weights="kaiming_uniform", rate=0.2),
        saved(Parts(), half=True, weights="signed_constant", rate=1.0),
        saved(Parts(), weights="kaiming_normal", sparsity=0.2, rounds=3),
        saved(Parts(), weights="uniform", sparsity=0.8, rounds=30, rate=0.9, ranking="global"),
        saved(linear().bfloat16(), weights="kaiming_uniform"),
        saved(linear().half(), weights="kaiming_normal"),
        saved(linear().double(), weights="signed_constant", seed=2**63 - 1),
        saved(linear(), weights="signed_constant", rounds=0),
        saved(linear(), weights="kaiming_uniform", sparsity=0.0),
        saved(Parts(), weights="signed_constant", mask="signed"),
        saved(Parts(), weights="signed_constant", gain=1.5),
        saved(Parts(), weights="kaiming_normal", gain=1e-06, rate=0.2),
        saved(linear(), weights="signed_constant", gain=0.1, rounds=0),
        saved(linear(), weights="kaiming_normal", mask="multicoat", coats=2, binarize=True),
    ]


def test_tickets_of_models(program, made):
    check_all_ways(program, made)


def test_as_many_draws_as_the_coder_can_tell_apart(program):
    check_all_ways(program, [save.ticket_bytes(drawn_in_rounds(codec.MAX_ALPHABET))])


def test_a_ticket_on_a_base_is_refused(program):
    model = iterand.prune_(nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30)), 0.2, weights="existing")
    data = save.ticket_bytes(model)
    header, body = format.unpack(data)
    nameless = format.pack({key: value for key, value in header.items() if key != "base"}, body)
    without = format.pack({key: value for key, value in header.items() if "base" not in key}, body)
    statuses = [answer.status for answer in decode(program, [data, nameless, without])]
    assert statuses == [status("BASE"), status("BASE"), status("HEADER")]
    assert all(map(refusal, (data, nameless, without)))


class Layer(NamedTuple):
    """A layer to be written, whatever a search would have found."""

    mask: np.ndarray
    values: np.ndarray
    """One for every kept weight: position among the levels, draw or ordinal."""
    columns: dict[str, Any]


def sealed(header: dict[str, Any], body: bytes) -> bytes:
    """The ticket with the checksum of its network as Python finds it."""
    digest = hashlib.sha256()
    for layer in read.parse(format.pack({**header, "weights_sha256": "0" * 64}, body)).layers.values():
        layer.weight(digest)
    return format.pack({**header, "weights_sha256": digest.hexdigest()}, body)


def written(layers: Sequence[Layer], **top: Any) -> bytes:
    """A ticket of these layers."""
    rows, sequences, models = [], [], []
    for number, layer in enumerate(layers):
        counts = np.bincount(layer.values)
        gaps, position = [], 0
        for value in np.flatnonzero(counts):
            gaps += [position - int(value)] * int(value > position) + [int(counts[value])]
            position = int(value) + 1
        row = _row(name=f"{number}.weight", shape=list(layer.mask.shape), seed=number, counts=gaps)
        rows.append(row | {"identity": "x", "history": [], "dtype": "F32"} | layer.columns)
        mask = layer.mask.reshape(-1)
        for sequence in (mask.astype(np.uint8), layer.values):
            symbols, counts = np.unique(sequence, return_counts=True)
            models.append(codec.Model(counts.tolist()))
            sequences.append(
                models[-1].cut(np.searchsorted(symbols, sequence)) if len(symbols) else np.empty(0, np.uint8)
            )
    table = {key: [row[key] for row in rows] for key in rows[0]}
    return sealed({"iterand": "0", "layers": table, **top}, codec.encode(sequences, models))


def chosen(shape: Sequence[int], kept: int, seed: int) -> np.ndarray:
    mask = np.zeros(int(np.prod(shape)), dtype=bool)
    mask[np.random.default_rng(seed).permutation(mask.size)[:kept]] = True
    return mask.reshape(shape)


def codings() -> list[Layer]:
    """Masks and values of every way of coding, and of every way of storing a weight."""
    dice = np.random.default_rng(0)
    layers = []
    shares = (0.0, 1 / 4000, 0.01, 0.12, 0.2, 0.46, 0.5, 0.6, 0.9, 0.999, 1.0)
    for number, share in enumerate(shares):  # all codings of masks
        kept = round(4001 * share)
        layers.append(Layer(chosen((4001,), kept, number), dice.integers(2, size=kept), {}))
    for share in (0.01, 0.1, 0.3, 0.48, 0.9, 0.99, 1.0):  # all codings of two levels
        values = (dice.random(1003) < share).astype(np.int64)
        layers.append(Layer(chosen((59, 17), 1003, 1), values, {}))
    history = [[1 << 31, 3], [0, 20], [1 << 32, 2], [123456789, 400]]
    for number, (most, shape) in enumerate(
        ((2, (50, 30)), (3, (50, 30)), (5, (1500,)), (17, (50, 30)), (300, (50, 30)))
    ):
        values = dice.integers(most, size=1200)
        values[: most * 4] = np.arange(most * 4) % most
        columns = {"stored": "round", "weight_distribution": "kaiming_uniform", "history": history}
        layers.append(Layer(chosen(shape, 1200, number), values, columns))
    for number, stored in enumerate(("first", "latest", "first", "latest")):
        mask = chosen((3, 70, 2), 300, number)
        key, past = philox.key(number, stored), draws.History(tuple(map(tuple, history)))
        index, draw = torch.from_numpy(np.flatnonzero(mask)), torch.from_numpy(dice.integers(1, 425, size=300))
        values = draws.ordinals(index, draw, key, past, latest=stored == "latest").numpy()
        columns = {"stored": stored, "seed": number, "identity": stored, "history": history}
        columns |= {"weight_distribution": ("uniform", "kaiming_normal")[number % 2]}
        layers.append(Layer(mask, values, columns | {"dtype": ("F32", "F64", "F16", "BF16")[number]}))
    layers.append(Layer(chosen((), 1, 0), np.zeros(1, dtype=np.int64), {}))
    layers.append(Layer(chosen((1, 1), 0, 0), np.zeros(0, dtype=np.int64), {}))
    return layers


def test_all_codings(program):
    layers = codings()
    files = [written(layers), *(written([layer]) for layer in layers)]
    parsed = read.parse(files[0]).header.layers
    assert {layer.mask_model.kind for layer in parsed} == {"constant", "bits", "runs", "groups"}
    assert {layer.value_model.kind for layer in parsed} == {"constant", "bits", "runs", "groups"}
    assert {layer.stored for layer in parsed} == {"level", "round", "first", "latest"}
    assert max(layer.value_model.alphabet for layer in parsed) > 256
    check_all_ways(program, files)


def test_several_lanes_and_long_runs(program):
    dice = np.random.default_rng(1)
    layers = [
        Layer(chosen((300, 1000), 60_000, 1), dice.integers(2, size=60_000), {}),
        Layer(chosen((1 << 20,), 11, 2), dice.integers(2, size=11), {}),
        Layer(chosen((300, 100), 29_000, 3), dice.integers(5, size=29_000),
              {"stored": "round", "history": [[7, 9]], "weight_distribution": "kaiming_uniform"}),
    ]  # fmt: skip
    data = written(layers)
    ticket = read.parse(data).header
    assert codec.lane_count([model for layer in ticket.layers for model in (layer.mask_model, layer.value_model)]) > 8
    check_all_ways(program, [data])


def test_units_of_any_fan_in_are_rounded_as_float64_rounds_them(program):
    dice = random.Random(0)
    fans = [*range(1, 300), *(dice.randrange(1, 1 << dice.randrange(1, 41)) for _ in range(900)), 1 << 40]
    names = ["kaiming_uniform", "signed_constant", "kaiming_normal", "uniform"]
    one = np.zeros(1, dtype=np.int64)
    layers = [
        Layer(np.ones(1, dtype=bool), one, {"fan_in": fan, "weight_distribution": names[number % 4], "stored": "round"})
        for number, fan in enumerate(fans)
    ]
    data = written(layers)
    check_same(decode(program, [data])[0], data)


def test_the_table_of_normal_quantiles(program):
    found = np.frombuffer(subprocess.run([program, "table"], capture_output=True, check=True).stdout, dtype=np.int32)
    assert np.array_equal(found, distributions.normal_levels(torch.device("cpu")).numpy()[32768:])


UNITS = (
    1.0,
    0.25,
    -3,
    0,
    1.401298464324817e-45,
    1.1754942106924411e-38,
    1.2676506002282294e30,
    0.10000000149011612,
    16777216,
)


def test_levels_of_other_distributions(program):
    """A distribution that nobody knows is read by its levels."""
    dice = np.random.default_rng(2)
    files = []
    for unit in UNITS:
        layers = [
            Layer(chosen((20, 30), 300, number), dice.integers(number + 1, 4, size=300),
                  {"weight_distribution": name, "unit": unit})
            for number, name in enumerate(("mine", "größe", "mine"))
        ]  # fmt: skip
        files.append(written(layers, levels={"mine": [-(1 << 24), -3, 0, 7], "größe": [-9, 1, 2, 1 << 24]}))
    check_all_ways(program, files)
    columns = {"weight_distribution": "mine", "unit": 1.0, "stored": "round"}
    unknown = _packed(_layers(**columns))
    assert decode(program, [unknown])[0].status == status("DISTRIBUTION")


def status(name: str) -> int:
    text = (SOURCES / "ticket.h").read_text().partition("} ticket_status")[0]
    return re.findall(r"^    (TICKET_\w+),?", text, re.M).index(f"TICKET_{name}")


def _row(**columns: Any) -> dict[str, Any]:
    return {"name": "a", "shape": [2, 3], "seed": 0, "sparsity": 0.5, "weight_distribution": "signed_constant",
            "stored": "level", "counts": []} | columns  # fmt: skip


def _layers(**columns: Any) -> dict[str, Any]:
    """A header with one layer."""
    return {"layers": {key: [value] for key, value in _row(**columns).items()}}


def _packed(header: dict[str, Any], body: bytes = b"") -> bytes:
    nothing = hashlib.sha256().hexdigest()
    return format.pack({"iterand": "0", "weights_sha256": nothing, **header}, body)


def with_text(text: str | bytes, body: bytes = b"") -> bytes:
    """A ticket with this text as its header."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_DEFAULT_STRATEGY, format.DICTIONARY)
    deflated = compressor.compress(text if isinstance(text, bytes) else text.encode()) + compressor.flush()
    return with_header(deflated, body)


def with_header(deflated: bytes, body: bytes = b"") -> bytes:
    tail = struct.pack("<I", len(deflated)) + deflated + body
    return b"iterand\2" + hashlib.sha256(b"iterand\2" + tail).digest() + tail


# What the C reader does not look at (ticket.h lists it): such a file may be refused by Python only.
UNSEEN = re.compile(
    "unknown (key|column)"
    "|(has|no column|no) '?(sparsity|score_distribution|ranking|rank_by|floor|iterand|recipe|metrics)"
    "|column '(sparsity|score_distribution|ranking|rank_by|floor|digest)'"
    "|(has digest|a digest, or none of these)"
)


def refusal(data: bytes) -> str | None:
    """Why Python refuses a file."""
    try:
        read.parse(data).state_dict()
    except TicketError as error:
        return str(error)
    return None


def check_verdicts(program: Path, files: Sequence[bytes], ways: Sequence[int] = (DENSE, ONE_BY_ONE)) -> dict[str, int]:
    """Both readers accept the same files, and find the same in them. Returns how many had which verdict."""
    verdicts = {"accepted": 0, "refused": 0, "unseen": 0}
    answers = [decode(program, files, way) for way in ways]
    for number, data in enumerate(files):
        found = [answer[number] for answer in answers]
        message = refusal(data)
        if message is None:
            for answer in found:
                check_same(answer, data)
            verdicts["accepted"] += 1
        elif found[0].status:
            assert len({answer.status for answer in found}) == 1
            verdicts["refused"] += 1
        else:
            assert UNSEEN.search(message), f"file {number} is accepted, but: {message}"
            verdicts["unseen"] += 1
    return verdicts


STRINGS = [
    *('"x"', '"ä😀"', '""', '"open', "'a'", '"\x01"', r'"\x"', r'"\u0000"', r'"\u12"', r'"\u12g4"'),
    *(r'"\u00e4\ud83d\ude00\/\b\f\n\r\t\"\\"', r'"\uD834\uDd1e"'),
]
LONE = [r'"\ud83d"', r'"\ude00"', r'"\ud83d\u0041"', r'"\ud83dx"', r'"\ud83d\ud83d"']
NUMBERS = [
    *("-", "01", "-01", "1.", ".5", "1.5e", "1e+", "+1", "0x1", "NaN", "Infinity", "-Infinity", "1//", "\xa01"),
    *("1e5", "-0", "-0.0e-0", "1e308", "1e309", "0e999", "0.0000e400", "-1e999", "1e-999", "1" * 400),
    *("123456789e301", "0.00001e313", "0.00001e315", " \t\r\n1\n ", "nul", "null", "true", "falsey", "tru"),
]
NESTED = [
    *("[", "[]", "[1,]", "[,1]", "[1 2]", "[1,2,[3,{}]]", "{}", '{"a":1,}', '{"a"}', "{1:2}", '{"a":1,"a":2}', "{,}"),
    *("]", "}", ",", "[[[[[[[[[[]]]]]]]]]]", "/**/1", "[1}", '{"a":[}'),
]
TEXTS = STRINGS + NUMBERS + NESTED
UTF8 = [
    *(b"\xff", b"\xc0\x80", b"\xc1\xbf", b"\xe0\x80\x80", b"\xf4\x90\x80\x80", b"\xf8", b"\xe4", b"\x80"),
    *(b"\xf0\x9f\x98", b"\xef\xbf\xbf", b"\xf4\x8f\xbf\xbf", b"\xed\x9f\xbf", b"\xc2\x80"),
]


def test_json(program):
    start = json.dumps({"iterand": "0", "weights_sha256": hashlib.sha256().hexdigest(), **_layers()})[:-1]

    def with_metrics(text: str) -> bytes:
        return with_text(f'{start},"metrics":{{{text}}}}}')

    files = [with_metrics(f'"a":{text}') for text in TEXTS] + [with_metrics(f"{text}:1") for text in TEXTS]
    files += [with_text(text) for text in (*TEXTS, "", " ", start, start + "}}", f"[{start}}}]", start + "} {}")]
    files += [with_text(start.encode() + b',"metrics":{"a":"' + text + b'"}}') for text in UTF8]
    verdicts = check_verdicts(program, files)
    assert verdicts["accepted"] > 25
    assert verdicts["refused"] > 90
    assert {answer.status for answer in decode(program, [with_metrics(f'"a":{text}') for text in LONE])} == {
        status("JSON")
    }
    deep = [with_metrics(f'"a":{"[" * depth}{"]" * depth}') for depth in (10, 62, 63, 100_000)]
    assert [answer.status for answer in decode(program, deep)] == [0, 0, status("JSON"), status("JSON")]


def inflated(data: bytes) -> bytes:
    return zlib.decompressobj(-15, format.DICTIONARY).decompress(data[44 : 44 + int.from_bytes(data[40:44], "little")])


NAMES = ["ä" * 4096, "ä" * 4097, "", "\0", "\ud7ff\uffff", 3, None, [], "\x7f"]
ENTRIES: dict[str, list[Any]] = {
    "name": NAMES,
    "identity": NAMES,
    "shape": [
        *([], [1] * 16, [1] * 17, [0], [-1], [1 << 31, 2], [1 << 32], [True], [1.0], 3, "x", {}, [[1]], None),
        *([1 << 22], [1 << 24], [(1 << 32) - 1], [1 << 16, 1 << 16]),
    ],
    "seed": [-1, 2**63 - 1, 2**63, 2**64, 1.0, "0", None, -0],
    "dtype": ["F64", "F16", "BF16", "I64", "U8", "BOOL", "f32", 1],
    "fan_in": [0, 1, 1 << 40, (1 << 40) + 1, -3, 2.0, True],
    "unit": [3, 0.8164966106414795, 0.8164965809277261, 0.816496, "x"],
    "stored": ["round", "first", "latest", "LEVEL", 1, None],
    "history": [
        *([], [[1, 1]], [[1 << 32, 1 << 24]], [[0, 1 << 24], [0, 1]], [[1, 0]], [[-1, 1]], [[(1 << 32) + 1, 1]]),
        *([[1]], [[1, 1, 1]], [1], {}, [[]], None),
    ],
    "counts": [
        *([0], [-1], [1, -1], [-1, -1, 1], [7], [1, 1, 1], [-2, 1], {}, [True], [1.0], [-1, 1], [6], [-1, 6]),
        *([3, 3], [5, 1], [1 << 62, 1 << 62], [2**63], ["x"]),
    ],
}
OTHER_UNITS = [1.0, 1e39, 0.1, 1e-46, None, True, "1"]
GAPS = [[6], [-4, 6], [-3, 6], [-(1 << 25), 6]]
TOP: dict[str, list[Any]] = {
    "levels": [
        *({}, {"a": []}, {"a": [1, 1]}, {"a": [2, 1]}, {"a": [-(1 << 24), 1 << 24]}, {"a": [(1 << 24) + 1]}),
        *({"uniform": [1]}, [], {"a": 1}, {"": [1]}),
    ],
    "aliases": [{}, {"x": "a"}, {"a": "a"}, {"x": "y"}, {"x": "a", "y": "x"}, [], {"x": 1}],
    "weights_sha256": ["0" * 63, "A" * 64, "g" * 64, "0" * 64, 1, None],
    "planes": [[], [0], {}, [-1]],
    "layers": [{}, [], None, 3, {"name": ["a"]}, {"name": ["a"], "shape": [[2]]}],
    "tensors": [{}, [], None, 3, {"name": ["b"]}],
    "filled": [{}, [], None, 3, {"name": ["b"]}],
}
TENSORS = {"name": ["b", "c"], "shape": [[2], [0, 1 << 30]], "dtype": ["U8"]}
PLANES: list[list[Any]] = [[2], [1], [3], [], [2, 0], ["2"], [2.0]]
TENSOR_COLUMNS: list[dict[str, Any]] = [
    {"dtype": ["F16"]},
    {"dtype": ["F16", "F32"]},
    {"dtype": ["F32"], "saved_as": ["F16"]},
    {"dtype": ["F64", "F32"], "saved_as": ["F16"]},
    {"dtype": ["U8"], "saved_as": ["F16"]},
    {"name": ["b", "b"]},
    {"name": ["a", "b"]},
    {"name": []},
    {"shape": [[2]]},
]
FILLED = {"name": ["f"], "shape": [[2, 2]], "element": ["0000803f"]}
FILLED_COLUMNS: list[dict[str, Any]] = [
    {},
    {"element": ["0000803F"]},
    {"element": ["00"]},
    {"element": ["00 0000 "]},
    {"element": []},
    {"dtype": ["BOOL"], "element": ["02"]},
    {"dtype": ["BOOL"], "element": ["01"]},
    {"shape": [[1 << 28]]},
    {"shape": [[2], [2]]},
    {"name": ["f", "a"]},
    {"name": ["f", "g", "h"]},
    {"name": 3},
]


def headers() -> list[dict[str, Any]]:
    """Headers that are as they must be, and headers that are not."""
    fine = _layers()
    return [
        {},
        *(_layers(**{column: entry}) for column, entries in ENTRIES.items() for entry in entries),
        *(_layers(weight_distribution="x", unit=unit) for unit in OTHER_UNITS),
        *(_layers(counts=counts, stored="first", history=[[9, 3]]) for counts in GAPS),
        *(fine | {key: value} for key, values in TOP.items() for value in values),
        *(fine | {"tensors": TENSORS, "planes": planes} for planes in PLANES),
        *(fine | {"tensors": TENSORS | change, "planes": [2, 2]} for change in TENSOR_COLUMNS),
        *(fine | {"filled": FILLED | change} for change in FILLED_COLUMNS),
    ]


def test_headers(program):
    bodies = (b"", b"\1\0", b"\2\0", b"\1\0\0\0")
    files = [_packed(header, body) for header in headers() for body in bodies]
    for data in list(files):  # and again with the right checksum of the network
        try:
            files.append(sealed(*format.unpack(data)))
        except TicketError:
            continue
    verdicts = check_verdicts(program, files)
    assert verdicts["accepted"] > 80
    assert verdicts["refused"] > 300


@pytest.fixture(scope="module")
def fuzzer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_ticket", ROOT / "tools" / "fuzz_ticket.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def deflate_again(data: bytes, dice: random.Random) -> bytes:
    """The header compressed in another way, with some bits of it flipped."""
    text = inflated(data)
    level, strategy = dice.choice((0, 1, 9)), dice.choice((zlib.Z_FIXED, zlib.Z_HUFFMAN_ONLY, zlib.Z_DEFAULT_STRATEGY))
    compressor = zlib.compressobj(level, zlib.DEFLATED, -15, 9, strategy, *[format.DICTIONARY] * dice.randrange(2))
    deflated = bytearray(compressor.compress(text) + compressor.flush())
    for _ in range(dice.randrange(3)):
        deflated[dice.randrange(min(60, len(deflated)))] ^= 1 << dice.randrange(8)
    return with_header(bytes(deflated), data[44 + int.from_bytes(data[40:44], "little") :])


def test_mutated_files(program, fuzzer, made):
    """Files of strangers: no crash, no hang, and never another verdict than Python's."""
    dice = random.Random(7)
    victims = [(FOLDER / f"{name}.ticket").read_bytes() for name in GOLDEN]
    victims += [data for data in made if format.unpack(data)[1]]  # with a body to change
    mutations: list[Callable[[bytes, random.Random], bytes]] = [*fuzzer.MUTATIONS, deflate_again, deflate_again]
    files = [mutations[number % len(mutations)](dice.choice(victims), dice) for number in range(FUZZED)]
    files = [fuzzer.repaired(data) if number % 5 else data for number, data in enumerate(files)]
    for data in list(files):
        try:
            files.append(sealed(*format.unpack(data)))
        except (TicketError, ValueError):
            continue
    verdicts = check_verdicts(program, files)
    assert verdicts["accepted"] > FUZZED / 10
    assert verdicts["refused"] > FUZZED / 2


def test_truncated_files(program):
    whole = mixed(weights="kaiming_uniform", rounds=9)
    data = save.ticket_bytes(whole)
    cut = [data[:size] for size in range(len(data))]
    repaired = [with_header(data[44:], b"")[:44]] + [
        part[:8] + hashlib.sha256(part[:8] + part[40:]).digest() + part[40:] for part in cut[44:]
    ]
    found = decode(program, [*cut, *repaired])
    assert all(answer.status for answer in found)
    check_verdicts(program, repaired[::7])


def test_large_requests_are_refused_before_they_cost_anything(program):
    many = [str(number) for number in range(3000)]
    layers = {key: [value] for key, value in _row(name=many).items()} | {"name": many}
    numbers = list(range(1, 1 << 16))
    huge = [
        {"layers": layers | {"shape": [[1 << 20]]}},
        {
            "layers": layers
            | {"shape": [[32768]], "counts": [[1] * 32768], "stored": ["first"], "history": [[[1, 40000]]]}
        },
        {"layers": layers | {"stored": ["latest"], "history": [[[5, 1 << 24]]], "counts": [[1, 5]]}},
        {"layers": layers, "filled": {"name": ["x"], "shape": [[(1 << 32) - 1]], "element": ["00000000"]}},
        _layers() | {"recipe": {"x": " " * (1 << 22)}},
        {
            "layers": layers | {"weight_distribution": ["y", "z"] * 1500, "unit": [1.0]},
            "levels": {"y": numbers, "z": numbers},
        },
    ]
    answers = decode(program, [_packed(header) for header in huge])
    assert [answer.status for answer in answers] == [status("LIMIT")] * len(huge)
    runs = [[5 + number % 2, 100] for number in range(100_000)]
    shared = {"layers": layers | {"stored": ["first"], "history": [runs]}}
    aliases = {"layers": layers, "aliases": {f"x{number}": "17" for number in range(300)}}
    assert check_verdicts(program, [_packed(shared), _packed(aliases)], [DENSE])["accepted"] == 2
