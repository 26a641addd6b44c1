"""Activations as bytes: which number a byte stands for, chosen from a sample of inputs."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from iterand.errors import IterandError
from iterand.inference.c.lists import Lists
from iterand.inference.graph import FoldedModule
from iterand.inference.nodes import Convolution, Flatten, Graph, Linear, MaxPool

LEVELS = 255
_BATCH = 32
_TOGETHER = 128  # bytes of each sign whose sum always fits 16 bits
_LARGEST_SUM = 3 << 13  # on the sample: three quarters of what fits 16 bits, which saturate
_MOST_STEPS = 3 << 10  # of an output that may be added to a sum: the same in eighths of a step
_TOLERANCE = 0.5  # of outputs with int8, relative to the largest
_NOTABLE = 0.1  # may cost accuracy

logger = logging.getLogger("iterand")

Activations = Literal["float32", "int8"]
ACTIVATIONS: tuple[str, ...] = get_args(Activations)


def check_sample(activations: str, sample: "NDArray[np.float32] | Tensor | None") -> Tensor | None:
    """The sample as a tensor if activations are bytes, None if they are floats."""
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations is {activations!r}; it is one of {', '.join(map(repr, ACTIVATIONS))}")
    if activations == "float32":
        if sample is not None:
            raise ValueError('a sample is given, which activations="float32" has no use for; leave it out')
        return None
    if sample is None:
        raise ValueError('activations="int8" needs a sample: a batch of inputs, from which ranges are chosen')
    rule = "it must be a batch of floating-point inputs, prepared as in training"
    if isinstance(sample, Tensor):
        found = sample.detach().cpu()
    else:
        array = np.asarray(sample)
        if array.dtype.kind not in "fiub":
            raise ValueError(f"sample is a {type(sample).__name__}; {rule}")
        found = torch.from_numpy(array)
    if not found.is_floating_point() or found.ndim < 2 or not len(found):
        raise ValueError(f"sample is {found.dtype} of shape {tuple(found.shape)}; {rule}")
    if found.min() == found.max():
        raise ValueError(f"all numbers of the sample are {found.min():g}, which says nothing about ranges; {rule}")
    return found.float().contiguous()


@dataclass(frozen=True)
class Bytes:
    """A byte q stands for scale · (q − zero)."""

    scale: float
    zero: int

    def encode(self, numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
        """The nearest bytes."""
        steps: NDArray[np.float64] = np.floor(numbers / self.scale + self.zero + 0.5)
        return np.clip(steps, 0, LEVELS).astype(np.uint8)

    def decode(self, codes: NDArray[np.uint8]) -> NDArray[np.float32]:
        """What bytes stand for."""
        return ((codes.astype(np.float32) - self.zero) * self.scale).astype(np.float32)


def calibrate(graph: Graph, sample: Tensor) -> dict[str, Bytes]:
    """What the bytes of each value stand for, by the name of the value: from its smallest to its largest number.

    Values that max pooling and flattening only select or reorder keep the range of their input. A linear layer at the
    end gives floats, so its value has none. Where a layer adds so many bytes that their sum would not fit 16 bits, the
    steps of its input are larger; where what is added to its sums would not fit, those of its output.
    """
    ranges, sums = _measure(graph, sample)
    origins = {graph.input.name: graph.input.name}
    for node in graph.nodes:
        same = isinstance(node, (MaxPool, Flatten))
        origins[node.output.name] = origins[node.inputs[0].name] if same else node.output.name
    found = {name: _bytes(*ranges[name]) for name in dict.fromkeys(origins.values())}
    factors = dict.fromkeys(found, 1.0)
    for one in sums:
        origin = origins[one.node.inputs[0].name]
        factors[origin] = max(factors[origin], one.largest(found[origin]) / _LARGEST_SUM)
    codings = {name: _bytes(*ranges[name], factor) for name, factor in factors.items()}
    for node in graph.nodes:  # in order, since where a sum starts depends on the steps of the inputs
        if isinstance(node, (Convolution, Linear)):
            name = node.output.name
            least = _largest_start(node, [codings[origins[value.name]] for value in node.inputs]) / _MOST_STEPS
            if least > codings[name].scale:
                codings[name] = _bytes(*ranges[name], least / found[name].scale)
    return {name: codings[origin] for name, origin in origins.items() if not gives_floats(graph, name)}


def difference_of_bytes(outputs: NDArray[np.float32], graph: Graph, sample: Tensor) -> float:
    """The largest difference of the outputs for the sample from those of the network in float32."""
    with torch.no_grad():
        expected = torch.cat([FoldedModule(graph)(inputs) for inputs in torch.split(sample, _BATCH)]).flatten(1)
    return relative_difference(torch.from_numpy(outputs), expected)


def check_difference(difference: float) -> None:
    """Refuse a network whose outputs are no longer those in float32, and warn of one whose accuracy may differ."""
    sentence = f"with int8 the outputs for the sample differ from those in float32 by {difference:.2g} of the largest; "
    if not difference <= _TOLERANCE:
        raise IterandError(sentence + "use float32, or give the network inputs of similar sizes")
    if difference > _NOTABLE:
        logger.warning("%scompare the accuracy of both before you use it", sentence)


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number that is expected."""
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(torch.finfo(torch.float32).tiny))


def gives_floats(graph: Graph, name: str) -> bool:
    """Whether a value is the network's output and computed by a linear layer that nothing follows."""
    readers = any(value.name == name for node in graph.nodes for value in node.inputs)
    last = next((node for node in graph.nodes if node.output.name == name), None)
    return (
        name == graph.output.name and not readers
        and isinstance(last, Linear) and len(last.inputs) == 1 and not last.relu
    )  # fmt: skip


class _Sums:
    """The smallest and the largest sum of each channel of a layer, in units of its weights."""

    def __init__(self, node: Convolution | Linear, lists: Lists) -> None:
        self.node = node
        self._lists = lists
        self._low = self._high = np.zeros(len(lists.scale))

    def add(self, module: FoldedModule, inputs: Tensor) -> None:
        """Measure a batch."""
        shift = torch.from_numpy(self.node.shift).view(-1, *[1] * (len(self.node.output.shape) - 1))
        plain = replace(self.node, inputs=self.node.inputs[:1], relu=False)
        sums = (module.compute(plain, inputs) - shift).transpose(0, 1).flatten(1).double().numpy()
        scale = np.where(self._lists.scale > 0, self._lists.scale, 1.0)
        self._low = np.minimum(self._low, sums.min(1) / scale)
        self._high = np.maximum(self._high, sums.max(1) / scale)

    def largest(self, coding: Bytes) -> float:
        """The largest magnitude of a sum of bytes."""
        zeros = coding.zero * self._lists.total
        return float(max(abs(edge / coding.scale + zeros).max() for edge in (self._low, self._high)))


def _measure(graph: Graph, sample: Tensor) -> tuple[dict[str, tuple[float, float]], list[_Sums]]:
    """The smallest and the largest number of every value, and zero; and the sums that may not fit 16 bits."""
    module = FoldedModule(graph)
    ranges: dict[str, tuple[float, float]] = {}
    sums = list(_long_sums(graph))
    with torch.no_grad():
        for images in torch.split(sample, _BATCH):
            values = {graph.input: images}
            for node in graph.nodes:
                values[node.output] = module.compute(node, *(values[value] for value in node.inputs))
            for value, tensor in values.items():
                smallest, largest = float(tensor.min()), float(tensor.max())
                if not np.isfinite(largest - smallest):
                    raise ValueError("an activation is not finite for this sample; give inputs prepared as in training")
                low, high = ranges.get(value.name, (0.0, 0.0))
                ranges[value.name] = min(low, smallest), max(high, largest)
            for one in sums:
                one.add(module, values[one.node.inputs[0]])
    return ranges, sums


def _long_sums(graph: Graph) -> Iterator[_Sums]:
    """The layers that add or subtract many bytes; other weights than small multiples have sums of 32 bits."""
    for node in graph.nodes:
        if isinstance(node, (Convolution, Linear)) and not gives_floats(graph, node.output.name):
            lists = Lists(node, integers=True)
            if lists.values is None and max(lists.counts) > _TOGETHER:
                yield _Sums(node, lists)


def _largest_start(node: Convolution | Linear, inputs: Sequence[Bytes]) -> float:
    """The largest magnitude of what is added to the sums of bytes of a layer, a number for each channel."""
    lists, (source, *others) = Lists(node, integers=True), inputs
    start = node.shift - lists.scale * source.scale * source.zero * lists.total
    return float(np.abs(start - sum(other.scale * other.zero for other in others)).max())


def _bytes(low: float, high: float, factor: float = 1.0) -> Bytes:
    scale = factor * (high - low) / LEVELS
    return Bytes(scale, round(-low / scale)) if scale else Bytes(1.0, 0)
