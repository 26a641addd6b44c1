"""Read a pickle that holds lists, strings, numbers and arrays of bytes, and nothing that could run.

A pickle is a program that may call what it names. Here it can name four things, and gets a stand-in for each that does
no more than remember what it was called with.
"""

import io
import math
import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iterand.errors import DataError


def load_arrays(data: bytes, where: str) -> Any:
    """What is pickled in ``data``; ``where`` names it in errors. Strings of Python 2 come as bytes."""
    try:
        return _finished(_ArrayUnpickler(io.BytesIO(data), encoding="bytes").load())
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
        stand_in = _STAND_INS.get((module.replace("numpy._core", "numpy.core"), name))
        if stand_in is None:
            raise _RefusedError(f"{module}.{name}")
        return stand_in

    def persistent_load(self, reference: Any) -> Any:
        raise _RefusedError(f"the reference {reference!r}")


class _Type:
    """Stands for a dtype: only its name counts."""

    def __init__(self, name: str | bytes, *_: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        pass


class _Array:
    """Stands for an array: its shape and bytes come as its state."""

    def __init__(self, *_: Any) -> None:
        self.values: NDArray[np.uint8] | None = None

    def __setstate__(self, state: tuple[Any, tuple[int, ...], _Type, bool, bytes]) -> None:
        _, shape, kind, by_columns, content = state
        if kind.name not in ("u1", b"u1") or len(content) != math.prod(shape):
            raise ValueError(f"an array of type {kind.name!r}, shape {shape} and {len(content)} bytes")
        self.values = np.frombuffer(content, np.uint8).reshape(shape, order="F" if by_columns else "C")


def _encode(text: str, encoding: str) -> bytes:
    """Stands for ``codecs.encode``, by which Python 3 writes bytes for Python 2."""
    if encoding not in ("latin1", b"latin1"):
        raise ValueError(f"an encoding {encoding!r}")
    return text.encode("latin1")


_STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _encode,
}


def _finished(value: Any) -> Any:
    """The value with arrays in place of their stand-ins."""
    if isinstance(value, _Array):
        return value.values
    if isinstance(value, dict):
        return {key: _finished(item) for key, item in value.items()}
    return value
