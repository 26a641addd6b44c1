"""CIFAR-10, in its binary or its Python version; the latter is unpickled without running any code."""

import hashlib
import io
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from iterand.errors import DataError
from iterand.lab.data.dataset import Dataset, Located, Normalizer, Options, Progress, find_layout, fixed_order, limited
from iterand.lab.data.images import ImageSplit
from iterand.lab.data.reading import members

CLASSES = 10
RECORDS = 10_000
"""The number of images in each file."""

_PIXELS = 3 * 32 * 32
_LAYOUTS = {
    "cifar-10-batches-bin": "binary",
    "cifar-10-batches-py": "python",
    "cifar-10-binary.tar.gz": "binary",
    "cifar-10-binary.tar": "binary",
    "cifar-10-python.tar.gz": "python",
    "cifar-10-python.tar": "python",
}
PUBLISHED = {  # SHA-256 of the records of each file
    "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}

Records = NDArray[np.uint8]
"""One row per image: its label, then its red, green and blue pixels, as in the binary version."""


def locate(root: Path) -> Located | None:
    """Find CIFAR-10 in this folder, in any of its layouts."""
    return find_layout(root, "cifar10", _LAYOUTS)


def load(located: Located, device: torch.device, options: Options) -> Dataset[ImageSplit]:
    """45,000 / 5,000 / 10,000 images; the validation images are the same in all runs."""
    records = read(located)
    train = np.concatenate([rows for name, rows in records.items() if name != "test_batch"])
    order = fixed_order(len(train))
    held_out = len(train) // 10
    normalize = Normalizer(options.normalization, device)

    def part(rows: Records, chosen: torch.Tensor) -> ImageSplit:
        picked = torch.from_numpy(rows[limited(chosen, options.limit).numpy()]).to(device)
        images = picked[:, 1:].reshape(-1, 3, 32, 32).contiguous()
        return ImageSplit(images, picked[:, 0].long(), normalize, options.augmentation)

    test = records["test_batch"]
    return Dataset(
        train=part(train, limited(order[held_out:], options.train_limit)),
        validation=part(train, order[:held_out]),
        test=part(test, torch.arange(len(test))),
        classes=CLASSES,
    )


def check(located: Located, progress: Progress) -> str:
    """Compare every record with the published ones."""
    records = read(located)
    for done, (name, rows) in enumerate(records.items(), start=1):
        digest = hashlib.sha256(rows.tobytes()).hexdigest()
        if digest != PUBLISHED[name]:
            raise DataError(
                f"{name} in {located.path} differs from the published one: SHA-256 of its records {digest}, "
                f"expected {PUBLISHED[name]}; remove it and fetch it again"
            )
        progress(done, len(records))
    return f"{sum(map(len, records.values())):,} images, all as published"


def read(located: Located) -> dict[str, Records]:
    """The records of the six files, in order."""
    ending, parse = _PARSERS[located.layout]
    found = {
        name.removesuffix(ending): parse(content, f"{name} in {located.path}")
        for name, content in members(located.path, [f"{name}{ending}" for name in PUBLISHED])
    }
    for name in PUBLISHED:
        if name not in found:
            raise DataError(f"{located.path} has no {name}{ending}; remove it and fetch it again")
    return {name: found[name] for name in PUBLISHED}


def _parse_binary(content: bytes, where: str) -> Records:
    expected = RECORDS * (1 + _PIXELS)
    if len(content) != expected:
        raise DataError(f"{where} has {len(content):,} bytes, not {expected:,}; remove it and fetch it again")
    return _checked(np.frombuffer(content, np.uint8).reshape(RECORDS, 1 + _PIXELS), where)


def _parse_python(content: bytes, where: str) -> Records:
    values = load_arrays(content, where)
    try:
        labels, pixels = np.asarray(values[b"labels"]), values[b"data"]
        if pixels.shape != (RECORDS, _PIXELS) or labels.shape != (RECORDS,):
            raise ValueError(f"shapes {pixels.shape} and {labels.shape}")
        wide = np.clip(labels.astype(np.int64), -1, 255)
        return _checked(np.concatenate([wide[:, None], pixels], axis=1), where)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{where} holds no {RECORDS:,} images with labels ({error}); fetch it again") from None


def _checked(records: NDArray[np.uint8] | NDArray[np.int64], where: str) -> Records:
    wrong = np.flatnonzero((records[:, 0] < 0) | (records[:, 0] >= CLASSES))
    if len(wrong):
        raise DataError(
            f"{where} says that image {wrong[0]} has label {records[wrong[0], 0]}, but labels are 0 to {CLASSES - 1}"
        )
    return records.astype(np.uint8, copy=False)


_PARSERS = {"binary": (".bin", _parse_binary), "python": ("", _parse_python)}


def load_arrays(data: bytes, where: str) -> Any:
    """Unpickle arrays and plain values; ``where`` names the data in errors. Strings of Python 2 become bytes."""
    try:
        return _with_arrays(_ArrayUnpickler(io.BytesIO(data), encoding="bytes").load())
    except _RefusedError as error:
        raise DataError(
            f"{where} asks to run {error}, but a pickled data set may hold arrays only; do not use it"
        ) from None
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{where} is cut short or damaged ({error}); remove it and fetch it again") from None


class _RefusedError(Exception):
    pass


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        replacement = _REPLACEMENTS.get((module.replace("numpy._core", "numpy.core"), name))
        if replacement is None:
            raise _RefusedError(f"{module}.{name}")
        return replacement

    def persistent_load(self, reference: Any) -> Any:
        raise _RefusedError(f"the reference {reference!r}")


class _Dtype:
    """Replaces ``numpy.dtype``: only the name is used."""

    def __init__(self, name: str | bytes, *_: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        pass


class _Array:
    """Replaces ``numpy.ndarray``: shape and bytes are passed as its state."""

    def __init__(self, *_: Any) -> None:
        self.values: NDArray[np.uint8] | None = None

    def __setstate__(self, state: tuple[Any, tuple[int, ...], _Dtype, bool, bytes]) -> None:
        _, shape, kind, by_columns, content = state
        if kind.name not in ("u1", b"u1") or len(content) != math.prod(shape):
            raise ValueError(f"an array of type {kind.name!r}, shape {shape} and {len(content)} bytes")
        self.values = np.frombuffer(content, np.uint8).reshape(shape, order="F" if by_columns else "C")


def _encode(text: str, encoding: str) -> bytes:
    """Replaces ``codecs.encode``, with which Python 3 pickles bytes for Python 2."""
    if encoding not in ("latin1", b"latin1"):
        raise ValueError(f"an encoding {encoding!r}")
    return text.encode("latin1")


_REPLACEMENTS = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}


def _with_arrays(value: Any) -> Any:
    """The value with each replacement turned into its array."""
    if isinstance(value, _Array):
        return value.values
    if isinstance(value, dict):
        return {key: _with_arrays(item) for key, item in value.items()}
    return value
