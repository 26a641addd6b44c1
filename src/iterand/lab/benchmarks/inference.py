"""Inference on a CPU: ``compile_ticket`` beside onnxruntime and torch, which run the dense network."""

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from iterand import load_ticket, prune_
from iterand.checks import counted
from iterand.errors import extra, first_line
from iterand.inference.c.emitter import emit
from iterand.inference.compiled import CompiledNetwork
from iterand.inference.graph import trace
from iterand.inference.nodes import Convolution, Linear
from iterand.inference.onnx import quiet
from iterand.lab.benchmarks.table import FAILED, Notify, Options, Row, Table
from iterand.lab.benchmarks.timing import spread, subject, subject_of, take_turns
from iterand.lab.networks.external import TIMM, build_timm
from iterand.lab.training import recipe_file
from iterand.masking import fold_
from iterand.ticket import read_ticket

RUNTIMES = ("iterand", "iterand-int8", "onnxruntime", "onnxruntime-int8", "torch", "compiled")
_SPARSITY = 0.95
_BATCHES = (1, 32)
_BURST_SECONDS = 0.05
_SAMPLE = 64  # inputs from which ranges of bytes are chosen
_CPU = torch.device("cpu")

Run = Callable[[], object]


def measure(options: Options, notify: Notify) -> Table:
    """Milliseconds of a batch for every network, runtime, batch size and number of threads."""
    table = Table(
        "inference",
        [
            "On a CPU, random inputs. iterand adds the kept weights, the others multiply by all of them.",
            "float32 but for runtimes with int8, whose activations are bytes (onnxruntime-int8: weights too).",
            f"Networks of recipes are pruned to p = {_SPARSITY} at random. All take turns, also for a speedup.",
        ],
    )
    runtimes = options.executions or (("iterand", "iterand-int8", "torch") if options.short else RUNTIMES[:5])
    for name in runtimes:
        if name not in RUNTIMES:
            raise ValueError(f"there is no runtime {name!r}; there are {', '.join(RUNTIMES)}")
    batches = (options.batch_size,) if options.batch_size else (1,) if options.short else _BATCHES
    cores = os.cpu_count() or 1
    threads = (1,) if options.short else tuple(dict.fromkeys((1, cores)))
    for name in options.networks or (("digits",) if options.short else ("resnet20",)):
        model, shape = _network(name)
        size = _operations(model, shape)
        for batch, count in itertools.product(batches, threads):
            notify(f"inference: {name}, batch {batch}, {counted(count, 'thread')}")
            head: Row = {"network": Path(name).name, "batch": batch, "threads": count, **size}
            table.rows += _measure(model, torch.randn(batch, *shape), runtimes, count, head, options)
    return table


def _measure(
    model: nn.Module, inputs: Tensor, runtimes: tuple[str, ...], threads: int, head: Row, options: Options
) -> list[Row]:
    rows: dict[str, Row] = {name: head | {"runtime": name} for name in runtimes}
    works: dict[str, Run] = {}
    with _threads(threads), torch.no_grad():
        for name in runtimes:
            try:
                works[name] = _RUNS[name](model, inputs, threads)
                works[name]()
            except Exception as error:  # whatever a compiler or an exporter may raise
                works.pop(name, None)
                rows[name][FAILED] = first_line(error)
        times = take_turns(works, options.count(gpu=15, cpu=15, short=3), _BURST_SECONDS, _CPU)
    dense = times.get("onnxruntime")
    for name, mine in times.items():
        rows[name]["milliseconds"] = spread(mine)
        if dense is not None:
            rows[name]["speedup"] = spread([theirs / own for theirs, own in zip(dense, mine)])
    return list(rows.values())


def _network(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """The network of a ticket or of a recipe, and the shape of its inputs."""
    if name.endswith(".ticket"):
        model = load_ticket(name).eval()
        return model, subject_of(name, recipe_file.from_dict(read_ticket(name).recipe or {})).input_shape
    if name.startswith(TIMM):
        model, shape = build_timm(name, 1000, 3, {}), (3, 224, 224)
    else:
        chosen = subject(name)
        model, shape = chosen.network(), chosen.input_shape
    return fold_(prune_(model, _SPARSITY, weights="signed_constant", ranking="global", seed=0)).eval(), shape


def _operations(model: nn.Module, shape: tuple[int, ...]) -> Row:
    """Multiplications of an input by weights: all of them, and those by weights that are kept; and bytes of data."""
    graph = trace(model, torch.zeros(1, *shape))
    layers = [node for node in graph.nodes if isinstance(node, (Convolution, Linear))]
    pixels = [torch.Size(node.output.shape[1:]).numel() for node in layers]
    every = sum(node.weight.size * count for node, count in zip(layers, pixels))
    kept = sum(int((node.weight != 0).sum()) * count for node, count in zip(layers, pixels))
    return {"operations": every, "kept": kept, "data_bytes": emit(graph, coded=True).data}


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _iterand(model: nn.Module, inputs: Tensor, threads: int, sample: Tensor | None = None) -> Run:
    network = CompiledNetwork(model, threads, tuple(inputs.shape[1:]), sample)
    if not network.is_compiled:
        raise ValueError("no C compiler is found")
    batch = inputs.numpy()
    return lambda: network(batch)


def _iterand_int8(model: nn.Module, inputs: Tensor, threads: int) -> Run:
    sample = torch.randn(_SAMPLE, *inputs.shape[1:], generator=torch.Generator().manual_seed(0))
    return _iterand(model, inputs, threads, sample)


def _onnxruntime(model: nn.Module, inputs: Tensor, threads: int) -> Run:
    return _session(_exported(model, inputs.shape), inputs, threads)


@lru_cache(maxsize=1)
def _exported(model: nn.Module, shape: torch.Size) -> bytes:
    with extra("onnx", "comparing with onnxruntime"), quiet():
        program: Any = torch.onnx.export(model, (torch.zeros(shape),), dynamo=True, verbose=False)
    found: bytes = program.model_proto.SerializeToString()
    return found


def _session(exported: bytes, inputs: Tensor, threads: int) -> Run:
    with extra("onnx", "comparing with onnxruntime"):
        import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(exported, options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: inputs.numpy()}
    return lambda: session.run(None, feed)


def _onnxruntime_int8(model: nn.Module, inputs: Tensor, threads: int) -> Run:
    return _session(_quantized(model, inputs.shape), inputs, threads)


@lru_cache(maxsize=1)
def _quantized(model: nn.Module, shape: torch.Size) -> bytes:
    """Activations and weights as bytes: a scale for each channel of weights, ranges of activations from a sample."""
    with extra("onnx", "comparing with onnxruntime"):
        import onnxruntime
        from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Sample(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self, name: str) -> None:
            self._feeds = iter([{name: torch.randn(shape).numpy()} for _ in range(-(-_SAMPLE // shape[0]))])

        def get_next(self) -> object:
            return next(self._feeds, None)

    with tempfile.TemporaryDirectory() as folder, quiet():
        source, target = Path(folder) / "float32.onnx", Path(folder) / "int8.onnx"
        source.write_bytes(_exported(model, shape))
        (single,) = onnxruntime.InferenceSession(str(source), providers=["CPUExecutionProvider"]).get_inputs()
        quantize_static(source, target, Sample(single.name), per_channel=True, weight_type=QuantType.QInt8)
        return target.read_bytes()


def _torch(model: nn.Module, inputs: Tensor, threads: int) -> Run:
    return lambda: model(inputs)


def _compiled(model: nn.Module, inputs: Tensor, threads: int) -> Run:
    run = torch.compile(model)
    return lambda: run(inputs)


_RUNS: dict[str, Callable[[nn.Module, Tensor, int], Run]] = {
    "iterand": _iterand,
    "iterand-int8": _iterand_int8,
    "onnxruntime": _onnxruntime,
    "onnxruntime-int8": _onnxruntime_int8,
    "torch": _torch,
    "compiled": _compiled,
}
