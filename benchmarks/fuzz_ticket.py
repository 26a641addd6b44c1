"""Open mutated tickets, and see that each is refused in one sentence or is still the same network.

    python benchmarks/fuzz_ticket.py --files 100000 --seed 0 --output docs/records/fuzz-ticket.json

Every second mutation repairs the checksum afterwards, so that the checks behind it are reached. What counts as a
finding: any other exception than TicketError, a file that takes longer than a second, more memory than the limit, or a
file that is accepted and gives other masked weights.
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
from iterand.networks import build_network
from iterand.ticket import container, loading, reading, writing

NUMBERS = (0, 1, -1, 2, 7, 255, 1 << 16, (1 << 24) + 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 60, 1 << 64, 10**30)
ODDITIES: tuple[Any, ...] = (*NUMBERS, None, True, "", "x", [], {}, [[]], 0.5, 1e300, -0.0, [1 << 40, 1 << 40], "F64")


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
    for build, weights, rate, ranking in (
        (Victim, "kaiming_uniform", 0.3, "layer"),
        (Victim, "signed_constant", 0.5, "global"),
        (Victim, "kaiming_uniform", 1.0, "global"),
        (Victim, "signed_constant", 0.0, "layer"),
        (None, "signed_constant", 0.2, "layer"),
    ):
        model = iterand.prune_(build() if build else build_network(**own), 0.5, weights=weights, ranking=ranking)
        for number in range(8):
            with torch.no_grad():
                for score in iterand.scores(model):
                    score += torch.randn(score.shape, generator=torch.Generator().manual_seed(number)) * score.std()
            iterand.randomize_(model, rate)
        for buffer in model.buffers():
            if buffer.shape == (6,):
                buffer += torch.arange(6.0)
        data = writing.ticket_bytes(model, recipe={"network": own}, metrics={"accuracy": 0.5})
        ticket = reading.parse(data)
        state = ticket.state_dict()
        made.append(Target(data, {name: state[name] for name in ticket.layers}, build or (lambda: None)))
    return made


def repaired(data: bytes) -> bytes:
    """The bytes with the right checksum, where one can be put in at all."""
    try:
        place = container._digest_place(*container._outer_header(data))
        if not 0 <= place.start <= place.stop <= len(data) or place.stop - place.start != 32:
            return data
    except Exception:
        return data
    zeroed = bytearray(data)
    zeroed[place] = bytes(32)
    zeroed[place] = hashlib.sha256(zeroed).digest()
    return bytes(zeroed)


def flip(data: bytes, dice: random.Random) -> bytes:
    """Other bytes in some places."""
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 8))):
        changed[dice.randrange(len(changed))] = dice.randrange(256)
    return bytes(changed)


def flip_in_streams(data: bytes, dice: random.Random) -> bytes:
    """One other bit behind the header."""
    start = 8 + int.from_bytes(data[:8], "little")
    changed = bytearray(data)
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


def outer_length(data: bytes, dice: random.Random) -> bytes:
    """Another length of the header."""
    return (dice.choice(NUMBERS) % (1 << 64)).to_bytes(8, "little") + data[8:]


def outer_number(data: bytes, dice: random.Random) -> bytes:
    """Another number in the safetensors header: shapes, offsets."""
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length]
    found = list(re.finditer(rb"(?<=[\[,])\d+(?=[\],])", text))
    if not found:
        return data
    spot = dice.choice(found)
    new = str(dice.choice(NUMBERS)).encode()
    text = text[: spot.start()] + new + text[spot.end() :]
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def inner_value(data: bytes, dice: random.Random) -> bytes:
    """Another value somewhere in the ticket's own header, in a container that is whole."""
    header, tensors = container.unpack(data)
    holder, key = dice.choice(list(_spots(header)))
    if dice.random() < 0.2:
        del holder[key]
    elif dice.random() < 0.3 and isinstance(holder[key], int) and not isinstance(holder[key], bool):
        holder[key] += dice.choice((-1, 1, 2, 100))
    else:
        holder[key] = dice.choice(ODDITIES)
    return container.pack(header, tensors)


def inner_swap(data: bytes, dice: random.Random) -> bytes:
    """Two streams exchanged, one left out, or one of another type."""
    header, tensors = container.unpack(data)
    a, b = dice.choice(list(tensors)), dice.choice(list(tensors))
    what = dice.randrange(4)
    if what == 0:
        tensors[a], tensors[b] = tensors[b].clone(), tensors[a].clone()
    elif what == 1:
        del tensors[a]
    elif what == 2:
        tensors[a] = tensors[a].reshape(-1).view(torch.uint8).to(dice.choice((torch.int32, torch.bool, torch.uint8)))
    else:
        tensors[dice.choice(("streams:x", "tensor:", "tensor:first.weight", "other"))] = tensors[a].clone()
    return container.pack(header, tensors)


def _spots(value: Any) -> Iterator[tuple[Any, Any]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(entries):
        yield value, key
        yield from _spots(inner)


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    flip, flip_in_streams, cut, grow, outer_length, outer_number, inner_value, inner_value, inner_swap,
)  # fmt: skip


def try_file(data: bytes, target: Target) -> str:
    """What became of one file: the refusal with names and numbers left out, or that it is accepted."""
    try:
        state = loading.load(reading.parse(data), target.build()).state_dict()
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
