"""Read the operations of a module with ``torch.export``. What is not supported is refused by name and place."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from iterand.errors import IterandError
from iterand.inference.models import export
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
    Pair,
    Value,
)

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_SUPPORTED = "convolution, linear, batch norm, ReLU, max and average pooling, add, concatenate and flatten"
_SHAPES = {1: "(features,)", 2: "(channels, length)", 3: "(channels, height, width)"}
_BATCH = 2  # of the traced input; with 1, squeeze() would remove the batch


def read(model: nn.Module, shape: tuple[int, ...]) -> Graph:
    """The operations of a module for an input of this shape, one node each; scales and shifts are float64."""
    with torch.no_grad():
        return _Reader(export(model, (_BATCH, *shape))).read()


@dataclass(frozen=True, eq=False)
class _Call:
    """A call in the traced program, with its arguments by name: values, constant tensors, numbers."""

    name: str
    where: str
    arguments: dict[str, Any]
    shape: tuple[int, ...]
    """The shape of its output without the batch."""

    def refuse(self, problem: str) -> NoReturn:
        """Raise one sentence that goes on with the problem."""
        raise IterandError(f"the network uses {self.name} {_place(self.where)}{problem}")

    def value(self, name: str, dimensions: int | None = None) -> Value:
        """An argument that is computed from the input; with this number of dimensions."""
        value = self.arguments[name]
        if not isinstance(value, Value):
            self.refuse(" on a constant, which inference in C does not compute")
        if dimensions is not None and len(value.shape) != dimensions:
            self.refuse(f" on a tensor of shape {value.shape}; inference in C needs {_SHAPES[dimensions]}")
        return value

    def constant(self, name: str) -> Any:
        """A parameter or buffer, or None."""
        tensor = self.arguments[name]
        if isinstance(tensor, Value):
            self.refuse(f" with a {name} that is computed from the input; inference in C needs a constant")
        if tensor is not None and tensor.dtype != torch.float32:
            self.refuse(f" with a {name} of {tensor.dtype}; inference in C computes in float32")
        return tensor

    def pair(self, name: str, dimensions: int, height: int) -> Pair:
        """An argument for height and width; in 1 dimension, the one for the height is given."""
        sizes = self.arguments[name]
        sizes = list(sizes) if isinstance(sizes, (list, tuple)) else [sizes]
        return (height, sizes[0]) if dimensions == 1 else (sizes[0], sizes[-1])


@dataclass(frozen=True, eq=False)
class _Reshaped:
    """A tensor in a shape that only further reshaping can read, as between two squeeze()."""

    source: Value
    call: _Call

    def refuse(self) -> NoReturn:
        """Say which call reshapes it."""
        self.call.refuse(f" from shape {self.source.shape} to {self.call.shape}; inference in C only flattens")


class _Reader:
    """Turns the calls of a traced program into nodes, one by one."""

    def __init__(self, program: "ExportedProgram") -> None:
        self._program = program
        self._nodes: list[Node] = []
        self._input: Value | None = None
        self._known: dict[fx.Node, Any] = {}  # values and constants
        self._arrays: dict[Tensor, NDArray[np.float32]] = {}
        # For in-place calls: the tensor that a result is, and the tensor whose memory it may share.
        self._tensors: dict[fx.Node, fx.Node] = {}
        self._owners: dict[fx.Node, fx.Node] = {}

    def read(self) -> Graph:
        """The nodes of the program."""
        from torch.export.graph_signature import OutputKind

        for node in self._needed():
            if node.op == "call_function":
                self._call(node)
            else:
                self._known[node] = self._given(node)
        (results,) = next(node.args for node in self._program.graph.nodes if node.op == "output")
        specs = zip(self._program.graph_signature.output_specs, cast(tuple[fx.Node, ...], results))
        (result,) = (node for spec, node in specs if spec.kind is OutputKind.USER_OUTPUT)
        output = self._look_up(result)
        if isinstance(output, _Reshaped):
            output.refuse()
        if self._input is None or not isinstance(output, Value):
            raise IterandError("the output of the network does not depend on its input")
        return Graph(tuple(self._nodes), self._input, output)

    def _needed(self) -> list[fx.Node]:
        """The nodes of the program, without calls whose result nobody reads."""
        nodes = self._program.graph.nodes
        pending = [node for node in nodes if node.op in ("placeholder", "output") or _is_in_place(node)]
        found = set[fx.Node]()
        while pending:
            node = pending.pop()
            if node not in found:
                found.add(node)
                pending += node.all_input_nodes
        return [node for node in nodes if node in found and node.op != "output"]

    def _given(self, node: fx.Node) -> Any:
        """The input, or a parameter, buffer or constant."""
        if node.op == "get_attr":
            return getattr(self._program.graph_module, str(node.target))
        specs = self._program.graph_signature.input_specs
        (target,) = (spec.target for spec in specs if spec.arg.name == node.name)
        if target is None:
            self._input = Value("input", tuple(node.meta["val"].shape[1:]))
            return self._input
        state = self._program.state_dict
        return state[target] if target in state else self._program.constants[target]

    def _look_up(self, node: fx.Node) -> Any:
        tensor = self._tensors.get(node, node)
        if tensor not in self._known:
            raise IterandError(
                f"the network reads a view {_place(_where(tensor))} after it has changed the tensor in place; "
                "use clone() before the change"
            )
        return self._known[tensor]

    def _call(self, node: fx.Node) -> None:
        target = cast(Any, node.target)
        args, kwargs = map_arg((node.args, node.kwargs), self._look_up)
        given = [self._look_up(one) for one in node.all_input_nodes]
        random = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
        if not random and not any(isinstance(one, (Value, _Reshaped)) for one in given):
            self._known[node] = target(*args, **kwargs)  # a weight that is computed from others
            return
        name, in_place = str(target).rpartition(".")[0] or str(target), _is_in_place(node)  # without the overload
        kind = name.removeprefix("aten.").removesuffix("_" if in_place else "")
        result = node.meta.get("val")
        call = _Call(name, _where(node), {}, tuple(result.shape[1:]) if isinstance(result, Tensor) else ())
        if kind not in _METHODS or "out" in kwargs:
            call.refuse(f", which inference in C does not have; it has {_SUPPORTED}")
        if not isinstance(result, Tensor) or result.dtype != torch.float32:
            call.refuse(f" for {getattr(result, 'dtype', 'several tensors')}; inference in C computes in float32")
        if result.ndim == 1 and len(result) == _BATCH:
            call.refuse(" to a single number for each input; leave it the last dimension, of size 1")
        if result.ndim < 2 or result.shape[0] != _BATCH:
            call.refuse(" across the batch; inference in C computes each input of a batch by itself")
        for one in given:
            if isinstance(one, _Reshaped) and kind not in _RESHAPES:
                one.refuse()
        schema = target._schema.arguments
        call.arguments.update({one.name: one.default_value for one in schema if one.has_default_value()})
        call.arguments.update(zip((one.name for one in schema), args), **kwargs)
        call.arguments.setdefault("input", call.arguments.get("self"))  # torch has both names for it
        value = _METHODS[kind](self, call)
        if in_place:
            self._change(node, value)
        else:
            self._known[node] = value
            if kind in _VIEWS:
                self._owners[node] = self._owner(cast(fx.Node, node.args[0]))

    def _owner(self, node: fx.Node) -> fx.Node:
        tensor = self._tensors.get(node, node)
        return self._owners.get(tensor, tensor)

    def _change(self, node: fx.Node, value: Value | _Reshaped) -> None:
        """Give the tensor that is changed in place its new value; tensors that share its memory are unknown now."""
        first = cast(fx.Node, node.args[0])
        tensor, owner = self._tensors.get(first, first), self._owner(first)
        self._tensors[node] = tensor
        if value != self._known[tensor]:
            self._known = {one: known for one, known in self._known.items() if self._owner(one) is not owner}
            self._known[tensor] = value

    def _add(self, kind: type[Node], call: _Call, *inputs: Value, **fields: Any) -> Value:
        output = Value(f"value{len(self._nodes)}", call.shape)
        self._nodes.append(kind(inputs, output, call.where, **fields))
        return output

    def _array(self, tensor: Tensor) -> NDArray[np.float32]:
        """A weight as an array of its own; a kernel of 1 dimension gets a height of 1."""
        if tensor not in self._arrays:
            self._arrays[tensor] = (tensor.unsqueeze(2) if tensor.ndim == 3 else tensor).numpy(force=True).copy()
        return self._arrays[tensor]

    # One method for each kind of call.

    def convolution(self, call: _Call) -> Value:
        weight = self._array(call.constant("weight"))
        dimensions = 1 if "1d" in call.name else 2
        dilation, padding = call.pair("dilation", dimensions, 1), call.arguments["padding"]
        if padding == "same":
            both = [step * (size - 1) for step, size in zip(dilation, weight.shape[2:])]
            if any(total % 2 for total in both):
                call.refuse(" with more padding on one side; inference in C pads both sides alike")
            pads = both[0] // 2, both[1] // 2
        else:
            pads = (0, 0) if padding == "valid" else call.pair("padding", dimensions, 0)
        return self._add(
            Convolution,
            call,
            call.value("input", dimensions + 1),
            weight=weight,
            stride=call.pair("stride", dimensions, 1),
            padding=pads,
            dilation=dilation,
            groups=call.arguments["groups"],
            scale=np.ones(len(weight)),
            shift=_double(call.constant("bias"), np.zeros(len(weight))),
        )

    def linear(self, call: _Call) -> Value:
        weight = self._array(call.constant("weight"))
        shift = _double(call.constant("bias"), np.zeros(len(weight)))
        return self._add(Linear, call, call.value("input", 1), weight=weight, scale=np.ones(len(weight)), shift=shift)

    def batch_norm(self, call: _Call) -> Value:
        images = call.value("input")
        ones = np.ones(images.shape[0])
        mean, variance = call.constant("running_mean"), call.constant("running_var")
        if call.arguments["training"] or mean is None or variance is None:
            call.refuse(" with the statistics of the batch; inference in C needs running statistics")
        scale = _double(call.constant("weight"), ones) / np.sqrt(_double(variance, ones) + call.arguments["eps"])
        shift = _double(call.constant("bias"), 0 * ones) - _double(mean, ones) * scale
        return self._add(Affine, call, images, scale=scale, shift=shift)

    def relu(self, call: _Call) -> Value:
        images = call.value("input")
        ones = np.ones(images.shape[0])
        return self._add(Affine, call, images, scale=ones, shift=0 * ones, relu=True)

    def add(self, call: _Call) -> Value:
        one, other = call.arguments["input"], call.arguments["other"]
        if not isinstance(one, Value) or not isinstance(other, Value):
            call.refuse(" with a constant; inference in C adds what is computed from the input")
        if one.shape != other.shape:
            call.refuse(f" on shapes {one.shape} and {other.shape}; inference in C adds equal shapes")
        if call.arguments["alpha"] != 1:
            call.refuse(f" with alpha={call.arguments['alpha']}; inference in C adds without a factor")
        return self._add(Add, call, one, other)

    def concatenate(self, call: _Call) -> Value:
        tensors, axis = call.arguments["tensors"], call.arguments["dim"]
        if not all(isinstance(tensor, Value) for tensor in tensors):
            call.refuse(" with a constant; inference in C concatenates what is computed from the input")
        if axis not in (1, -len(call.shape)):
            call.refuse(f" with dim={axis}; inference in C concatenates channels, dim=1")
        return cast(Value, tensors[0]) if len(tensors) == 1 else self._add(Concatenate, call, *tensors)

    def max_pool(self, call: _Call) -> Value:
        dilation = call.pair("dilation", 1 if "1d" in call.name else 2, 1)
        if dilation != (1, 1):
            call.refuse(f" with dilation {dilation}; inference in C has max pooling of dilation 1")
        images, windows = self._windows(call)
        return self._add(MaxPool, call, images, **windows)

    def average_pool(self, call: _Call) -> Value:
        images, windows = self._windows(call)
        if call.arguments.get("divisor_override") is not None:
            call.refuse(" with divisor_override; inference in C divides by the size of a window")
        return self._add(AveragePool, call, images, **windows, count_include_pad=call.arguments["count_include_pad"])

    def _windows(self, call: _Call) -> tuple[Value, dict[str, Pair]]:
        """The input of pooling, and the windows that are pooled."""
        dimensions = 1 if "1d" in call.name else 2
        images, kernel = call.value("input", dimensions + 1), call.pair("kernel_size", dimensions, 1)
        stride = call.pair("stride", dimensions, 1) if call.arguments["stride"] else kernel
        padding = call.pair("padding", dimensions, 0)
        for size, after, window, step, pad in zip(
            reversed(images.shape), reversed(call.shape[1:]), reversed(kernel), reversed(stride), reversed(padding)
        ):
            if after != (size + 2 * pad - window) // step + 1:
                call.refuse(" with ceil_mode and windows beyond the edge; inference in C has windows inside it")
        return images, {"kernel": kernel, "stride": stride, "padding": padding}

    def adaptive_average_pool(self, call: _Call) -> Value:
        images = call.value("input", 2 if "1d" in call.name else 3)
        before, after = images.shape[1:], call.shape[1:]
        if any(size % parts for size, parts in zip(before, after)):
            call.refuse(f" from size {before} to {after}; inference in C has windows of equal size")
        return self._average(call, images, [size // parts for size, parts in zip(before, after)])

    def mean(self, call: _Call) -> Value:
        images, axes = call.value("input"), call.arguments["dim"]
        dimensions = len(images.shape) + 1
        averaged, planes = {axis % dimensions for axis in axes or ()}, {*range(2, dimensions)}
        if not averaged or not averaged <= planes or not (call.arguments["keepdim"] or averaged == planes):
            call.refuse(f" with dim={axes}; inference in C averages over height and width")
        kernel = [size if axis in averaged else 1 for axis, size in enumerate(images.shape[1:], 2)]
        pooled = self._average(call, images, kernel)
        return pooled if call.arguments["keepdim"] else self._add(Flatten, call, pooled)

    def _average(self, call: _Call, images: Value, kernel: list[int]) -> Value:
        """Average over windows that do not overlap."""
        shape = images.shape[0], *(size // window for size, window in zip(images.shape[1:], kernel))
        wide = cast(Pair, (1, *kernel)[-2:])
        windows = {"kernel": wide, "stride": wide, "padding": (0, 0)}
        return self._add(AveragePool, replace(call, shape=shape), images, **windows, count_include_pad=True)

    def reshape(self, call: _Call) -> Value | _Reshaped:
        before = call.arguments["input"]
        images = before.source if isinstance(before, _Reshaped) else call.value("input")
        if call.shape == images.shape:
            return images
        return self._add(Flatten, call, images) if len(call.shape) == 1 else _Reshaped(images, call)

    def dropout(self, call: _Call) -> Value:
        if call.arguments["train"]:
            call.refuse(" with training=True; inference in C has no dropout")
        return call.value("input")

    def pad(self, call: _Call) -> Value:
        mode = call.arguments["mode"]
        zeros = "only within a layer; give the next layer the padding" if mode == "constant" else "with zeros only"
        call.refuse(f" with mode {mode!r}; inference in C pads {zeros}")


def _is_in_place(node: fx.Node) -> bool:
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def _where(node: fx.Node) -> str:
    """The path of the module that makes the call."""
    paths = [str(path) for path, _ in node.meta.get("nn_module_stack", {}).values()]
    return paths[-1] if paths else ""


def _place(where: str) -> str:
    return f"at {where!r}" if where else "in its own forward"


def _double(tensor: Tensor | None, default: NDArray[np.float64]) -> NDArray[Any]:
    return default if tensor is None else tensor.double().numpy(force=True)


_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
_RESHAPES = ("flatten", "view", "reshape", "squeeze", "unsqueeze", "contiguous", "to", "detach", "alias")
_COPIES = ("clone", "_to_copy")
_VIEWS = _DROPOUTS + _RESHAPES  # the result may share the memory of its input
_METHODS: dict[str, Callable[[_Reader, _Call], Value | _Reshaped]] = {
    "conv1d": _Reader.convolution,
    "conv2d": _Reader.convolution,
    "linear": _Reader.linear,
    "batch_norm": _Reader.batch_norm,
    "relu": _Reader.relu,
    "add": _Reader.add,
    "mean": _Reader.mean,
    "pad": _Reader.pad,
    **dict.fromkeys(("cat", "concat", "concatenate"), _Reader.concatenate),
    **dict.fromkeys(("max_pool1d", "max_pool2d"), _Reader.max_pool),
    **dict.fromkeys(("avg_pool1d", "avg_pool2d"), _Reader.average_pool),
    **dict.fromkeys(("adaptive_avg_pool1d", "adaptive_avg_pool2d"), _Reader.adaptive_average_pool),
    **dict.fromkeys(_RESHAPES + _COPIES, _Reader.reshape),
    **dict.fromkeys(_DROPOUTS, _Reader.dropout),
}
