"""Export a ticket's network to ONNX, with weights as 4-bit integers and a scale, without loss.

A weight of a distribution with few levels is level · unit, which is what ``DequantizeLinear`` computes (opset 21 for 4
bits). The file is about 8 times smaller than float32. ONNX runtimes use dense kernels, so zeros bring no speedup.
"""

import contextlib
import importlib.util
import inspect
import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from iterand.checks import shown
from iterand.errors import IterandError, MissingExtraError, first_line
from iterand.files import atomic_write
from iterand.inference.models import evaluating, forward
from iterand.surgery import unwrap
from iterand.ticket.load import check_loaded
from iterand.ticket.read import Ticket, read_ticket

if TYPE_CHECKING:
    import onnx

OPSET = 21
_RANGES = {"int4": (-8, 7), "int8": (-128, 127)}
# Allowed rounding difference, relative to the largest output: float32 sums are taken in another order.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class OnnxExport:
    """Result of an export."""

    bytes: int
    """Size of the file."""
    whole_numbers: tuple[str, ...]
    """Names of the tensors stored as integers. The others are float32."""
    difference: float
    """Largest difference between the outputs of onnxruntime and torch, relative to the largest finite output."""


def export_onnx(
    ticket: str | os.PathLike[str] | Ticket,
    model: nn.Module,
    example: Tensor | tuple[Tensor, ...],
    path: str | os.PathLike[str],
    *,
    integers: str = "int4",
) -> OnnxExport:
    """Write the network as ONNX, run it with onnxruntime, and compare its outputs with torch's.

    Args:
        ticket: The ticket of the network, or its file.
        model: The network, from ``load_ticket``, or a module that wraps it.
        example: An example input, or several. The first dimension of each stays dynamic.
        path: The file to write.
        integers: ``"int4"``, or ``"int8"`` for runtimes without 4-bit integers.
    """
    if integers not in _RANGES:
        raise ValueError(f"integers is {integers!r}; it must be one of {', '.join(_RANGES)}")
    for package in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "ONNX export", "onnx")
    ticket = ticket if isinstance(ticket, Ticket) else read_ticket(ticket)
    example = (example,) if isinstance(example, Tensor) else example
    if not isinstance(example, tuple) or not all(isinstance(one, Tensor) for one in example):
        raise ValueError(f"example is {shown(example)}; it must be a tensor, or a tuple of tensors")
    if not all(one.ndim and len(one) for one in example):
        raise ValueError("example has no inputs; it must be a batch of at least one")
    model = unwrap(model)
    with torch.autocast("cpu", enabled=False), evaluating(model):
        given = _outputs(model, example)
        start = check_loaded(ticket, model)
        larger = _larger(model, example)
        if larger is not None and len(example[0]) == 1:  # torch may take a size of one for a constant
            given, example = larger
            larger = _larger(model, example)
        tolerance = max(_TOLERANCE, 8 * torch.finfo(given.dtype).eps) if given.is_floating_point() else _TOLERANCE
        floats = _exported(model, example)
        if larger is not None and not _agrees(floats.SerializeToString(), *larger, tolerance):
            with contextlib.suppress(IterandError):  # slower, but len(x) is no constant then
                floats = _exported(model, example, strict=True)
    units = _units(ticket, model, start, {tensor.name for tensor in floats.graph.initializer}, _RANGES[integers])
    for multiply in (False, True):
        data = _in_integers(floats, units.values(), integers, multiply).SerializeToString()
        difference = _difference(data, given, example)
        if difference <= tolerance:
            if larger is not None and not _agrees(data, *larger, tolerance):
                raise IterandError(
                    f"torch exports {type(model).__name__} for batches of {len(example[0])} only, so nothing is "
                    "written; use x.shape[0] for its size, not a number, and do not loop over the batch"
                )
            atomic_write(path, data)
            return OnnxExport(len(data), tuple(units), difference)
    raise IterandError(
        f"onnxruntime's outputs differ from torch's by {difference:g} of the largest; nothing is written"
    )


def _outputs(model: nn.Module, example: tuple[Tensor, ...]) -> Tensor:
    with torch.no_grad():
        given = forward(model, *example)
    if not isinstance(given, Tensor):
        raise ValueError(f"the model gives a {type(given).__name__}; wrap it in a module that gives one tensor")
    return given


def _larger(model: nn.Module, example: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """The outputs for a batch with one more input, and the batch; None if the model takes no such batch."""
    if len({len(one) for one in example}) > 1:
        return None
    batch = tuple(torch.cat([one, one[:1]]) for one in example)
    try:
        return _outputs(model, batch), batch
    except IterandError:
        return None


def _agrees(data: bytes, given: Tensor, batch: tuple[Tensor, ...], tolerance: float) -> bool:
    try:
        return _difference(data, given, batch) <= tolerance
    except IterandError:
        return False


def _units(
    ticket: Ticket, model: nn.Module, start: str, there: Set[str], limits: tuple[int, int]
) -> dict[str, tuple[str, float]]:  # fmt: skip
    """The tensors to store as integers: the name in the export, which is one of several if it is tied, and the unit.

    ``start`` is what the names of the ticket's tensors begin with in the model.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = {}
    for name, layer in ticket.layers.items():
        support = ticket.header.support(layer.header)
        if not support or layer.header.dtype != "F32" or layer.header.unit == 0:
            continue
        tied = (other for other, parameter in parameters.items() if parameter is parameters.get(start + name))
        known = next((one for one in (start + name, *tied) if one in there), None)
        if known and limits[0] <= min(support) and max(support) <= limits[1]:
            found[name] = known, layer.header.unit
    return found


def _exported(model: nn.Module, example: tuple[Tensor, ...], *, strict: bool = False) -> "onnx.ModelProto":
    """The network as torch exports it; ``strict``: traced by torch's compiler."""
    batches: tuple[Any, ...] = tuple({0: torch.export.Dim.AUTO} for _ in example)
    kinds = [one.kind for one in inspect.signature(model.forward).parameters.values()][: len(batches)]
    if inspect.Parameter.VAR_POSITIONAL in kinds:  # torch wants the shapes of *inputs as one entry
        named = kinds.index(inspect.Parameter.VAR_POSITIONAL)
        batches = *batches[:named], batches[named:]
    try:
        with quiet(), torch.no_grad():
            # No optimization: folding batch norm into the weights would destroy their levels.
            traced = _traced(model, example, batches) if strict else model
            program: Any = torch.onnx.export(
                traced,
                example,
                dynamo=True,
                optimize=False,
                opset_version=OPSET,
                dynamic_shapes=None if strict else batches,
                verbose=False,
            )
            _decide_branches(program.model)
    except Exception as error:
        reason = first_line(error.__cause__ or error)
        raise IterandError(f"torch cannot export {type(model).__name__} to ONNX: {reason}") from error
    proto: onnx.ModelProto = program.model_proto
    for node in [*proto.graph.node, *proto.graph.value_info, *proto.graph.input, *proto.graph.output, proto.graph]:
        del node.metadata_props[:]  # source locations
    return proto


def _traced(model: nn.Module, example: tuple[Tensor, ...], batches: tuple[Any, ...]) -> Any:
    """The program of a module as torch's compiler traces it, without the fused attention that ONNX does not have."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return torch.export.export(model, example, dynamic_shapes=batches, strict=True)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def _decide_branches(model: Any) -> None:
    """Replace each ``If`` with a constant condition by its branch: onnxruntime crashes on the nest of EmbeddingBag."""
    from onnxscript import optimizer

    if all(node.op_type != "If" for node in model.graph.all_nodes()):
        return
    weights = set(model.graph.initializers)

    def should_fold(node: Any) -> bool | None:
        return False if any(value is not None and value.name in weights for value in node.inputs) else None

    optimizer.fold_constants(model, should_fold=should_fold)
    optimizer.remove_unused_nodes(model)


def _in_integers(
    floats: "onnx.ModelProto", units: Iterable[tuple[str, float]], integers: str, multiply: bool
) -> "onnx.ModelProto":
    """The network with these tensors as integers."""
    from onnx import ModelProto

    proto = ModelProto()
    proto.CopyFrom(floats)
    named = {tensor.name: tensor for tensor in proto.graph.initializer}
    for name, unit in units:
        _replace(proto, named[name], unit, integers, multiply)
    return proto


def _replace(proto: "onnx.ModelProto", tensor: "onnx.TensorProto", unit: float, integers: str, multiply: bool) -> None:
    """Replace a float32 tensor by integers and a DequantizeLinear node.

    With ``multiply`` the unit is a factor of its own: onnxruntime joins DequantizeLinear with some multiplications of
    matrices, and then rounds their inputs too.
    """
    from onnx import TensorProto, helper, numpy_helper

    weight = numpy_helper.to_array(tensor)
    levels = np.rint(weight / np.float32(unit)).astype(np.int8)
    if not np.array_equal(levels.astype(np.float32) * np.float32(unit), weight):
        raise IterandError(f"{tensor.name!r} changed while torch exported it, so it cannot be told in whole numbers")
    name = tensor.name
    numbers = TensorProto(name=f"{name}.levels", dims=list(weight.shape), raw_data=_pack(levels, integers).tobytes())
    numbers.data_type = TensorProto.INT4 if integers == "int4" else TensorProto.INT8
    scale = helper.make_tensor(f"{name}.unit", TensorProto.FLOAT, [], [unit])
    proto.graph.initializer.remove(tensor)
    proto.graph.initializer.extend([numbers, scale])
    if multiply:
        one = helper.make_tensor(f"{name}.one", TensorProto.FLOAT, [], [1.0])
        proto.graph.initializer.append(one)
        proto.graph.node.insert(0, helper.make_node("Mul", [f"{name}.counts", scale.name], [name]))
        proto.graph.node.insert(0, helper.make_node("DequantizeLinear", [numbers.name, one.name], [f"{name}.counts"]))
    else:
        proto.graph.node.insert(0, helper.make_node("DequantizeLinear", [numbers.name, scale.name], [name]))


def _pack(levels: NDArray[np.int8], integers: str) -> NDArray[np.uint8]:
    flat = levels.reshape(-1).view(np.uint8)
    if integers == "int8":
        return flat
    pairs = np.zeros(-(-flat.size // 2) * 2, dtype=np.uint8)
    pairs[: flat.size] = flat & 0xF
    packed: NDArray[np.uint8] = pairs[::2] | pairs[1::2] << np.uint8(4)
    return packed


def _difference(data: bytes, given: Tensor, example: tuple[Tensor, ...]) -> float:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised
    try:
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        inputs = {entry.name: value.detach().numpy() for entry, value in zip(session.get_inputs(), example)}
        (found, *_) = session.run(None, inputs)
    except Exception as error:  # onnxruntime's own kinds, and what NumPy does not have
        raise IterandError(f"onnxruntime cannot run the network, so nothing is written: {first_line(error)}") from error
    expected = given.numpy()
    finite = np.isfinite(expected)
    if found.shape != expected.shape or not np.array_equal(found[~finite], expected[~finite], equal_nan=True):
        return float("inf")
    found, expected = (outputs[finite].astype(np.float64) for outputs in (found, expected))
    return float(np.abs(found - expected).max(initial=0) / np.abs(expected).max(initial=np.finfo(np.float32).tiny))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings of torch's exporter about packages that are not needed here, and advice of onnxruntime."""
    loggers = [logging.getLogger("torch.onnx"), logging.getLogger()]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
