"""The operations of a network for inference: ``trace`` finds and folds them, ``FoldedModule`` runs them with torch.

Batch norm, ReLU and residual additions become part of the layer before them.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from iterand.checks import shown
from iterand.errors import IterandError
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
from iterand.inference.tracing import read


def trace(model: nn.Module, example: Tensor) -> Graph:
    """The operations of a network in eval mode; the model itself is not changed.

    Args:
        model: An ordinary module, as ``load_ticket`` gives it, with one input and one output tensor of float32.
        example: A batch of inputs. Only the sizes after the first dimension matter.
    """
    if not isinstance(example, Tensor) or example.dtype != torch.float32 or example.ndim not in (2, 3, 4):
        kind = f"{example.dtype} of shape {tuple(example.shape)}" if isinstance(example, Tensor) else shown(example)
        raise ValueError(f"example is {kind}; it must be a float32 tensor with a batch dimension and 1 to 3 others")
    return _Folding(read(model, tuple(example.shape[1:]))).graph()


class _Folding:
    """Folds norms, then additions, then ReLUs into the nodes before them."""

    def __init__(self, graph: Graph) -> None:
        self._input, self._output = graph.input, graph.output
        self._nodes = {node.output: node for node in graph.nodes}  # in order of computation
        self._readers = Counter(value for node in graph.nodes for value in node.inputs)
        self._readers[graph.output] += 1
        for fold in (self._fold_norm, self._fold_addition, self._fold_relu):
            for node in list(self._nodes.values()):
                fold(node)

    def _source(self, value: Value) -> Node | None:
        """The node that computes a value, if the value is read once."""
        return self._nodes.get(value) if self._readers[value] == 1 else None

    def _merge(self, source: Node, node: Node, **changes: Any) -> None:
        """Replace a node by its source, which nobody else reads."""
        del self._nodes[source.output]
        self._nodes[node.output] = replace(source, output=node.output, **changes)

    def _fold_norm(self, node: Node) -> None:
        if not isinstance(node, Affine) or node.relu:
            return
        source = self._source(node.inputs[0])
        if isinstance(source, (Convolution, Linear, Affine)) and not source.relu:
            self._merge(source, node, scale=source.scale * node.scale, shift=source.shift * node.scale + node.shift)

    def _fold_addition(self, node: Node) -> None:
        """Make one operand the residual of the other, a layer; if both are layers, of the later one."""
        if not isinstance(node, Add):
            return
        layers = [self._source(value) for value in node.inputs]
        for layer in reversed(self._nodes.values()):
            if layer in layers and isinstance(layer, (Convolution, Linear)) and len(layer.inputs) == 1:
                (residual,) = (value for value in node.inputs if value != layer.output)
                self._merge(layer, node, inputs=(*layer.inputs, residual))
                return

    def _fold_relu(self, node: Node) -> None:
        """Add a ReLU to the node before it. Max pooling and flattening in between give the same after a ReLU."""
        if not isinstance(node, Affine) or not node.relu:
            return
        before = source = self._source(node.inputs[0])
        while isinstance(source, (MaxPool, Flatten)):
            source = self._source(source.inputs[0])
        if before is None or not isinstance(source, (Convolution, Linear, Affine, Add)):
            return
        self._nodes[source.output] = replace(source, relu=True)
        self._merge(self._nodes[before.output], node)

    def graph(self) -> Graph:
        """Round scales and shifts to float32, and number the values in order of computation."""
        values = {self._input: Value("v0", self._input.shape)}
        nodes = []
        for output, node in self._nodes.items():
            values[output] = Value(f"v{len(values)}", output.shape)
            changes: dict[str, Any] = {"inputs": tuple(values[one] for one in node.inputs), "output": values[output]}
            if isinstance(node, (Convolution, Linear, Affine)):
                changes |= {"scale": node.scale.astype(np.float32), "shift": node.shift.astype(np.float32)}
            nodes.append(replace(node, **changes))
            _check_finite(nodes[-1])
        return Graph(tuple(nodes), values[self._input], values[self._output])


def _check_finite(node: Node) -> None:
    """Refuse numbers that C does not have as constants."""
    for name in ("weight", "scale", "shift"):
        numbers = getattr(node, name, None)
        if numbers is not None and not np.isfinite(numbers).all():
            raise IterandError(
                f"the network has NaN or infinity among the weights, biases or norm statistics of {node.where!r}; "
                "inference in C needs finite numbers"
            )


def without_unread_channels(graph: Graph) -> Graph:
    """Leave out the channels of convolutions that later layers have no weights for.

    Max pooling may stand between. Where a channel of a value is needed, for example as a residual, all of them are.
    """
    readers: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        for value in node.inputs:
            readers.setdefault(value, []).append(node)

    def read_channels(value: Value) -> NDArray[np.bool_]:
        """Which channels of a value matter for the output."""
        found = np.zeros(value.shape[0], np.bool_)
        for node in readers.get(value, []):
            match node:
                case Convolution(groups=1, inputs=(first, *others)) if first == value and value not in others:
                    found |= (node.weight != 0).any((0, 2, 3))
                case MaxPool():
                    found |= read_channels(node.output)
                case _:
                    found |= True
        return found | (value == graph.output)

    kept: dict[Value, NDArray[np.bool_]] = {}
    values: dict[Value, Value] = {}
    nodes = []
    for node in graph.nodes:
        inputs, output, changes = node.inputs, node.output, dict[str, Any]()
        if isinstance(node, Convolution):
            if inputs[0] in kept:
                changes["weight"] = node.weight[:, kept[inputs[0]]]
            read = read_channels(output)
            if node.groups == 1 and len(inputs) == 1 and read.any() and not read.all():
                kept[output] = read
                changes["weight"] = changes.get("weight", node.weight)[read]
                changes |= {"scale": node.scale[read], "shift": node.shift[read]}
        elif inputs[0] in kept:
            kept[output] = kept[inputs[0]]
        if output in kept:
            values[output] = replace(output, shape=(int(kept[output].sum()), *output.shape[1:]))
        inputs = tuple(values.get(value, value) for value in inputs)
        nodes.append(replace(node, inputs=inputs, output=values.get(output, output), **changes))
    channels = {value.name: found for value, found in kept.items()}
    return Graph(tuple(nodes), graph.input, graph.output, channels)


class FoldedModule(nn.Module):
    """Runs a graph with torch, for any batch size. Its arrays are buffers; scales are multiplied into the weights."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        for node in graph.nodes:
            if isinstance(node, (Convolution, Linear)):
                scale = node.scale.astype(np.float64).reshape(-1, *[1] * (node.weight.ndim - 1))
                self._keep(node, weight=(scale * node.weight).astype(np.float32), shift=node.shift)
            elif isinstance(node, Affine):
                shape = (-1, *[1] * (len(node.output.shape) - 1))
                self._keep(node, scale=node.scale.reshape(shape), shift=node.shift.reshape(shape))

    def _keep(self, node: Node, **arrays: NDArray[np.float32]) -> None:
        for name, array in arrays.items():
            self.register_buffer(f"{node.output.name}_{name}", torch.tensor(array, device="cpu"))

    def _kept(self, node: Node, name: str) -> Tensor:
        return self.get_buffer(f"{node.output.name}_{name}")

    def forward(self, images: Tensor) -> Tensor:
        """The output for a batch of inputs."""
        graph = self.graph
        if tuple(images.shape[1:]) != graph.input.shape:
            expected = ", ".join(map(str, ("batch", *graph.input.shape)))
            raise ValueError(f"the input has shape {tuple(images.shape)}; the network takes ({expected})")
        last_reader = {value: node for node in graph.nodes for value in node.inputs}
        values = {graph.input: images}
        for node in graph.nodes:
            values[node.output] = self.compute(node, *(values[value] for value in node.inputs))
            for value in {*node.inputs} - {graph.output}:
                if last_reader[value] is node:
                    del values[value]  # frees its memory
        return values[graph.output]

    def compute(self, node: Node, *inputs: Tensor) -> Tensor:
        """The output of one node for a batch of its inputs."""
        first, *others = inputs
        planes = first.unsqueeze(2) if first.ndim == 3 else first  # a 1d tensor has height 1
        match node:
            case Convolution():
                weight, shift = self._kept(node, "weight"), self._kept(node, "shift")
                output = functional.conv2d(planes, weight, shift, node.stride, node.padding, node.dilation, node.groups)
            case Linear():
                output = functional.linear(first, self._kept(node, "weight"), self._kept(node, "shift"))
            case Affine():
                output = first * self._kept(node, "scale") + self._kept(node, "shift")
            case MaxPool():
                output = functional.max_pool2d(planes, node.kernel, node.stride, node.padding)
            case AveragePool():
                counted = node.count_include_pad
                output = functional.avg_pool2d(planes, node.kernel, node.stride, node.padding, False, counted)
            case Concatenate():
                return torch.cat(inputs, 1)
            case Add() | Flatten():
                output = first
            case _:
                raise ValueError(f"{type(node).__name__} is no operation of a graph")
        output = output.reshape(len(first), *node.output.shape)
        for residual in others:
            output = output + residual
        return functional.relu(output) if getattr(node, "relu", False) else output
