"""Activations as bytes: which number a byte stands for, chosen from a sample of inputs."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from iterand.inference.graph import FoldedModule
from iterand.inference.nodes import Flatten, Graph, Linear, MaxPool

LEVELS = 255
_BATCH = 32


ACTIVATIONS = ("float32", "int8")


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
    found = sample.detach().cpu() if isinstance(sample, Tensor) else torch.from_numpy(np.asarray(sample))
    if not found.is_floating_point() or found.ndim < 2 or not len(found):
        kind = f"{found.dtype} of shape {tuple(found.shape)}"
        raise ValueError(f"sample is {kind}; it must be a batch of floating-point inputs, prepared as in training")
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
    end gives floats, so its value has none.
    """
    ranges = _ranges(graph, sample)
    found = {graph.input.name: _bytes(*ranges[graph.input.name])}
    for node in graph.nodes:
        name = node.output.name
        if isinstance(node, (MaxPool, Flatten)):
            found[name] = found[node.inputs[0].name]
        elif not gives_floats(graph, name):
            found[name] = _bytes(*ranges[name])
    return found


def gives_floats(graph: Graph, name: str) -> bool:
    """Whether a value is the network's output and computed by a linear layer that nothing follows."""
    readers = any(value.name == name for node in graph.nodes for value in node.inputs)
    last = next((node for node in graph.nodes if node.output.name == name), None)
    return (
        name == graph.output.name and not readers
        and isinstance(last, Linear) and len(last.inputs) == 1 and not last.relu
    )  # fmt: skip


def _ranges(graph: Graph, sample: Tensor) -> dict[str, tuple[float, float]]:
    """The smallest and the largest number of every value, and zero."""
    module = FoldedModule(graph)
    found: dict[str, tuple[float, float]] = {}
    with torch.no_grad():
        for images in torch.split(sample, _BATCH):
            values = {graph.input: images}
            for node in graph.nodes:
                values[node.output] = module.compute(node, *(values[value] for value in node.inputs))
            for value, tensor in values.items():
                smallest, largest = float(tensor.min()), float(tensor.max())
                if not np.isfinite(largest - smallest):
                    raise ValueError("an activation is not finite for this sample; give inputs prepared as in training")
                low, high = found.get(value.name, (0.0, 0.0))
                found[value.name] = min(low, smallest), max(high, largest)
    return found


def _bytes(low: float, high: float) -> Bytes:
    scale = (high - low) / LEVELS
    return Bytes(scale, round(-low / scale)) if scale else Bytes(1.0, 0)
