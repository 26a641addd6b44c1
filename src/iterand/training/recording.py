"""Work on a batch recorded as a CUDA graph: launched as one, however many kernels it has."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from iterand.data import Batch

_WARM_UP = 3  # times the work is done first: libraries choose their ways, compilers compile


class CannotRecord(Exception):
    """The work can be done, but not recorded."""


class Recording:
    """The graph of ``work`` on batches like ``batch``; trying it out leaves ``state`` as it was."""

    def __init__(self, work: Callable[[Batch], None], batch: Batch, state: Sequence[Tensor]) -> None:
        self._batch = Batch(tuple(one.clone() for one in batch.inputs), batch.labels.clone())
        device = batch.labels.device
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
                raise CannotRecord(str(error) or type(error).__name__) from error
        finally:
            current.wait_stream(side)
            torch.cuda.set_rng_state(random, device)
            with torch.no_grad():
                for tensor, value in zip(state, saved):
                    tensor.copy_(value)

    def fits(self, batch: Batch) -> bool:
        """Whether a batch has the shape that was recorded."""
        return all(one.shape == own.shape for one, own in zip(batch.inputs, self._batch.inputs))

    def replay(self, batch: Batch) -> None:
        """Do the work on a batch."""
        for own, one in zip((*self._batch.inputs, self._batch.labels), (*batch.inputs, batch.labels)):
            own.copy_(one)
        self._graph.replay()


def _own_stream(device: torch.device) -> torch.cuda.Stream:
    """The present stream, unless it is the one that all share, which cannot record.

    Libraries keep scratch memory for each stream, and a graph keeps using that of the stream it was recorded on. Runs
    side by side have streams of their own; recorded on a common one, they would write over each other's sums.
    """
    current = torch.cuda.current_stream(device)
    if current != torch.cuda.default_stream(device):
        return current
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
