"""The operations of a network for inference.

Batch norm, ReLU and residual additions are part of the layer before them. Weights are not multiplied by a scale, so a
pruned weight is exactly zero and levels such as ±c stay equal.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Pair = tuple[int, int]
"""Height and width."""


@dataclass(frozen=True)
class Value:
    """A tensor that a node computes, without the dimension of the batch."""

    name: str
    """``"v0"``, ``"v1"``, …: a C identifier, in order of computation; ``"v0"`` is the input."""
    shape: tuple[int, ...]
    """(channels, height, width), (channels, length) or (features,)."""


@dataclass(frozen=True, eq=False)
class Node:
    """One operation."""

    inputs: tuple[Value, ...]
    output: Value
    where: str
    """The path of the module it stems from, such as ``"stages.0.1.branch.2"``."""


@dataclass(frozen=True, eq=False)
class Convolution(Node):
    """relu?(scale · conv(x, weight) + shift + residual), in 1 or 2 dimensions; a 1d one has height 1.

    The inputs are (x,) or (x, residual). Layers that share a weight share its array.
    """

    weight: NDArray[np.float32]
    """(out, in / groups, height, width)."""
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    scale: NDArray[np.float32]
    shift: NDArray[np.float32]
    relu: bool = False


@dataclass(frozen=True, eq=False)
class Linear(Node):
    """relu?(scale · (weight x) + shift + residual); the inputs are (x,) or (x, residual)."""

    weight: NDArray[np.float32]
    """(out, in)."""
    scale: NDArray[np.float32]
    shift: NDArray[np.float32]
    relu: bool = False


@dataclass(frozen=True, eq=False)
class Affine(Node):
    """relu?(scale · x + shift) per channel: a batch norm or a ReLU that is not folded into another node."""

    scale: NDArray[np.float32]
    shift: NDArray[np.float32]
    relu: bool = False


@dataclass(frozen=True, eq=False)
class Add(Node):
    """relu?(a + b)."""

    relu: bool = False


@dataclass(frozen=True, eq=False)
class MaxPool(Node):
    """Max pooling; padding is never the maximum."""

    kernel: Pair
    stride: Pair
    padding: Pair


@dataclass(frozen=True, eq=False)
class AveragePool(Node):
    """Average pooling, adaptive and global average pooling included."""

    kernel: Pair
    stride: Pair
    padding: Pair
    count_include_pad: bool


@dataclass(frozen=True, eq=False)
class Concatenate(Node):
    """Concatenation along channels."""


@dataclass(frozen=True, eq=False)
class Flatten(Node):
    """(channels, height, width) as (features,), in row-major order."""


@dataclass(frozen=True)
class Graph:
    """A network as operations in order of computation."""

    nodes: tuple[Node, ...]
    input: Value
    output: Value
    kept: dict[str, NDArray[np.bool_]] = field(default_factory=dict, compare=False)
    """Which channels are not left out, by the names of the values that lose some."""
