"""The golden tickets: the writer still writes them, and a reader made from docs/ticket-format.md alone opens them.

The reader below shares no code with the package. Section numbers are those of the page.
"""

import hashlib
import json
import math
import struct
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch

import iterand
from ticket_models import FOLDER, GOLDEN, METRICS, RECIPE, SEQUENCES, WORDS, Mixed, golden, mixed

SIZES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I16": "<i2", "U8": "<u1", "BOOL": "?"}


class Reader:
    """Section 1 and 2: the container and the header."""

    def __init__(self, data: bytes) -> None:
        (length,) = struct.unpack("<Q", data[:8])
        outer = json.loads(data[8 : 8 + length])
        self.header = json.loads(outer.pop("__metadata__")["ticket"])
        self.tensors = {}
        for name, entry in outer.items():
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            self.tensors[name] = entry["dtype"], entry["shape"], data[start:end]
            if name == "sha256":
                zeroed = data[:start] + bytes(32) + data[end:]
                assert hashlib.sha256(zeroed).digest() == data[start:end]
        self.digest = hashlib.sha256()

    def state(self) -> dict[str, np.ndarray]:
        state = {}
        streams = self.tensors["streams"][2]
        for layer in self.header["layers"]:
            layer = {**self.header["shared"], **layer}
            mask, value = layer["streams"]
            state[layer["name"]] = self.layer(layer, streams[:mask], streams[mask : mask + value])
            streams = streams[mask + value :]
        assert streams == b""
        assert self.digest.hexdigest() == self.header["weights_sha256"]
        for name, (dtype, shape, element) in self.header["filled"].items():
            value = np.frombuffer(bytes.fromhex(element), dtype=SIZES[dtype])[0]
            state[name] = np.full(shape, value)
        for name, (dtype, shape, data) in self.tensors.items():
            kind, _, plain = name.partition(":")
            if kind == "tensor":
                value = np.frombuffer(data, dtype=SIZES[dtype]).reshape(shape)
                state[plain] = value.astype(SIZES[self.header["cast"].get(plain, dtype)])
        for name, same in self.header["aliases"].items():
            state[name] = state[same]
        return state

    def layer(self, layer: dict, mask_stream: bytes, value_stream: bytes) -> np.ndarray:
        """Sections 4 and 5: which weights are kept, and what they are."""
        count = math.prod(layer["shape"])
        kept = sum(number for _, number in layer["counts"])
        mask = self.symbols(mask_stream, [count - kept, kept]) if 0 < kept < count else [int(kept > 0)] * count
        told = [layer["counts"][symbol][0] for symbol in self.symbols(value_stream, [c for _, c in layer["counts"]])]
        padded = [*mask, *[0] * (-count % 8)]
        self.digest.update(bytes(int("".join(map(str, padded[i : i + 8])), 2) for i in range(0, count, 8)))
        weights = np.zeros(count, dtype=np.float32)
        for index, value in zip([i for i, keep in enumerate(mask) if keep], told):
            level = value if layer["stored"] == "level" else self.level(layer, index, value)
            weights[index] = np.float32(level) * np.float32(layer["unit"])
            self.digest.update(struct.pack("<f", weights[index]))
        return weights.reshape(layer["shape"]).astype(SIZES[layer["dtype"]])

    def level(self, layer: dict, index: int, value: int) -> int:
        draw = value
        if layer["stored"] in ("first", "latest") and value > 0:
            thresholds = [threshold for threshold, rounds in layer["history"] for _ in range(rounds)]
            fell = [r for r, t in enumerate(thresholds, start=1) if self.philox(layer, index, r)[1] < t]
            draw = fell[value - 1] if layer["stored"] == "first" else fell[-value]
        word = self.philox(layer, index, draw)[0]
        match layer["weight_distribution"]:
            case "kaiming_uniform":
                return 2 * (word // 2**8) + 1 - 2**24
            case "signed_constant":
                return 2 * (word // 2**31) - 1
            case "kaiming_normal":
                place = word // 2**16
                upper = place if place >= 2**15 else 2**16 - 1 - place
                quantile = NormalDist().inv_cdf(0.5 + (upper - 2**15 + 0.5) / 2**16)
                return round(quantile * 2**20) * (1 if place >= 2**15 else -1)

    def philox(self, layer: dict, index: int, draw: int) -> list[int]:
        """Section 6."""
        digest = hashlib.sha256(
            struct.pack("<Q", layer["seed"]) + layer.get("identity", layer["name"]).encode()
        ).digest()
        k0, k1 = struct.unpack("<II", digest[:8])
        c = [index % 2**32, index // 2**32, draw, 0]
        for _ in range(10):
            hi0, lo0 = divmod(c[0] * 0xD2511F53, 2**32)
            hi1, lo1 = divmod(c[2] * 0xCD9E8D57, 2**32)
            c = [hi1 ^ c[1] ^ k0, lo1, hi0 ^ c[3] ^ k1, lo0]
            k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
        return c

    def symbols(self, data: bytes, counts: list[int]) -> list[int]:
        """Section 3."""
        alphabet, total = len(counts), sum(counts)
        if alphabet == 1:
            assert data == b""
            return [0] * total
        size = 1
        while alphabet ** (size + 1) <= 256:
            size += 1
        shares = [2**24 - alphabet**size]
        for _ in range(size):
            shares = [share * count // total for share in shares for count in counts]
        frequency = [share + 1 for share in shares]
        frequency[shares.index(max(shares))] += 2**24 - sum(frequency)

        words = list(struct.unpack(f"<{len(data) // 4}I", data))
        assert words[-1] != 0
        state = 0
        while words and state < 2**32:
            state = state << 32 | words.pop()
        found = []
        for _ in range(-(-total // size)):
            q = state % 2**24
            group, start = 0, 0
            while q >= start + frequency[group]:
                start += frequency[group]
                group += 1
            state = (state >> 24) * frequency[group] + q - start
            if state < 2**32 and words:
                state = state << 32 | words.pop()
            found += [group // alphabet ** (size - 1 - place) % alphabet for place in range(size)]
        assert (state, words) == (0, [])
        assert not any(found[total:])
        found = found[:total]
        assert [found.count(symbol) for symbol in range(alphabet)] == counts
        return found


@pytest.mark.parametrize("name", GOLDEN)
def test_the_writer_still_writes_the_golden_bytes(name):
    assert golden(name) == (FOLDER / f"{name}.ticket").read_bytes()


@pytest.mark.parametrize("name", GOLDEN)
def test_the_package_opens_the_golden_file(name):
    ticket = iterand.read_ticket(FOLDER / f"{name}.ticket")
    assert (ticket.recipe, ticket.metrics, ticket.header.package) == (RECIPE, METRICS, "golden")
    plain = iterand.load_ticket(FOLDER / f"{name}.ticket", Mixed()).eval()
    assert torch.equal(plain(SEQUENCES, WORDS), mixed(**GOLDEN[name])(SEQUENCES, WORDS))


@pytest.mark.parametrize("name", GOLDEN)
def test_a_reader_written_from_the_page_finds_the_same_tensors(name):
    found = Reader((FOLDER / f"{name}.ticket").read_bytes()).state()
    expected = iterand.load_ticket(FOLDER / f"{name}.ticket", Mixed()).state_dict()
    assert found.keys() == expected.keys()
    for tensor, value in expected.items():
        assert found[tensor].dtype == value.numpy().dtype
        assert found[tensor].tobytes() == value.numpy().tobytes(), tensor


def test_the_golden_files_are_of_all_kinds():
    kinds = {name: {layer.header.stored for layer in iterand.read_ticket(FOLDER / f"{name}.ticket").layers.values()}
             for name in GOLDEN}  # fmt: skip
    assert kinds == {"places": {"first", "latest"}, "levels": {"level"}, "normal": {"round"}}


def test_the_page_names_every_key():
    page = (Path(__file__).parents[1] / "docs" / "ticket-format.md").read_text()
    header = Reader(golden("levels")).header
    for key in [*header, *header["shared"], *header["layers"][0]]:
        assert f"`{key}`" in page
