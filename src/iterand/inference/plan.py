"""Where the values of a network lie in memory while it runs: borders of zeros, and one arena for all of them."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from iterand.inference.nodes import Convolution, Graph, Linear, Value


@dataclass(frozen=True)
class Layout:
    """The planes of a value, in numbers. The border on the right of a row is that on the left of the next."""

    channels: int
    height: int
    width: int
    border_y: int = 0
    border_x: int = 0
    alignment: int = 1
    """First pixels lie at multiples of this."""

    @property
    def row(self) -> int:
        """The distance of rows."""
        return self.width + self.border_x

    @property
    def first(self) -> int:
        """The place of the first pixel in a plane."""
        return align(self.border_y * self.row + self.border_x, self.alignment)

    @property
    def plane(self) -> int:
        """The distance of channels."""
        return align(self.first + (self.height + self.border_y) * self.row, self.alignment)

    @property
    def length(self) -> int:
        """From the first pixel of a plane to the last."""
        return (self.height - 1) * self.row + self.width

    @property
    def size(self) -> int:
        """All planes."""
        return self.channels * self.plane


@dataclass(frozen=True)
class Gathering:
    """The rows that a convolution reads if it cannot read its input as it lies: if it has a stride, or is not padded.

    There is a plane for each channel, each remainder of columns and each remainder of rows by the stride, so that the
    rows of one plane follow each other in the output. If rows of the output have no room for the columns that further
    taps read, there is a plane for each column of the kernel instead.
    """

    of_kernel: bool
    """Whether there is a plane for each column of the kernel."""
    columns: int
    column: int
    """The distance of the first columns of planes."""
    width: int
    """Columns of a plane."""
    remainders: int
    rows: int
    row: int
    channels: int

    @property
    def plane(self) -> int:
        """The distance of planes."""
        return self.rows * self.row

    @property
    def size(self) -> int:
        """All planes."""
        return self.channels * self.columns * self.remainders * self.plane


@dataclass(frozen=True)
class Plan:
    """Layouts of all values by name, and their places in the arena."""

    layouts: dict[str, Layout]
    gatherings: dict[str, Gathering]
    """By the name of the value that the convolution computes."""
    places: dict[str, int]
    """Of values; of gathered rows under the name of the value with ``" rows"``."""
    size: int
    """Of the arena, in numbers."""


def make_plan(graph: Graph, alignment: int = 1) -> Plan:
    """Lay out the values of a network, and place them so that what is needed at the same time does not overlap.

    Args:
        graph: The network.
        alignment: Values begin, and so do the pixels of their planes, at multiples of this: fast, but larger.
    """
    layouts = _layouts(graph, alignment)
    gatherings = {
        node.output.name: _gathering(node, layouts)
        for node in graph.nodes
        if isinstance(node, Convolution) and not reads_directly(node)
    }
    sizes = {name: align(layout.size, alignment) for name, layout in layouts.items()}
    lives: dict[str, list[int]] = {}
    for number, node in enumerate(graph.nodes):
        lives[node.output.name] = [number, number]
        for value in node.inputs:
            lives.setdefault(value.name, [-1, -1])[1] = number
        if node.output.name in gatherings:
            rows = f"{node.output.name} rows"
            sizes[rows] = align(gatherings[node.output.name].size, alignment)
            lives[rows] = [number, number]
    lives.setdefault(graph.input.name, [-1, -1])
    lives[graph.output.name][1] = len(graph.nodes)
    places = _place(sizes, lives)
    return Plan(layouts, gatherings, places, max(places[name] + sizes[name] for name in places))


def reads_directly(node: Convolution) -> bool:
    """Whether a convolution reads its input as it lies, from the borders too."""
    return node.stride == (1, 1) and planes(node.inputs[0])[1:] == planes(node.output)[1:]


def planes(value: Value) -> tuple[int, int, int]:
    """Channels, height and width; features are channels of one pixel."""
    channels, *pixels = value.shape
    return channels, *(1,) * (2 - len(pixels)), *pixels  # type: ignore[return-value]


def align(size: int, alignment: int) -> int:
    """The size, rounded up."""
    return -(-size // alignment) * alignment


def _layouts(graph: Graph, alignment: int) -> dict[str, Layout]:
    """Borders as wide as any reader needs; values whose rows must be equally far apart have equal borders."""
    values = {value.name: value for node in graph.nodes for value in (*node.inputs, node.output)}
    values[graph.input.name] = graph.input
    border_y, border_x = dict.fromkeys(values, 0), dict.fromkeys(values, 0)
    group = {name: {name} for name in values}

    def join(one: str, other: str) -> None:
        if group[one] is not group[other]:
            group[one] |= group[other]
            for name in group[other]:
                group[name] = group[one]

    for node in graph.nodes:
        if not isinstance(node, Convolution):
            continue
        name = node.inputs[0].name
        border_y[name], border_x[name] = (
            max(border[name], padding, dilation * (size - 1) - padding if reads_directly(node) else 0)
            for border, padding, dilation, size in zip(
                (border_y, border_x), node.padding, node.dilation, node.weight.shape[2:]
            )
        )
        if reads_directly(node):
            join(name, node.output.name)
        for residual in node.inputs[1:]:
            join(residual.name, node.output.name)
    return {
        name: Layout(
            *planes(value),
            border_y[name],
            max(border_x[other] for other in group[name]),
            alignment if len(value.shape) > 1 else 1,
        )
        for name, value in values.items()
    }


def _gathering(node: Convolution, layouts: dict[str, Layout]) -> Gathering:
    height, width = node.weight.shape[2:]
    steps = [row * node.dilation[0] for row in range(height)]
    remainders = 1 + max(step % node.stride[0] for step in steps)
    out = layouts[node.output.name]
    rows = out.height + steps[-1] // node.stride[0]
    across = [column * node.dilation[1] for column in range(width)]
    needed = out.width + across[-1] // node.stride[1]
    of_kernel = needed > out.row
    if of_kernel:
        columns, column, needed = width, node.dilation[1], out.width
    else:
        columns, column = 1 + max(step % node.stride[1] for step in across), 1
    return Gathering(of_kernel, columns, column, needed, remainders, rows, out.row, planes(node.inputs[0])[0])


def taps(node: Convolution | Linear, plan: Plan) -> tuple[list[int], int]:
    """Where the inputs of an output pixel lie: those of one input channel, and how far it is to the next channel.

    They count from the input, or the gathered rows, to the first pixel of the output.
    """
    if isinstance(node, Linear):
        return [0], 1
    kernel = list(product(*map(range, node.weight.shape[2:])))
    (stride, stride_x), (dy, dx), (py, px) = node.stride, node.dilation, node.padding
    gathered = plan.gatherings.get(node.output.name)
    if gathered is None:
        at = plan.layouts[node.inputs[0].name]
        return [at.first + (y * dy - py) * at.row + x * dx - px for y, x in kernel], at.plane
    found = []
    for y, x in kernel:
        further, column = (0, x) if gathered.of_kernel else divmod(x * dx, stride_x)
        plane = column * gathered.remainders + y * dy % stride
        found.append(plane * gathered.plane + y * dy // stride * gathered.row + further)
    return found, gathered.columns * gathered.remainders * gathered.plane


def _place(sizes: dict[str, int], lives: dict[str, list[int]]) -> dict[str, int]:
    """The largest first, each at the lowest place that is free as long as it lives."""
    places: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        begin, end = lives[name]
        taken = sorted(
            (places[other], places[other] + sizes[other])
            for other in places
            if lives[other][0] <= end and begin <= lives[other][1]
        )
        places[name] = _first_gap(taken, sizes[name])
    return places


def _first_gap(taken: Iterable[tuple[int, int]], size: int) -> int:
    place = 0
    for begin, end in taken:
        if begin - place >= size:
            break
        place = max(place, end)
    return place
