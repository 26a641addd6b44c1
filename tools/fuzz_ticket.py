"""Open mutated tickets, and see that each is refused in one sentence or is still the same network.

    python tools/fuzz_ticket.py --files 100000 --seed 0 --output results/records/benchmarks/fuzz-ticket.json

Every second mutation repairs the checksum afterwards, so that the checks behind it are reached. What counts as a
finding: any other exception than TicketError, a refusal of more than one line, or a file that is accepted and gives
other masked weights. Time and memory are reported.
"""

import argparse
import collections
import hashlib
import json
import random
import re
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import iterand
from iterand.errors import TicketError
from iterand.lab.networks import build_network
from iterand.ticket import format, load, read, save

NUMBERS = (0, 1, -1, 2, 7, 255, 1 << 16, (1 << 24) + 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 60, 1 << 64, 10**30)
ODDITIES: tuple[Any, ...] = (*NUMBERS, None, True, "", "x", [], {}, [[]], 0.5, 1e300, -0.0, [1 << 40, 1 << 40], "F64")


COLUMNS: tuple[tuple[str, Any], ...] = (
    ("fan_in", 5), ("unit", 0.5), ("identity", "x"), ("dtype", "F16"), ("floor", 0.5), ("element", "00"),
    ("history", [[1 << 31, 1 << 20]]), ("multipliers", [4, 4]), ("saved_as", "F16"), ("digest", "0" * 32),
    ("stored", "base"),
)  # fmt: skip


class Victim(nn.Module):
    """Small, with everything in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.embedding = nn.Embedding(9, 6)
        self.last = nn.Linear(6, 9)
        self.last.weight = self.embedding.weight


class Target(NamedTuple):
    """A whole ticket, the masked weights it gives, and how to make a model for it; None: from the recipe inside."""

    data: bytes
    weights: dict[str, Tensor]
    build: Callable[[], nn.Module | None]


def tickets() -> list[Target]:
    """Whole tickets of all kinds."""
    own = {"name": "digits_conv", "width_factor": 0.25, "classes": 10}
    made = []
    kinds: tuple[tuple[type[nn.Module] | None, str, float, str, dict[str, Any]], ...] = (
        (Victim, "kaiming_uniform", 0.3, "layer", {}),
        (Victim, "signed_constant", 0.5, "global", {}),
        (Victim, "kaiming_uniform", 1.0, "global", {}),
        (Victim, "signed_constant", 0.0, "layer", {}),
        (None, "signed_constant", 0.2, "layer", {}),
        (None, "signed_constant", 1.0, "global", {}),
        (Victim, "signed_constant", 0.3, "layer", {"mask": "multicoat", "coats": 3}),
        (Victim, "kaiming_uniform", 0.9, "layer", {"mask": "signed"}),
        (Victim, "kaiming_normal", 0.3, "global", {"binarize": True}),
    )
    for build, weights, rate, ranking, more in kinds:
        sparsity = 0.95 if ranking == "global" and build is None else 0.5
        chosen: dict[str, Any] = {"weights": weights, "ranking": ranking, **more}
        model = iterand.prune_(build() if build else build_network(**own), sparsity, **chosen)
        for number in range(8):
            with torch.no_grad():
                for score in iterand.scores(model):
                    score += torch.randn(score.shape, generator=torch.Generator().manual_seed(number)) * score.std()
            iterand.randomize_(model, rate, redraw_from="kept" if rate == 0.9 else "fresh")
        for buffer in model.buffers():
            if buffer.shape == (6,):
                buffer += torch.arange(6.0)
        data = save.ticket_bytes(model, recipe={"network": own}, metrics={"accuracy": 0.5})
        ticket = read.parse(data)
        state = ticket.state_dict()
        made.append(Target(data, {name: state[name] for name in ticket.layers}, build or (lambda: None)))
    return [*made, on_a_base()]


def on_a_base() -> Target:
    """A ticket that holds a mask of existing weights, and not these."""

    def base() -> nn.Module:
        torch.manual_seed(0)
        return Victim()

    model = iterand.prune_(base(), 0.3, weights="existing", trainable="norm")
    with torch.no_grad():
        model.get_parameter("norm.weight").add_(torch.arange(6.0))
        for score in iterand.scores(model):
            score += torch.randn(score.shape, generator=torch.Generator().manual_seed(1)) * score.std()
    data = save.ticket_bytes(model, metrics={"accuracy": 0.5}, base="the victim")
    state = read.parse(data).state_dict(base().state_dict())
    return Target(data, {name: state[name] for name in read.parse(data).layers}, base)


def repaired(data: bytes) -> bytes:
    """The bytes with the right checksum, where there is room for one."""
    return data[:8] + hashlib.sha256(data[:8] + data[40:]).digest() + data[40:] if len(data) >= 40 else data


def flip(data: bytes, dice: random.Random) -> bytes:
    """Other bytes in some places."""
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 8))):
        changed[dice.randrange(len(changed))] = dice.randrange(256)
    return bytes(changed)


def flip_in_body(data: bytes, dice: random.Random) -> bytes:
    """Other bits behind the header: in planes, bits, states and words."""
    start = 44 + int.from_bytes(data[40:44], "little")
    changed = bytearray(data)
    for _ in range(dice.choice((1, 2, 2, 3))):
        changed[dice.randrange(start, len(data))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def cut(data: bytes, dice: random.Random) -> bytes:
    """Only the head, only the tail, or a piece missing."""
    a, b = sorted(dice.randrange(len(data) + 1) for _ in range(2))
    return dice.choice((data[:a], data[b:], data[:a] + data[b:]))


def grow(data: bytes, dice: random.Random) -> bytes:
    """A piece twice, or noise inserted."""
    a, b = sorted(dice.randrange(len(data) + 1) for _ in range(2))
    return dice.choice((data[:b] + data[a:], data[:a] + dice.randbytes(dice.randrange(1, 64)) + data[a:]))


def header_length(data: bytes, dice: random.Random) -> bytes:
    """Another length of the header."""
    return data[:40] + (dice.choice(NUMBERS) % (1 << 32)).to_bytes(4, "little") + data[44:]


def header_value(data: bytes, dice: random.Random) -> bytes:
    """Another value somewhere in the header, in a file that is whole."""
    header, body = format.unpack(data)
    holder, key = dice.choice(list(_spots(header)))
    if dice.random() < 0.2:
        del holder[key]
    elif dice.random() < 0.3 and isinstance(holder[key], int) and not isinstance(holder[key], bool):
        holder[key] += dice.choice((-1, 1, 2, 100))
    else:
        holder[key] = dice.choice(ODDITIES)
    return format.pack(header, body)


def header_column(data: bytes, dice: random.Random) -> bytes:
    """A column that is usually left out, or a longer one, or entries exchanged between rows."""
    header, body = format.unpack(data)
    table = header[dice.choice([name for name in ("layers", "filled", "tensors", "base_tensors") if name in header])]
    rows = len(table["name"])
    what, column = dice.randrange(3), dice.choice(list(table))
    if what == 0:
        key, value = dice.choice(COLUMNS)
        table[key] = [value] * dice.choice((1, rows))
    elif what == 1:
        table[column] = table[column] * dice.choice((2, rows))
    else:
        dice.shuffle(table[column])
    return format.pack(header, body)


def body_pieces(data: bytes, dice: random.Random) -> bytes:
    """Pieces of the body exchanged, or some of its bytes left out, under a header that is whole."""
    header, body = format.unpack(data)
    a, b = sorted(dice.randrange(len(body) + 1) for _ in range(2))
    return format.pack(header, dice.choice((body[b:] + body[:b], body[:a] + body[b:], body[a:b], body + body[a:b])))


def _spots(value: Any) -> Iterator[tuple[Any, Any]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(entries):
        yield value, key
        yield from _spots(inner)


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    flip, flip_in_body, cut, grow, header_length, header_value, header_value, header_column, body_pieces,
)  # fmt: skip


def try_file(data: bytes, target: Target) -> str:
    """What became of one file: the refusal with names and numbers left out, or that it is accepted."""
    try:
        state = load.load(read.parse(data), target.build()).state_dict()
    except TicketError as error:
        if "\n" in str(error):
            raise AssertionError(f"more than one sentence: {error}") from None
        return re.sub(r"'[^']*'|\"[^\"]*\"|\[.*\]|-?\d[\d.e+]*", "_", str(error))[:90]
    for name, weight in target.weights.items():
        if not torch.equal(state[name], weight):
            raise AssertionError(f"accepted with another {name}")
    return "accepted: the same masked weights"


def fuzz(files: int, seed: int) -> dict[str, Any]:
    """Try so many files; the findings, and how often each outcome was met."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dice = random.Random(seed)
    victims = tickets()
    outcomes: collections.Counter[str] = collections.Counter()
    findings: list[str] = []
    slowest = 0.0
    for number in range(files):
        target = dice.choice(victims)
        mutation = dice.choice(MUTATIONS)
        changed = mutation(target.data, dice)
        if number % 2:
            changed = repaired(changed)
        start = time.process_time()
        try:
            outcomes[try_file(changed, target)] += 1
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            findings.append(f"file {number}, {mutation.__name__}: {error!r}")
        slowest = max(slowest, time.process_time() - start)
    return {"files": files, "seed": seed, "findings": findings, "slowest_seconds": slowest,
            "outcomes": dict(outcomes.most_common())}  # fmt: skip


def main() -> None:
    """Fuzz, and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    tickets()  # what the libraries take is not the files' doing
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    result = fuzz(arguments.files, arguments.seed)
    result["seconds"] = round(time.perf_counter() - start, 1)
    result["memory_growth_megabytes"] = round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, 1)
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    raise SystemExit(1 if result["findings"] else 0)


if __name__ == "__main__":
    main()
