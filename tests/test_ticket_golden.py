"""The golden tickets: the writer still writes them, and a reader made from ticket-format.md alone opens them.

The reader below shares no code with the package. Section numbers are those of the page.
"""

import hashlib
import json
import math
import struct
import zlib
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch

import iterand
from iterand.ticket import codec, format
from ticket_models import FOLDER, GOLDEN, METRICS, RECIPE, golden, golden_model

PAGE = (Path(__file__).parents[1] / "docs" / "reference" / "ticket-format.md").read_text(encoding="utf-8")
DICTIONARY = "".join(PAGE.partition("## 8.")[2].split("```")[1].split("\n")).encode()
NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I16": "<i2", "U8": "<u1", "BOOL": "?"}
DEFAULTS = {"dtype": "F32", "history": [], "multipliers": []}


class Reader:
    def __init__(self, data: bytes) -> None:
        """Sections 1 and 2: the file and the header."""
        assert data[:8] == b"iterand\2"
        assert hashlib.sha256(data[:8] + data[40:]).digest() == data[8:40]
        (length,) = struct.unpack("<I", data[40:44])
        inflater = zlib.decompressobj(-15, DICTIONARY)
        self.header = json.loads(inflater.decompress(data[44 : 44 + length]))
        assert inflater.eof
        self.rest = data[44 + length :]
        self.digest = hashlib.sha256()

    def rows(self, table: str) -> list[dict]:
        columns = self.header.get(table, {"name": []})
        return [
            DEFAULTS | {key: entries[number % len(entries)] for key, entries in columns.items()}
            for number in range(len(columns["name"]))
        ]

    def state(self) -> dict[str, np.ndarray]:
        state = self.tensors()
        layers = self.rows("layers")
        counts = [counts for layer in layers for counts in self.counts(layer)]
        factors = [[n for n in layer["multipliers"] if n > 0] for layer in layers]
        sequences = self.sequences(counts + [one for one in factors if one])
        behind = iter(sequences[2 * len(layers) :])
        for number, layer in enumerate(layers):
            symbols = next(behind)[1] if factors[number] else None
            state[layer["name"]] = self.layer(layer, *sequences[2 * number : 2 * number + 2], symbols)
        assert self.digest.hexdigest() == self.header["weights_sha256"]
        for row in self.rows("filled"):
            value = np.frombuffer(bytes.fromhex(row["element"]), dtype=NUMPY[row["dtype"]])[0]
            state[row["name"]] = np.full(row["shape"], value)
        for name, same in self.header.get("aliases", {}).items():
            state[name] = state[same]
        return state

    def tensors(self) -> dict[str, np.ndarray]:
        """Section 3: byte planes."""
        state, lengths = {}, list(self.header.get("planes", ()))
        rows = self.rows("tensors")
        while rows:
            kind = rows[0].get("saved_as", rows[0]["dtype"])
            group = []
            while rows and rows[0].get("saved_as", rows[0]["dtype"]) == kind:
                group.append(rows.pop(0))
            total, planes = sum(math.prod(row["shape"]) for row in group), []
            for _ in range(np.dtype(NUMPY[kind]).itemsize):
                length = lengths.pop(0)
                plane, self.rest = self.rest[:length], self.rest[length:]
                planes.append(plane if length == total else zlib.decompressobj(-15).decompress(plane))
            elements = np.frombuffer(bytes(byte for element in zip(*planes) for byte in element), dtype=NUMPY[kind])
            for row in group:
                count = math.prod(row["shape"])
                state[row["name"]] = elements[:count].reshape(row["shape"]).astype(NUMPY[row["dtype"]])
                elements = elements[count:]
        assert not lengths
        return state

    def counts(self, layer: dict) -> tuple[list[int], list[int]]:
        values = [count for count in layer["counts"] if count > 0]
        size, kept = math.prod(layer["shape"]), sum(values)
        return [count for count in (size - kept, kept) if count], values

    def sequences(self, all_counts: list[list[int]]) -> list[tuple[list[int], list[int]]]:
        """Section 4: coded symbols and symbols of every sequence."""
        kinds = [self.kind(counts) for counts in all_counts]
        all_coded = []
        for kind, counts in zip(kinds, all_counts):
            length = -(-sum(counts) // 8) if kind == "bits" else 0
            all_coded.append(list(self.rest[:length]))
            self.rest = self.rest[length:]
        expected = [self.expected(kind, counts) for kind, counts in zip(kinds, all_counts)]
        lanes = min(2048, -(-sum(expected) // 2048))
        state = list(struct.unpack(f"<{lanes}I", self.rest[: 4 * lanes]))
        assert all(x >= 2**16 for x in state)
        words = iter(struct.unpack(f"<{(len(self.rest) - 4 * lanes) // 2}H", self.rest[4 * lanes :]))
        for kind, counts, missing, coded in zip(kinds, all_counts, expected, all_coded):
            frequency = self.frequencies(kind, counts) if missing else []
            while missing:
                lane = len(coded) % lanes
                q, symbol, first = state[lane] % 2**16, 0, 0
                while q >= first + frequency[symbol]:
                    first += frequency[symbol]
                    symbol += 1
                state[lane] = frequency[symbol] * (state[lane] // 2**16) + q - first
                if state[lane] < 2**16:
                    state[lane] = state[lane] * 2**16 + next(words)
                coded.append(symbol)
                missing -= kind == "groups" or symbol < 255
        assert all(x == 2**16 for x in state)
        assert next(words, None) is None
        return [(coded, self.symbols(kind, counts, coded)) for kind, counts, coded in zip(kinds, all_counts, all_coded)]

    def kind(self, counts: list[int]) -> str:
        if len(counts) < 2:
            return "constant"
        if len(counts) == 2 and 16 * abs(counts[0] - counts[1]) <= sum(counts):
            return "bits"
        return "runs" if len(counts) == 2 and 8 * min(counts) <= sum(counts) else "groups"

    def group_size(self, alphabet: int) -> int:
        size = 1
        while alphabet ** (size + 1) <= 256:
            size += 1
        return size

    def expected(self, kind: str, counts: list[int]) -> int:
        if kind == "groups":
            return -(-sum(counts) // self.group_size(len(counts)))
        return min(counts) if kind == "runs" else 0

    def frequencies(self, kind: str, counts: list[int]) -> list[int]:
        total = sum(counts)
        if kind == "groups":
            size = self.group_size(len(counts))
            shares = [(2**16 - len(counts) ** size) * 2**16]
            for _ in range(size):
                shares = [share * count // total for share in shares for count in counts]
            shares = [share // 2**16 for share in shares]
        else:
            chance, left = min(counts) * 2**32 // total, [2**32]
            for _ in range(255):
                left.append(left[-1] * (2**32 - chance) // 2**32)
            shares = [(2**16 - 256) * (a - b) // 2**32 for a, b in zip(left, [*left[1:], 0])]
        frequency = [share + 1 for share in shares]
        frequency[shares.index(max(shares))] += 2**16 - sum(frequency)
        return frequency

    def symbols(self, kind: str, counts: list[int], coded: list[int]) -> list[int]:
        alphabet, total = len(counts), sum(counts)
        if kind == "constant":
            return [0] * total
        if kind == "runs":
            rare = 1 if counts[1] <= counts[0] else 0
            found = []
            for symbol in coded:
                found += [1 - rare] * symbol + [rare] * (symbol < 255)
            found += [1 - rare] * (total - len(found))
        else:
            size = self.group_size(alphabet)
            found = [group // alphabet ** (size - 1 - place) % alphabet for group in coded for place in range(size)]
            assert not any(found[total:])
            found = found[:total]
        assert [found.count(symbol) for symbol in range(alphabet)] == counts
        return found

    def present(self, counts: list[int], values: list[int] | range) -> list[int]:
        """The values that occur."""
        found, position = [], 0
        for count in counts:
            if count > 0:
                found.append(values[position])
            position += max(-count, 1)
        return found

    def layer(
        self,
        layer: dict,
        mask: tuple[list[int], list[int]],
        values: tuple[list[int], list[int]],
        factors: list[int] | None = None,
    ) -> np.ndarray:
        """Sections 5 and 6: which weights are kept, and what they are."""
        custom = self.header.get("levels", {})
        levels = custom.get(layer["weight_distribution"], [-1, 1]) if layer["stored"] == "level" else range(2**24)
        present = self.present(layer["counts"], levels)
        size = math.prod(layer["shape"])
        kept = [index for index, keep in enumerate(mask[1]) if keep] if 0 < len(values[1]) < size else range(size)
        weights = np.zeros(size, dtype=np.float32)
        for index, symbol in zip(kept, values[1]):
            value = present[symbol]
            level = value if layer["stored"] == "level" else self.level(layer, index, value)
            weights[index] = np.float32(level) * self.unit(layer)
        if factors is not None:
            assert ":signed" in layer["weight_distribution"]  # no golden file has coats beside draws
            multipliers = self.present(layer["multipliers"], [-1, 1])
            for index, symbol in zip(kept, factors):
                weights[index] *= multipliers[symbol]
        self.digest.update(bytes(mask[0]) + bytes(values[0]))  # no golden file has more than 256 coded symbols
        drawn = [weights[index] for index, _ in zip(kept, values[1])]
        if layer["stored"] == "level":
            drawn = [np.float32(level) * self.unit(layer) for level in present]
        self.digest.update(struct.pack(f"<{len(drawn)}f", *drawn))
        return weights.reshape(layer["shape"]).astype(NUMPY[layer["dtype"]])

    def unit(self, layer: dict) -> np.float32:
        if "unit" in layer:
            return np.float32(layer["unit"])
        shape = layer["shape"]
        fan_in = layer.get("fan_in", math.prod(shape[1:] if len(shape) > 1 else shape))
        return np.float32(
            {
                "kaiming_uniform": math.sqrt(6 / fan_in) / 2**24,
                "signed_constant": math.sqrt(2 / fan_in),
                "kaiming_normal": math.sqrt(2 / fan_in) / 2**20,
            }[layer["weight_distribution"]]
        )

    def level(self, layer: dict, index: int, value: int) -> int:
        """Section 7."""
        draw = value
        if layer["stored"] in ("first", "latest") and value > 0:
            thresholds = [threshold for threshold, rounds in layer["history"] for _ in range(rounds)]
            fell = [r for r, t in enumerate(thresholds, start=1) if self.philox(layer, index, r)[1] < t]
            draw = fell[value - 1] if layer["stored"] == "first" else fell[-value]
        name, *tags = layer["weight_distribution"].split(":")
        if "recycled" in tags and draw > 0:
            index, draw = self.philox(layer, index, draw, 4)[0] * math.prod(layer["shape"]) // 2**32, 0
        word = self.philox(layer, index, draw)[0]
        match name:
            case "kaiming_uniform":
                return 2 * (word // 2**8) + 1 - 2**24
            case "signed_constant":
                return 2 * (word // 2**31) - 1
            case "kaiming_normal":
                place = word // 2**16
                upper = place if place >= 2**15 else 2**16 - 1 - place
                quantile = NormalDist().inv_cdf(0.5 + (upper - 2**15 + 0.5) / 2**16)
                return round(quantile * 2**20) * (1 if place >= 2**15 else -1)

    def philox(self, layer: dict, index: int, draw: int, stream: int = 0) -> list[int]:
        identity = layer.get("identity", layer["name"])
        digest = hashlib.sha256(struct.pack("<Q", layer["seed"]) + identity.encode()).digest()
        k0, k1 = struct.unpack("<II", digest[:8])
        c = [index % 2**32, index // 2**32, draw, stream]
        for _ in range(10):
            hi0, lo0 = divmod(c[0] * 0xD2511F53, 2**32)
            hi1, lo1 = divmod(c[2] * 0xCD9E8D57, 2**32)
            c = [hi1 ^ c[1] ^ k0, lo1, hi0 ^ c[3] ^ k1, lo0]
            k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
        return c


def test_the_page_has_the_dictionary_of_the_package():
    assert DICTIONARY == format.DICTIONARY
    assert f"{len(DICTIONARY)} bytes" in PAGE


@pytest.mark.parametrize("name", GOLDEN)
def test_the_writer_still_writes_the_golden_files(name):
    """What DEFLATE makes of header and planes may differ between zlib's releases, so these are compared inflated."""
    written, stored = Reader(golden(name)), Reader((FOLDER / f"{name}.ticket").read_bytes())
    expected = stored.header
    assert {key: written.header[key] for key in expected if key != "planes"} == {
        key: expected[key] for key in expected if key != "planes"
    }
    tensors = written.tensors()
    assert all(np.array_equal(value, tensors[key]) for key, value in stored.tensors().items())
    assert written.rest == stored.rest


@pytest.mark.parametrize("name", GOLDEN)
def test_the_package_opens_the_golden_file(name):
    ticket = iterand.read_ticket(FOLDER / f"{name}.ticket")
    assert (ticket.recipe, ticket.metrics, ticket.header.package) == (RECIPE, METRICS, "golden")
    masked, plain, inputs = golden_model(name)
    iterand.load_ticket(FOLDER / f"{name}.ticket", plain)
    assert torch.equal(plain(*inputs), masked(*inputs))


@pytest.mark.parametrize("name", GOLDEN)
def test_a_reader_written_from_the_page_finds_the_same_tensors(name):
    found = Reader((FOLDER / f"{name}.ticket").read_bytes()).state()
    expected = iterand.load_ticket(FOLDER / f"{name}.ticket", golden_model(name)[1]).state_dict()
    assert found.keys() == expected.keys()
    for tensor, value in expected.items():
        assert found[tensor].dtype == value.numpy().dtype
        assert found[tensor].tobytes() == value.numpy().tobytes(), tensor


def test_the_golden_files_are_of_all_kinds():
    tickets = {name: iterand.read_ticket(FOLDER / f"{name}.ticket") for name in GOLDEN}
    stored = {name: {layer.stored for layer in ticket.header.layers} for name, ticket in tickets.items()}
    assert stored["places"] | stored["lanes"] == {"first", "latest"}
    assert [stored[name] for name in ("levels", "normal", "sparse")] == [{"level"}, {"round"}, {"first", "level"}]
    assert codec.lane_count([layer.value_model for layer in tickets["lanes"].header.layers]) > 1
    layers = [layer for ticket in tickets.values() for layer in ticket.header.layers]
    assert {layer.mask_model.kind for layer in layers} == {"constant", "bits", "runs", "groups"}
    assert {layer.value_model.kind for layer in layers} == {"constant", "groups"}
    assert stored["coats"] == {"level"}
    assert {layer.settings.coats for layer in tickets["coats"].header.layers} == {3}
    assert {layer.settings.gain for layer in tickets["gain"].header.layers} == {1.78}
    assert "level" not in stored["gain"] | stored["recycled"]
    assert all(layer.multipliers for layer in tickets["recycled"].header.layers)
    assert any(layer.redrawn for layer in tickets["recycled"].header.layers)


def test_the_page_names_every_key():
    for name in GOLDEN:
        header = Reader(golden(name)).header
        tables = [header[table] for table in ("layers", "filled", "tensors") if table in header]
        for key in [*header, *(column for table in tables for column in table)]:
            assert f"`{key}`" in PAGE
