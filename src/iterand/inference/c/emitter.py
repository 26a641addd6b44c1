"""From a graph to C: the network's weights as constant data, and a function that calls a kernel for each operation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from math import prod

import numpy as np
from numpy.typing import NDArray

from iterand.errors import IterandError
from iterand.inference import plan as planning
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
from iterand.inference.plan import Gathering, Layout, Plan

_LINE = 120
_BYTES = {"float": 4, "int32_t": 4, "uint16_t": 2, "uint8_t": 1}
_ALIGNMENT = 16  # floats: the longest vector
_ESCAPE = 255  # the code that stands for no weight
_DECODED = 512  # offsets that are decoded at a time, at least
_OF_CALLER = {"input", "output"}


@dataclass(frozen=True)
class Source:
    """A network as C."""

    header: str
    code: str
    inputs: int
    """Numbers in an input."""
    outputs: int
    arena: int
    """Bytes of memory that the network needs while it runs."""
    data: int
    """Bytes of the constant data of layers."""


def emit(graph: Graph, *, coded: bool = False) -> Source:
    """The C source of a network.

    Args:
        graph: The network.
        coded: Store a byte for a weight, which is small, instead of its offset, which is fast.
    """
    made = planning.make_plan(graph, 1 if coded else _ALIGNMENT)
    writer = _Writer(graph, made, coded)
    writer.copy("input", graph.input.name)
    for node in graph.nodes:
        writer.write(node)
    writer.copy(graph.output.name, "output")
    inputs, outputs = prod(graph.input.shape), prod(graph.output.shape)
    arena = 4 * made.size
    header = _HEADER.format(inputs=inputs, outputs=outputs, arena=arena)
    kernels = resources.files("iterand.inference.c").joinpath("kernels.h").read_text(encoding="utf-8")
    body = (f"    {line}" for line in writer.calls)
    run = ["void network_run(const float *input, float *output, float *arena) {", *body, "}"]
    limit = f"#define NETWORK_OFFSETS {writer.decoded if coded else 1}"
    parts = ['#include "network.h"', limit, kernels, *writer.data, "\n".join(run), _BATCH]
    return Source(header, "\n\n".join(parts) + "\n", inputs, outputs, arena, writer.bytes)


_HEADER = """\
/* A network of a ticket of iterand. While it runs it needs NETWORK_ARENA bytes of memory, which its caller gives. */
#ifndef NETWORK_H
#define NETWORK_H

#define NETWORK_INPUTS {inputs} /* numbers in an input: channels, rows and columns, in this order */
#define NETWORK_OUTPUTS {outputs}
#define NETWORK_ARENA {arena} /* bytes */

/* The outputs for one input. Threads may run it at the same time, each with an arena of its own. */
void network_run(const float *input, float *output, float *arena);

/* The same for `count` inputs, one after the other. */
void network_run_batch(const float *input, float *output, long count, float *arena);

#endif
"""

_BATCH = """\
void network_run_batch(const float *input, float *output, long count, float *arena) {
    long i;
    for (i = 0; i < count; i++) network_run(input + i * NETWORK_INPUTS, output + i * NETWORK_OUTPUTS, arena);
}"""


class _Writer:
    """Collects the constant data and the calls of a network."""

    def __init__(self, graph: Graph, made: Plan, coded: bool) -> None:
        self._plan = made
        self._coded = coded
        self.decoded = _DECODED
        self.bytes = 0
        self.data: list[str] = []
        self.calls: list[str] = []
        self._layouts = made.layouts | {
            "input": Layout(*planning.planes(graph.input)), "output": Layout(*planning.planes(graph.output))
        }  # fmt: skip
        self._defined: set[str] = set()

    def write(self, node: Node) -> None:
        """Add an operation."""
        out = node.output.name
        if node.where:
            self.calls.append(f"/* {_comment(node.where)} */")
        match node:
            case Convolution() | Linear():
                self._weights(node)
            case MaxPool() | AveragePool():
                self._pool(node)
            case Add(inputs=(one, other), relu=relu):
                self._combine(one, out, other=other, relu=relu)
            case Affine(inputs=(one,), scale=scale, shift=shift, relu=relu):
                self._array("float", f"{out}_scale", _floats(scale))
                self._array("float", f"{out}_shift", _floats(shift))
                self._combine(one, out, scales=f"{out}_scale, {out}_shift", relu=relu)
            case Flatten(inputs=(one,)):
                self._layouts[f"{out}_pixels"] = Layout(*planning.planes(one))
                self._combine(one, out, at=f"{out}_pixels")
            case Concatenate(inputs=inputs):
                before = 0
                for value in inputs:
                    self._combine(value, out, before=before)
                    before += value.shape[0]
            case _:  # a new operation of the graph
                raise TypeError(f"there is no C for {type(node).__name__}")
        if not isinstance(node, (Convolution, Linear, MaxPool, AveragePool)):
            self._clear(out)

    def copy(self, source: str, target: str) -> None:
        """Copy pixels between the caller's memory and a value."""
        self.calls.append(f"combine({self._value(source)}, NULL, NULL, NULL, NULL, 0, {self._value(target)});")
        self._clear(target)

    def _weights(self, node: Convolution | Linear) -> None:
        out, groups = node.output.name, node.groups if isinstance(node, Convolution) else 1
        taps, channel = planning.taps(node, self._plan)
        lists = _Lists(node)
        inputs = node.weight.shape[1]
        if self._coded and len(taps) < _ESCAPE:
            offsets, codes = "NULL", f"{out}_codes"
            self._array("uint8_t", codes, map(str, lists.codes(len(taps))))
            self._array("int32_t", f"{out}_taps", map(str, taps))
            numbers = [groups, inputs * channel, len(taps), channel, f"{out}_taps"]
        else:
            offsets, codes = f"{out}_offsets", "NULL"
            self._array("int32_t", offsets, map(str, lists.offsets(np.array(taps), channel, groups)))
            numbers = [1, 0, 1, 0, "NULL"]
        self._array("uint16_t", f"{out}_counts", map(str, lists.counts))
        if lists.values is not None:
            self._array("float", f"{out}_values", _floats(lists.values))
        self._array("float", f"{out}_scale", _floats(lists.scale))
        self._array("float", f"{out}_shift", _floats(node.shift))
        values = "NULL" if lists.values is None else f"{out}_values"
        parts = [offsets, codes, f"{out}_counts", values, f"{out}_scale", f"{out}_shift", int(node.relu), *numbers]
        self._constant("weights_of", f"{out}_weights", parts)
        self.decoded = max(self.decoded, *map(sum, zip(lists.counts[::2], lists.counts[1::2])))
        source = self._at(node.inputs[0].name)
        if isinstance(node, Convolution) and (gathered := self._plan.gatherings.get(out)):
            self._gather(node, gathered)
            source = self._at(f"{out} rows")
        residual = self._value(node.inputs[1].name) if len(node.inputs) > 1 else "NULL, NULL"
        self.calls.append(f"convolve({source}, &{out}_weights, {residual}, {self._value(out)});")

    def _gather(self, node: Convolution, gathered: Gathering) -> None:
        out, source = node.output.name, node.inputs[0].name
        at, (py, px) = self._layouts[source], node.padding
        first = at.first - py * at.row - px
        padded = [at.channels, at.height + 2 * py, at.width + 2 * px, first, at.row, at.plane]
        width = self._layouts[out].width
        numbers = [
            gathered.columns, gathered.remainders, gathered.rows, *node.stride, node.dilation[1], width, gathered.row,
        ]  # fmt: skip
        self._constant("layout", f"{out}_padded", padded)
        self._constant("gathering", f"{out}_gathering", numbers)
        rows = self._at(f"{out} rows")
        self.calls.append(f"gather({self._at(source)}, &{out}_padded, &{out}_gathering, {rows});")

    def _pool(self, node: MaxPool | AveragePool) -> None:
        out, maximum = node.output.name, isinstance(node, MaxPool)
        include = int(isinstance(node, AveragePool) and node.count_include_pad)
        numbers = [*node.kernel, *node.stride, *node.padding, include]
        self._constant("window", f"{out}_window", numbers)
        source = self._value(node.inputs[0].name)
        self.calls.append(f"pool({source}, &{out}_window, {int(maximum)}, {self._value(out)});")

    def _combine(
        self, one: Value, out: str, *, scales: str = "NULL, NULL", other: Value | None = None, relu: bool = False,
        at: str | None = None, before: int = 0,
    ) -> None:  # fmt: skip
        second = self._value(other.name) if other else "NULL, NULL"
        target = f"{self._at(out, before * self._layouts[out].plane)}, {self._layout(at or out)}"
        self.calls.append(f"combine({self._value(one.name)}, {scales}, {second}, {int(relu)}, {target});")

    def _clear(self, name: str) -> None:
        if self._layouts[name].border_x or self._layouts[name].border_y:
            self.calls.append(f"clear_border({self._value(name)});")

    def _value(self, name: str) -> str:
        return f"{self._at(name)}, {self._layout(name)}"

    def _at(self, name: str, more: int = 0) -> str:
        return name if name in _OF_CALLER else f"arena + {self._plan.places[name] + more}"

    def _layout(self, name: str) -> str:
        if name not in self._defined:
            self._defined.add(name)
            at = self._layouts[name]
            self._constant("layout", f"{name}_at", [at.channels, at.height, at.width, at.first, at.row, at.plane])
        return f"&{name}_at"

    def _constant(self, kind: str, name: str, parts: Sequence[int | str]) -> None:
        self.data.append(f"static const {kind} {name} = {{{', '.join(map(str, parts))}}};")

    def _array(self, kind: str, name: str, numbers: Iterable[str]) -> None:
        numbers = list(numbers)
        self.bytes += len(numbers) * _BYTES[kind]
        self.data.append(f"static const {kind} {name}[{max(1, len(numbers))}] = {{\n{_wrap(numbers or ['0'])}\n}};")


class _Lists:
    """The weights of a layer that are not zero: for each output channel those to add and those to subtract.

    If the weights of a channel differ by more than their sign, all are added, after multiplying with ``values``.
    """

    def __init__(self, node: Convolution | Linear) -> None:
        self._inputs = node.weight.shape[1]
        rows = node.weight.reshape(len(node.weight), -1)
        magnitudes = np.abs(rows).max(1, initial=0)
        only_signs = bool(((rows == 0) | (np.abs(rows) == magnitudes[:, None])).all())
        masks = [(row > 0, row < 0) if only_signs else (row != 0, row != row) for row in rows]
        self._places = [(np.flatnonzero(plus), np.flatnonzero(minus)) for plus, minus in masks]
        self.counts = [len(places) for both in self._places for places in both]
        if max(self.counts) >= 1 << 16:
            raise IterandError(
                f"a channel of {node.where!r} keeps {max(self.counts):,} weights; inference in C has at most 65,535"
            )
        self.values = None if only_signs else np.concatenate([row[row != 0] for row in rows])
        scale = node.scale.astype(np.float64) * (magnitudes if only_signs else 1)
        self.scale: NDArray[np.float32] = scale.astype(np.float32)

    def offsets(self, taps: NDArray[np.int64], channel: int, groups: int) -> list[int]:
        """Where the inputs lie."""
        size, found = len(self._places) // groups, []
        for number, both in enumerate(self._places):
            for places in both:
                channels = places // len(taps) + number // size * self._inputs
                found += (channels * channel + taps[places % len(taps)]).tolist()
        return found

    def codes(self, taps: int) -> list[int]:
        """The same as codes of a byte; see kernels.h."""
        found = []
        for places in (places for both in self._places for places in both):
            base = 0
            for place in places.tolist():
                while place - base >= _ESCAPE:
                    found.append(_ESCAPE)
                    base += _ESCAPE // taps * taps
                found.append(place - base)
                base = place // taps * taps
        return found


def _floats(numbers: NDArray[np.float32]) -> list[str]:
    return [f"{float(number).hex()}f" for number in numbers.tolist()]


def _wrap(numbers: Sequence[str]) -> str:
    lines, line = [], "   "
    for number in numbers:
        if len(line) + len(number) + 2 > _LINE:
            lines.append(line)
            line = "   "
        line += f" {number},"
    return "\n".join([*lines, line])


def _comment(text: str) -> str:
    """The path of a module inside a comment, whatever it is called."""
    return "".join(character if character.isalnum() or character in "._-" else "?" for character in text[:80])
