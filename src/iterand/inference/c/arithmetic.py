"""How the pixels of a network in C are computed: the numbers that float32.h and int8.h need."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from iterand.inference.c.lists import Lists
from iterand.inference.nodes import (
    Add,
    Affine,
    AveragePool,
    Concatenate,
    Convolution,
    Flatten,
    Graph,
    Linear,
    MaxPool,
    Node,
    Value,
)
from iterand.inference.quantization import Bytes, gives_floats


class Writer(Protocol):
    """What takes constant data."""

    def array(self, kind: str, name: str, numbers: Iterable[str]) -> None:
        """Add an array."""

    def constant(self, kind: str, name: str, parts: Sequence[object]) -> None:
        """Add a structure."""


class Float32:
    """Numbers as they are."""

    kernels = ("planes.h", "float32.h", "layers.h")
    settings: tuple[str, ...] = ()
    number_bytes = 4
    alignment = 16
    """Of planes for fast code, in numbers: the longest vector."""
    behind = 0
    """Bytes of memory behind all values that are read but not used."""
    integers = False

    def gives_floats(self, name: str) -> bool:
        """Whether a value is written to the caller's memory by its layer."""
        return False

    def zero(self, name: str) -> int:
        """The number that stands for zero."""
        return 0

    def read_input(self, name: str, value: str) -> str:
        """A call that takes the caller's numbers."""
        return f"from_floats(input, {value});"

    def write_output(self, name: str, value: str) -> str:
        """A call that gives the caller the result."""
        return f"to_floats({value}, output);"

    def layer(self, writer: Writer, node: Convolution | Linear, lists: Lists) -> tuple[str, str]:
        """The name of an array of weights, and what follows the sums of a layer."""
        out, values = node.output.name, "NULL"
        if lists.values is not None:
            values = f"{out}_values"
            writer.array("float", values, _floats(lists.values))
        writer.array("float", f"{out}_scale", _floats(lists.scale))
        writer.array("float", f"{out}_shift", _floats(node.shift))
        return values, f"{{{out}_scale, {out}_shift, {int(node.relu)}}}"

    def average(self, node: MaxPool | AveragePool) -> str:
        """How an average becomes a number."""
        return "{0}"

    def mixing(self, writer: Writer, node: Node, value: Value, before: int) -> str:
        """How values are combined: scale and shift per channel or not, and whether a ReLU follows."""
        relu = int(getattr(node, "relu", False))
        if not isinstance(node, Affine):
            return f"NULL, NULL, {relu}"
        out = node.output.name
        writer.array("float", f"{out}_scale", _floats(node.scale))
        writer.array("float", f"{out}_shift", _floats(node.shift))
        return f"{out}_scale, {out}_shift, {relu}"


class Int8:
    """Numbers as bytes, sums as integers. A ReLU needs nothing: its result is never below the zero of its value."""

    kernels = ("planes.h", "int8.h", "layers.h")
    settings = ("#define NETWORK_INT8",)
    number_bytes = 1
    alignment = 32
    behind = 32
    integers = True

    def __init__(self, graph: Graph, activations: Mapping[str, Bytes]) -> None:
        self._graph = graph
        self._bytes = activations

    def gives_floats(self, name: str) -> bool:
        """Whether a value is written to the caller's memory by its layer."""
        return gives_floats(self._graph, name)

    def zero(self, name: str) -> int:
        """The number that stands for zero."""
        return self._bytes[name].zero if name in self._bytes else 0

    def read_input(self, name: str, value: str) -> str:
        """A call that takes the caller's numbers."""
        coding = self._bytes[name]
        return f"from_floats(input, {_float(1 / coding.scale)}, {_float(coding.zero)}, {value});"

    def write_output(self, name: str, value: str) -> str:
        """A call that gives the caller the result."""
        return f"to_floats({value}, {_float(self._bytes[name].scale)}, output);"

    def layer(self, writer: Writer, node: Convolution | Linear, lists: Lists) -> tuple[str, str]:
        """The name of an array of weights, and what follows the sums of a layer."""
        out, values = node.output.name, "NULL"
        if lists.values is not None:
            values = f"{out}_values"
            writer.array("int8_t", values, _integers(lists.values))
        source = self._bytes[node.inputs[0].name]
        scale = lists.scale * source.scale
        start = node.shift - scale * source.zero * lists.total
        if self.gives_floats(out):
            writer.array("float", f"{out}_scale", _floats(scale))
            writer.array("float", f"{out}_start", _floats(start))
            return values, f"{{NULL, NULL, NULL, {out}_scale, {out}_start, 0}}"
        target, residual = self._bytes[out], 0.0
        start = start / target.scale + target.zero
        if len(node.inputs) > 1:
            other = self._bytes[node.inputs[1].name]
            residual = other.scale / target.scale
            start -= residual * other.zero
        factors, exponents = _fixed_point(scale / target.scale, lowest=0 if lists.values is None else -15)
        writer.array("int16_t", f"{out}_factors", _integers(factors))
        writer.array("int16_t", f"{out}_shifts", _integers(_rounded(8 * start + 4, 16)))
        writer.array("int8_t", f"{out}_exponents", _integers(exponents))
        arrays = f"{out}_factors, {out}_shifts, {out}_exponents"
        return values, f"{{{arrays}, NULL, NULL, {_rounded(residual * 2**11, 16)}}}"

    def average(self, node: MaxPool | AveragePool) -> str:
        """How an average becomes a number."""
        source, target = self._bytes[node.inputs[0].name], self._bytes[node.output.name]
        return f"{{{_rounded(source.scale / target.scale * 2**16, 31)}, {source.zero}, {target.zero}}}"

    def mixing(self, writer: Writer, node: Node, value: Value, before: int) -> str:
        """How values are combined: factors in units of 2^-16."""
        source, target = self._bytes[value.name], self._bytes[node.output.name]
        scale, shift = np.ones(1), np.zeros(1)
        second, channels = 0.0, 0
        match node:
            case Affine():
                scale, shift, channels = node.scale.astype(np.float64), node.shift.astype(np.float64), 1
            case Add(inputs=(_, other)):
                second = self._bytes[other.name].scale / target.scale
                shift = shift - self._bytes[other.name].zero * self._bytes[other.name].scale
            case Flatten() | Concatenate():
                pass
        factors = scale * source.scale / target.scale
        starts = shift / target.scale + target.zero - factors * source.zero
        name = f"{node.output.name}_{before}"
        writer.array("int32_t", f"{name}_scale", _integers(_rounded(factors * 2**16, 22)))
        writer.array("int32_t", f"{name}_shift", _integers(_rounded(starts * 2**16, 30)))
        writer.constant(
            "mixing", f"{name}_mixing", [f"{name}_scale", f"{name}_shift", channels, _rounded(second * 2**16, 22)]
        )
        return f"&{name}_mixing"


def _fixed_point(factors: NDArray[np.float64], lowest: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Factors of 15 bits and exponents: sum · 2^exponent · factor / 2^15 is eighths of a step of the output.

    Sums of 16 bits are not shifted to the right, so their exponents are at least 0.
    """
    eighths = 8 * np.maximum(factors, 2.0**-60)
    exponents = np.clip(np.ceil(np.log2(eighths)), lowest, 15)
    exponents += np.rint(eighths * 2.0 ** (15 - exponents)) > np.iinfo(np.int16).max
    return _rounded(eighths * 2.0 ** (15 - exponents), 16), exponents.astype(np.int64)


def _rounded(numbers: ArrayLike, bits: int) -> NDArray[np.int64]:
    """The nearest integers of so many bits, sign included."""
    return np.clip(np.rint(numbers), -(1 << bits - 1) + 1, (1 << bits - 1) - 1).astype(np.int64)


def _integers(numbers: NDArray[np.generic]) -> list[str]:
    return [str(int(number)) for number in numbers.tolist()]


def _float(number: float) -> str:
    return f"{float(np.float32(number)).hex()}f"


def _floats(numbers: NDArray[np.floating]) -> list[str]:
    return [_float(number) for number in numbers.tolist()]
