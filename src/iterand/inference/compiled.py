"""``compile_ticket``: the network of a ticket as machine code, or with torch where there is no C compiler."""

import logging
import os
import threading
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from iterand.checks import check_int
from iterand.inference.c.emitter import emit
from iterand.inference.c.library import Library, cached_library, find_compiler
from iterand.inference.graph import FoldedModule, trace
from iterand.inference.models import copied
from iterand.inference.nodes import Graph
from iterand.inference.quantization import Activations, calibrate, check_difference, check_sample, difference_of_bytes
from iterand.surgery import unwrap
from iterand.ticket import Ticket, load_ticket
from iterand.ticket.load import load

logger = logging.getLogger("iterand")

Array = TypeVar("Array", NDArray[np.float32], Tensor)

_DIMENSIONS = "an input of a network in C has one to three dimensions, such as (3, 32, 32)"
_TRACING = threading.Lock()  # torch.export has global state


def compile_ticket(
    ticket: str | os.PathLike[str] | Ticket,
    model: nn.Module | None = None,
    *,
    threads: int = 1,
    input_shape: Sequence[int] | None = None,
    activations: Activations = "float32",
    sample: NDArray[np.float32] | Tensor | None = None,
) -> "CompiledNetwork":
    """The network of a ticket as machine code: fast on a CPU, because pruned weights cost nothing.

    It is called with a batch of inputs, as a NumPy array or a tensor, and gives outputs of the same kind. The C
    compiler of the system builds it (``CC``, otherwise ``cc``, ``gcc`` or ``clang``), once for a ticket and a machine.
    Without a compiler the network runs with torch in float32, and the log says so.

    Args:
        ticket: A ticket, or its file.
        model: The network, if the ticket has no recipe of it. The ticket is loaded into it.
        threads: How many threads share a batch.
        input_shape: Of one input, such as (3, 32, 32). Without it the network is built for the first input.
        activations: "float32", or "int8": values between layers are bytes, which is faster and almost as accurate.
        sample: A batch of inputs for "int8", a hundred or more, from which the range of every value is chosen.
    """
    threads = check_int("threads", threads, "a number of threads, at least 1", low=1)
    sample = check_sample(activations, sample)
    if input_shape is not None:
        if not isinstance(input_shape, Sequence):
            raise ValueError(f"input_shape is {input_shape!r}; it is sizes such as (3, 32, 32)")
        input_shape = tuple(check_int("input_shape", size, "sizes such as (3, 32, 32)", low=1) for size in input_shape)
        if not 1 <= len(input_shape) <= 3:
            raise ValueError(f"input_shape is {input_shape}; {_DIMENSIONS}")
    if sample is not None:
        if sample.ndim > 4:
            raise ValueError(f"sample has shape {tuple(sample.shape)}; {_DIMENSIONS}")
        if input_shape not in (None, tuple(sample.shape[1:])):
            raise ValueError(f"input_shape is {input_shape} and the inputs of the sample are {tuple(sample.shape[1:])}")
        input_shape = tuple(sample.shape[1:])
    network = load(ticket, model) if isinstance(ticket, Ticket) else load_ticket(ticket, model)
    if model is not None:  # the caller's, which may be trained or filled again before the first call
        network = copied(unwrap(network))
    return CompiledNetwork(network, threads, input_shape, sample)


class CompiledNetwork:
    """The network of a ticket as machine code, from ``compile_ticket``; call it with a batch of inputs."""

    def __init__(
        self, model: nn.Module, threads: int, input_shape: tuple[int, ...] | None, sample: Tensor | None = None
    ) -> None:
        self._model: nn.Module | None = model
        self._graph: Graph | None = None
        self._threads = threads
        self._sample = sample
        self._run: Library | FoldedModule | None = None
        self.input_shape = input_shape
        """The shape of one input, without the batch; None until it is known."""
        self.output_shape: tuple[int, ...] | None = None
        """The shape of one output, without the batch; None until the network is built."""
        self.difference: float | None = None
        """With int8: the largest difference to the outputs in float32 for the sample, relative to the largest one."""
        if input_shape is not None:
            self._build(input_shape)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_run": None}  # a library is loaded again where it is needed

    @property
    def is_compiled(self) -> bool:
        """True for machine code; False before the first input, and where torch runs for lack of a compiler."""
        return isinstance(self._run, Library)

    def __call__(self, inputs: Array) -> Array:
        """The outputs for a batch, as a NumPy array or a tensor, like the inputs."""
        if isinstance(inputs, Tensor):
            array = inputs.detach().cpu()
            array = array.float() if array.dtype == torch.bfloat16 else array  # which NumPy does not have
            return torch.from_numpy(self._outputs(array.numpy())).to(inputs.device)
        return self._outputs(np.asarray(inputs))

    def _outputs(self, inputs: NDArray[Any]) -> NDArray[np.float32]:
        if inputs.dtype.kind != "f":
            raise ValueError(
                f"inputs are {inputs.dtype}; they must be floating-point numbers, prepared as in training (C has no "
                "embeddings)"
            )
        if inputs.ndim < 2:
            raise ValueError(f"inputs have shape {inputs.shape}; they must be a batch, with the examples first")
        if self._run is None:
            if inputs.ndim > 4:
                raise ValueError(f"inputs have shape {inputs.shape}; {_DIMENSIONS}")
            self._build(inputs.shape[1:])
        if inputs.shape[1:] != self.input_shape:
            raise ValueError(
                f"inputs have shape {inputs.shape}; this network is compiled for (batch, "
                f"{', '.join(map(str, self.input_shape or ()))}); for other sizes call compile_ticket again"
            )
        batch = np.ascontiguousarray(inputs, dtype=np.float32)
        if isinstance(self._run, Library):
            return self._run(batch, self._threads).reshape(len(batch), *(self.output_shape or ()))
        assert self._run is not None
        with torch.no_grad():
            outputs: NDArray[np.float32] = self._run(torch.from_numpy(batch)).numpy()
        return outputs

    def _build(self, shape: tuple[int, ...]) -> None:
        with _TRACING:
            if self._graph is None:
                assert self._model is not None
                self._graph = trace(self._model.float(), torch.zeros(1, *shape, dtype=torch.float32, device="cpu"))
                self._model = None
                self.input_shape, self.output_shape = self._graph.input.shape, self._graph.output.shape
            if self._run is None:
                run = _library_or_module(self._graph, self._sample)
                if self._sample is not None and isinstance(run, Library):
                    self.difference = difference_of_bytes(run(self._sample.numpy(), 1), self._graph, self._sample)
                    check_difference(self.difference)
                self._run = run


def _library_or_module(graph: Graph, sample: Tensor | None) -> "Library | FoldedModule":
    """A library, or a torch module where there is no compiler."""
    compiler = find_compiler()
    if compiler is None:
        logger.warning(
            "no C compiler is found, so the network runs with torch in float32, which is slower; install gcc or clang, "
            "or set CC"
        )
        return FoldedModule(graph)
    source = emit(graph, activations=None if sample is None else calibrate(graph, sample))
    return Library(cached_library(source, compiler), source)
