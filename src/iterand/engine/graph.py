"""Work on a batch captured as a CUDA graph: launched as one, however many kernels it has."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_WARM_UP = 3  # times the work is done first: libraries choose their ways, compilers compile


class CannotCapture(Exception):
    """The work can be done, but not captured."""


class CapturedGraph:
    """The graph of ``work`` on tensors like ``batch``; trying it out leaves ``state`` as it was."""

    def __init__(
        self, work: Callable[[tuple[Tensor, ...]], None], batch: Sequence[Tensor], state: Sequence[Tensor]
    ) -> None:
        self._batch = tuple(tensor.clone() for tensor in batch)
        device = batch[0].device
        saved = [tensor.detach().cpu() for tensor in state]  # not beside what is measured as peak memory
        random = torch.cuda.get_rng_state(device)
        current, side = torch.cuda.current_stream(device), _own_stream(device)
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
            torch.cuda.set_rng_state(random, device)
            with torch.no_grad():
                for tensor, value in zip(state, saved):
                    tensor.copy_(value)

    def fits(self, batch: Sequence[Tensor]) -> bool:
        """Whether a batch has the shapes that were captured."""
        return all(one.shape == own.shape for one, own in zip(batch, self._batch))

    def replay(self, batch: Sequence[Tensor]) -> None:
        """Do the work on a batch."""
        for own, one in zip(self._batch, batch):
            own.copy_(one)
        self._graph.replay()


def _own_stream(device: torch.device) -> torch.cuda.Stream:
    """The current stream, unless it is the default stream, on which nothing can be captured.

    Libraries keep scratch memory for each stream, and a graph keeps using that of the stream it was captured on. Graphs
    captured on one stream must not be replayed at the same time.
    """
    current = torch.cuda.current_stream(device)
    if current != torch.cuda.default_stream(device):
        return current
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
