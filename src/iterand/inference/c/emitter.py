"""From a graph to C: the network's weights as constant data, and a function that calls a kernel for each operation."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from math import prod

import numpy as np

from iterand.inference import plan as planning
from iterand.inference.c.arithmetic import Float32, Int8
from iterand.inference.c.lists import ESCAPE, Lists
from iterand.inference.c.streams import Streams
from iterand.inference.graph import without_unread_channels
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
from iterand.inference.quantization import Bytes
from iterand.ticket import Ticket

_LINE = 120
_BYTES = {"float": 4, "int32_t": 4, "int16_t": 2, "uint16_t": 2, "int8_t": 1, "uint8_t": 1}
_OFFSETS = 512  # that can be decoded at a time, at least


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
    weights: int = 0
    """Bytes of memory for weights that ``network_init`` decodes; 0: all are constant data."""


def emit(
    graph: Graph,
    *,
    coded: bool = False,
    activations: Mapping[str, Bytes] | None = None,
    ticket: Ticket | None = None,
) -> Source:
    """The C source of a network.

    Args:
        graph: The network.
        coded: Store a byte for a weight, which is small, instead of its offset, which is fast.
        activations: What the bytes of each value stand for, from ``calibrate``; without it values are float32.
        ticket: With ``coded``: decode weights from the coded sequences of this ticket, which are smaller.
    """
    whole, graph = graph, without_unread_channels(graph)
    arithmetic = Float32() if activations is None else Int8(graph, activations)
    streams = Streams(ticket, whole, graph.kept, arithmetic.integers) if ticket else None
    made = planning.make_plan(graph, 1 if coded else arithmetic.alignment)
    writer = _Writer(graph, made, arithmetic, coded, streams.names if streams else ())
    writer.read_input()
    for node in graph.nodes:
        writer.write(node)
    writer.write_output()
    inputs, outputs = prod(graph.input.shape), prod(graph.output.shape)
    arena = planning.align(arithmetic.number_bytes * made.size + arithmetic.behind, 4)
    if streams:
        arena = max(arena, streams.arena)
    init = _INIT.format(weights=writer.decoded_bytes) if streams else ""
    header = _HEADER.format(inputs=inputs, outputs=outputs, arena=arena, init=init)
    folder = resources.files("iterand.inference.c")
    kernels = (folder.joinpath(name).read_text(encoding="utf-8") for name in arithmetic.kernels)
    body = (f"    {line}" for line in ("number *arena = memory;", *writer.calls))
    run = ["void network_run(const float *input, float *output, void *memory) {", *body, "}"]
    settings = [*arithmetic.settings, f"#define NETWORK_OFFSETS {writer.offsets if coded else 1}"]
    settings.append(f"#define NETWORK_MOST {writer.most}")
    if writer.lengths:
        uses = " || ".join(f"USES(size, {length})" for length in sorted(writer.lengths))
        settings.append(f"#define NETWORK_USES(size) ({uses})")
    parts = ['#include "network.h"', "\n".join(settings), *kernels, *writer.data, "\n".join(run), _BATCH]
    if streams:
        parts.append(streams.code())
    data = writer.bytes + (streams.bytes if streams else 0)
    return Source(header, "\n\n".join(parts) + "\n", inputs, outputs, arena, data, writer.decoded_bytes)


_HEADER = """\
/* A network of a ticket of iterand. While it runs it needs NETWORK_ARENA bytes of memory, which its caller gives. */
#ifndef NETWORK_H
#define NETWORK_H

#define NETWORK_INPUTS {inputs} /* numbers in an input: channels, rows and columns, in this order */
#define NETWORK_OUTPUTS {outputs}
#define NETWORK_ARENA {arena} /* bytes; it begins at a multiple of 4 */

#ifdef __cplusplus
extern "C" {{
#endif

/* The outputs for one input. Threads may run it at the same time, each with an arena of its own. */
void network_run(const float *input, float *output, void *arena);

/* The same for `count` inputs, one after the other. */
void network_run_batch(const float *input, float *output, long count, void *arena);
{init}
#ifdef __cplusplus
}}
#endif

#endif
"""

_INIT = """
#define NETWORK_WEIGHTS {weights} /* bytes of memory of its own, for decoded weights */

/* Decode the weights, before anything else is run. The arena is free again afterwards. 0: done; 1: they are damaged. */
int network_init(void *arena);
"""

_BATCH = """\
void network_run_batch(const float *input, float *output, long count, void *arena) {
    long i;
    for (i = 0; i < count; i++) network_run(input + i * NETWORK_INPUTS, output + i * NETWORK_OUTPUTS, arena);
}"""


class _Writer:
    """Collects the constant data and the calls of a network."""

    def __init__(
        self, graph: Graph, made: Plan, arithmetic: Float32 | Int8, coded: bool, decoded: Collection[str]
    ) -> None:
        self._graph = graph
        self._plan = made
        self._arithmetic = arithmetic
        self._coded = coded
        self._decoded = decoded
        self.offsets = _OFFSETS
        """Room for decoded offsets: at least as many as a channel has."""
        self.lengths: set[int] = set()
        """Of the planes of layers, in pixels."""
        self.most = 0
        """Offsets of one sign that a channel has."""
        self.bytes = 0
        self.decoded_bytes = 0
        self.data: list[str] = []
        self.calls: list[str] = []
        self._layouts = dict(made.layouts)
        self._defined: set[str] = set()

    def read_input(self) -> None:
        """Take the caller's numbers."""
        name = self._graph.input.name
        self.calls.append(self._arithmetic.read_input(name, self._value(name)))

    def write_output(self) -> None:
        """Give the caller the result, unless the last layer has."""
        name = self._graph.output.name
        if not self._arithmetic.gives_floats(name):
            self.calls.append(self._arithmetic.write_output(name, self._value(name)))

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
            case Add(inputs=(one, other)):
                self._combine(node, one, out, other=other)
            case Affine(inputs=(one,)):
                self._combine(node, one, out)
            case Flatten(inputs=(one,)):
                self._layouts[f"{out}_pixels"] = Layout(*planning.planes(one))
                self._combine(node, one, out, at=f"{out}_pixels")
            case Concatenate(inputs=inputs):
                before = 0
                for value in inputs:
                    self._combine(node, value, out, before=before)
                    before += value.shape[0]
            case _:  # a new operation of the graph
                raise TypeError(f"there is no C for {type(node).__name__}")
        if not isinstance(node, (Convolution, Linear, MaxPool, AveragePool)):
            self._clear(out)

    def _weights(self, node: Convolution | Linear) -> None:
        out, groups = node.output.name, node.groups if isinstance(node, Convolution) else 1
        taps, channel = planning.taps(node, self._plan)
        lists = Lists(node, self._arithmetic.integers)
        inputs = node.weight.shape[1]
        if self._coded and len(taps) < ESCAPE:
            offsets, codes = "NULL", f"{out}_codes"
            self.array("uint8_t", codes, map(str, lists.codes(len(taps))))
            self.array("int32_t", f"{out}_taps", map(str, taps))
            numbers = [groups, inputs * channel, len(taps), channel, f"{out}_taps"]
        else:
            offsets, codes = f"{out}_offsets", "NULL"
            self.array("int32_t", offsets, map(str, lists.offsets(np.array(taps), channel, groups)))
            numbers = [1, 0, 1, 0, "NULL"]
        self.array("uint16_t", f"{out}_counts", map(str, lists.counts))
        values, finishing = self._arithmetic.layer(self, node, lists)
        self.constant("weights_of", f"{out}_weights", [offsets, codes, f"{out}_counts", values, finishing, *numbers])
        if lists.values is None and not self._arithmetic.gives_floats(out):
            self.most = max(self.most, *lists.counts)
        self.offsets = max(self.offsets, *map(sum, zip(lists.counts[::2], lists.counts[1::2])))
        source = self._at(node.inputs[0].name)
        if isinstance(node, Convolution) and (gathered := self._plan.gatherings.get(out)):
            self._gather(node, gathered)
            source = self._at(f"{out} rows")
        self.lengths.add(self._layouts[out].length)
        residual = self._value(node.inputs[1].name) if len(node.inputs) > 1 else "NULL, NULL"
        self.calls.append(f"convolve({source}, &{out}_weights, {residual}, {self._value(out)});")

    def _gather(self, node: Convolution, gathered: Gathering) -> None:
        out, source = node.output.name, node.inputs[0].name
        at, (py, px) = self._layouts[source], node.padding
        first = at.first - py * at.row - px
        padded = [at.channels, at.height + 2 * py, at.width + 2 * px, first, at.row, at.plane, 0]
        planes = [gathered.columns, gathered.remainders, gathered.rows]
        numbers = [*planes, *node.stride, gathered.column, gathered.width, gathered.row]
        self.constant("layout", f"{out}_padded", padded)
        self.constant("gathering", f"{out}_gathering", numbers)
        rows = self._at(f"{out} rows")
        self.calls.append(f"gather({self._at(source)}, &{out}_padded, &{out}_gathering, {rows});")

    def _pool(self, node: MaxPool | AveragePool) -> None:
        out = node.output.name
        include = int(isinstance(node, AveragePool) and node.count_include_pad)
        average = self._arithmetic.average(node)
        numbers = [*node.kernel, *node.stride, *node.padding, int(isinstance(node, MaxPool)), include, average]
        self.constant("window", f"{out}_window", numbers)
        self.calls.append(f"pool({self._value(node.inputs[0].name)}, &{out}_window, {self._value(out)});")

    def _combine(
        self, node: Node, one: Value, out: str, *, other: Value | None = None, at: str | None = None, before: int = 0,
    ) -> None:  # fmt: skip
        mixing = self._arithmetic.mixing(self, node, one, before)
        second = self._value(other.name) if other else "NULL, NULL"
        target = f"{self._at(out, before * self._layouts[out].plane)}, {self._layout(at or out)}"
        self.calls.append(f"combine({self._value(one.name)}, {mixing}, {second}, {target});")

    def _clear(self, name: str) -> None:
        if self._layouts[name].border_x or self._layouts[name].border_y:
            self.calls.append(f"clear_border({self._value(name)});")

    def _value(self, name: str) -> str:
        return f"{self._at(name)}, {self._layout(name)}"

    def _at(self, name: str, more: int = 0) -> str:
        if self._arithmetic.gives_floats(name):
            return "(number *)(void *)output"
        return f"arena + {self._plan.places[name] + more}"

    def _layout(self, name: str) -> str:
        if name not in self._defined:
            self._defined.add(name)
            at = self._layouts[name]
            plane = 4 if self._arithmetic.gives_floats(name) else at.plane
            zero = self._arithmetic.zero(name)
            self.constant("layout", f"{name}_at", [at.channels, at.height, at.width, at.first, at.row, plane, zero])
        return f"&{name}_at"

    def constant(self, kind: str, name: str, parts: Sequence[object]) -> None:
        """Add a constant structure."""
        self.data.append(f"static const {kind} {name} = {{{', '.join(map(str, parts))}}};")

    def array(self, kind: str, name: str, numbers: Iterable[str]) -> None:
        """Add constant data."""
        numbers = list(numbers)
        if name in self._decoded:
            self.decoded_bytes += len(numbers) * _BYTES[kind]
            self.data.append(f"static {kind} {name}[{max(1, len(numbers))}];")
            return
        self.bytes += len(numbers) * _BYTES[kind]
        self.data.append(f"static const {kind} {name}[{max(1, len(numbers))}] = {{\n{_wrap(numbers or ['0'])}\n}};")


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
