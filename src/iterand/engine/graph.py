"""Capture and replay of a CUDA graph: all kernels of a step on one batch as a single launch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_WARM_UP = 3  # runs before the capture: libraries choose algorithms, kernels are compiled


class CannotCapture(Exception):
    """The work cannot be captured as a CUDA graph."""


class CapturedGraph:
    """The CUDA graph of ``work`` for batches of these shapes. Warm-up and capture leave ``state`` unchanged."""

    def __init__(
        self, work: Callable[[tuple[Tensor, ...]], None], batch: Sequence[Tensor], state: Sequence[Tensor]
    ) -> None:
        self._batch = tuple(tensor.clone() for tensor in batch)
        device = batch[0].device
        # On the host, so that the copies do not count as peak memory of the device.
        saved = [tensor.detach().cpu() for tensor in state]
        rng_state = torch.cuda.get_rng_state(device)
        current, side = torch.cuda.current_stream(device), _capture_stream(device)
        try:
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(_WARM_UP):
                    work(self._batch)
            self._graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(self._graph, stream=side):
                    work(self._batch)
            except Exception as error:
                raise CannotCapture(str(error) or type(error).__name__) from error
        finally:
            current.wait_stream(side)
            torch.cuda.set_rng_state(rng_state, device)
            with torch.no_grad():
                for tensor, value in zip(state, saved):
                    tensor.copy_(value)

    def fits(self, batch: Sequence[Tensor]) -> bool:
        """Whether a batch has the captured shapes."""
        return all(tensor.shape == buffer.shape for tensor, buffer in zip(batch, self._batch))

    def replay(self, batch: Sequence[Tensor]) -> None:
        """Copy a batch into the static buffers and replay the graph."""
        for buffer, tensor in zip(self._batch, batch):
            buffer.copy_(tensor)
        self._graph.replay()


def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The current stream, or a new stream if that is the default stream, which cannot be captured.

    Libraries keep a workspace per stream, and a graph uses the workspace of its capture stream. So graphs captured on
    tensor stream must not be replayed concurrently.
    """
    current = torch.cuda.current_stream(device)
    if current != torch.cuda.default_stream(device):
        return current
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
