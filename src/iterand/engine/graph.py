"""Capture and replay of CUDA graphs: all kernels of a piece of work on one batch as a single launch."""

import gc
import logging
import traceback
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from iterand.errors import first_line

logger = logging.getLogger("iterand")

Work = Callable[[Sequence[Tensor]], Tensor]
"""Computes a tensor from the tensors of a batch."""

_WARM_UP = 3  # runs in a row before a shape is captured: libraries choose algorithms, kernels are compiled
_GRAPHS = 8  # captured shapes


class CannotCapture(Exception):
    """The work cannot be captured as a CUDA graph."""


class CapturedGraph:
    """The CUDA graph of ``work`` for batches of one shape. Nothing runs while it is captured.

    Its kernels also read the tensors ``read``, which it keeps.
    """

    def __init__(self, work: Work, batch: Sequence[Tensor], pool: Any, read: Sequence[Tensor]) -> None:
        self._read = read
        self._batch = tuple(tensor.clone() for tensor in batch)
        device = batch[0].device
        rng_state = torch.cuda.get_rng_state(device)
        current, side = torch.cuda.current_stream(device), _capture_stream(device)
        side.wait_stream(current)
        self._graph = torch.cuda.CUDAGraph()
        try:
            with (
                _no_garbage_collection(),
                torch.cuda.stream(side),  # if it fails, torch.cuda.graph does not restore the current stream
                # Other threads may use the device meanwhile, as those of a DataLoader that pins memory do.
                torch.cuda.graph(self._graph, pool=pool, stream=side, capture_error_mode="thread_local"),
            ):
                self._result = work(self._batch)
        except Exception as error:
            torch.cuda.set_rng_state(rng_state, device)
            raise CannotCapture(_reason(error)) from error
        finally:
            current.wait_stream(side)

    def replay(self, batch: Sequence[Tensor]) -> Tensor:
        """Copy a batch into the static buffers, replay the graph, and give a copy of its result."""
        for buffer, tensor in zip(self._batch, batch):
            buffer.copy_(tensor)
        self._graph.replay()
        return self._result.clone()


class GraphCache:
    """Runs work on batches. On CUDA, a shape that comes several times in a row is captured and replayed from then on.

    What cannot be captured runs directly, and the log says why, once. Graphs share their memory: they run one after the
    other, and leave nothing in it but the result.
    """

    def __init__(
        self,
        what: str,
        device: torch.device,
        *,
        enabled: bool = True,
        capturing: Callable[[], AbstractContextManager[Sequence[Tensor]]] = lambda: nullcontext(()),
    ) -> None:
        self._what = what
        self._enabled = enabled and device.type == "cuda"
        self._capturing = capturing
        self._graphs: OrderedDict[Hashable, CapturedGraph] = OrderedDict()
        self._rows: dict[Hashable, tuple[Hashable, int]] = {}
        """For each variant, the key of its last batch and how often that came in a row."""
        self._pool = torch.cuda.graph_pool_handle() if self._enabled else None

    @property
    def replays(self) -> bool:
        """Whether anything has been captured."""
        return bool(self._graphs)

    def clear(self) -> None:
        """Drop all graphs, since tensors have moved or settings have changed."""
        self._graphs.clear()
        self._rows.clear()

    def run(self, variant: Hashable, work: Work, batch: Sequence[Tensor]) -> Tensor:
        """Do the work on a batch. Work of one variant does the same on all batches of a shape."""
        if not self._enabled:
            return work(batch)
        key = (variant, *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in batch))
        last, count = self._rows.get(variant, (None, 0))
        count = count + 1 if key == last else 1
        self._rows[variant] = key, count
        if key not in self._graphs and (count <= _WARM_UP or not self._capture(key, work, batch)):
            return work(batch)
        self._graphs.move_to_end(key)
        return self._graphs[key].replay(batch)

    def _capture(self, key: Hashable, work: Work, batch: Sequence[Tensor]) -> bool:
        try:
            with self._capturing() as read:
                self._graphs[key] = CapturedGraph(work, batch, self._pool, read)
        except CannotCapture as error:
            logger.warning("without a CUDA graph %s, so slower than it could be: %s", self._what, first_line(error))
            self._enabled = False
            self._graphs.clear()
            return False
        while len(self._graphs) > _GRAPHS:
            self._graphs.popitem(last=False)
        return True


def _reason(error: BaseException) -> str:
    """What went wrong first, and in which line: the end of a capture fails with an error of its own."""
    while error.__context__ is not None:
        error = error.__context__
    torch_folder = str(Path(torch.__file__).parent)
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(torch_folder)]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return first_line(error) + place


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Destroying a graph that is garbage would end the capture of another."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The current stream, or a new stream if that is the default stream, which cannot be captured.

    Libraries keep a workspace per stream, and a graph uses the workspace of its capture stream. So graphs captured on
    one stream must not be replayed concurrently.
    """
    current = torch.cuda.current_stream(device)
    if current != torch.cuda.default_stream(device):
        return current
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
