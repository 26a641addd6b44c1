"""``compile_ticket``: the network of a ticket as machine code, built by the system's C compiler and kept in a cache."""

import atexit
import ctypes
import hashlib
import json
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from iterand.checks import check_int
from iterand.errors import IterandError
from iterand.files import atomic_write, user_cache
from iterand.inference.c.emitter import Source, emit
from iterand.inference.graph import FoldedModule, trace
from iterand.inference.models import copied
from iterand.inference.nodes import Graph
from iterand.inference.quantization import Activations, calibrate, check_difference, check_sample, difference_of_bytes
from iterand.surgery import unwrap
from iterand.ticket import Ticket, load_ticket
from iterand.ticket.load import load

logger = logging.getLogger("iterand")

Array = TypeVar("Array", NDArray[np.float32], Tensor)

FLAGS = ("-std=c99", "-O3", "-ffp-contract=off", "-fPIC", "-shared")
NATIVE = "-march=native"
_COMPILERS = ("cc", "gcc", "clang")
_SECONDS = 600
_DIMENSIONS = "an input of a network in C has one to three dimensions, such as (3, 32, 32)"
_TRACING = threading.Lock()  # torch.export has global state
_ALIGNMENT = 64  # bytes: a cache line


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
    return Library(_cached_library(source, compiler), source)


class Library:
    """A network that is loaded from a shared library."""

    def __init__(self, path: Path, source: Source) -> None:
        self._inputs, self._outputs, self._arena = source.inputs, source.outputs, source.arena
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise IterandError(
                f"cannot load the network: {error}; set XDG_CACHE_HOME and TMPDIR to folders whose files may be "
                "executed"
            ) from None
        self._function = library.network_run_batch
        self._function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p]
        self._function.restype = None
        self._arenas: list[tuple[NDArray[np.uint8], int]] = []
        if source.weights:
            arena = np.empty(self._arena // 4, np.uint32)
            if library.network_init(ctypes.c_void_p(arena.ctypes.data)):
                raise IterandError("the network cannot decode its weights; export the ticket again")

    def __call__(self, batch: NDArray[np.float32], threads: int) -> NDArray[np.float32]:
        """The outputs of a batch, one row each."""
        outputs = np.empty((len(batch), self._outputs), np.float32)
        parts = min(threads, len(batch))
        if parts <= 1:
            self._run(batch, outputs)
            return outputs
        with ThreadPoolExecutor(parts) as pool:
            list(pool.map(self._run, np.array_split(batch, parts), np.array_split(outputs, parts)))
        return outputs

    def _run(self, batch: NDArray[np.float32], outputs: NDArray[np.float32]) -> None:
        try:
            arena, place = self._arenas.pop()  # atomic: each thread has its own
        except IndexError:
            arena = np.zeros(self._arena + _ALIGNMENT, np.uint8)
            place = -(-arena.ctypes.data // _ALIGNMENT) * _ALIGNMENT
        self._function(batch.ctypes.data, outputs.ctypes.data, len(batch), place)
        self._arenas.append((arena, place))


# The compiler and the cache.


def find_compiler() -> list[str] | None:
    """The command of the C compiler."""
    if chosen := os.environ.get("CC"):
        try:
            command = shlex.split(chosen)
        except ValueError:  # a quote that is not closed
            command = []
        if command and (found := shutil.which(command[0])):
            return [str(Path(found).absolute()), *command[1:]]  # the build runs in another folder
        raise IterandError(f"CC is {chosen!r}, which is not found; set it to a C compiler such as gcc, or unset it")
    found = next(filter(None, map(shutil.which, _COMPILERS)), None)
    return [found] if found else None


def build(source: Source, compiler: Sequence[str], folder: Path) -> Path:
    """Build a library in a folder."""
    try:
        (folder / "network.h").write_text(source.header, encoding="utf-8")
        (folder / "network.c").write_text(source.code, encoding="utf-8")
    except OSError as error:
        raise IterandError(
            f"cannot write to the temporary folder {folder}: {error.strerror}; make room, or set TMPDIR to another one"
        ) from None
    command = [*compiler, *FLAGS, NATIVE, "-o", "network.so", "network.c"]
    done = _run_compiler(command, folder)
    if done.returncode and NATIVE in done.stderr:  # not known for this processor
        done = _run_compiler([part for part in command if part != NATIVE], folder)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        reason = next((line for line in lines if "error" in line), lines[0])
        raise IterandError(f"{shlex.join(compiler)} cannot build the network: {reason}")
    if not (folder / "network.so").exists():
        raise IterandError(f"{shlex.join(compiler)} builds nothing; set CC to a C compiler such as gcc, or unset it")
    return folder / "network.so"


def _run_compiler(command: Sequence[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, errors="replace")
    except subprocess.TimeoutExpired:
        raise IterandError(f"{command[0]} needs more than {_SECONDS} s to build the network") from None
    except OSError as error:
        raise IterandError(f"{command[0]} cannot be run: {error.strerror or error}") from None


def _cached_library(source: Source, compiler: Sequence[str]) -> Path:
    """The library of a source, from the cache if it is there.

    The cache is a folder of the user's own, with a file of its SHA-256 beside each library. The name of a library is a
    digest of its source, the compiler and the processor. A file that others could have written, that has changed, or
    that was not built here is built again and never loaded.
    """
    key, cache = _key(source, compiler), _private_cache()
    path = None if cache is None else cache / f"{key}.so"
    if path is not None and _is_intact(path):
        return path
    folder = tempfile.mkdtemp(prefix="iterand-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    built = build(source, compiler, Path(folder))
    if path is None:
        return built
    data = built.read_bytes()
    if _is_intact(path):  # another process was first, and may be about to load its library
        return path
    try:
        for old in (path, _seal(path)):  # with their permissions
            old.unlink(missing_ok=True)
        atomic_write(path, data)
        atomic_write(_seal(path), json.dumps({"sha256": hashlib.sha256(data).hexdigest(), "key": key}).encode())
    except OSError:  # full, or not writable
        return built
    return path if _is_intact(path) else built


def _private_cache() -> Path | None:
    """The folder of the cache; None unless it is made by the user and writable by nobody else."""
    base = user_cache()
    if base is None:
        return None
    try:
        for folder in (base, base / "compiled"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_own(folder):
                return None
    except OSError:
        return None
    return base / "compiled"


def _key(source: Source, compiler: Sequence[str]) -> str:
    version = _run_compiler([*compiler, "--version"], Path(tempfile.gettempdir())).stdout
    parts = [source.header, source.code, *compiler, *FLAGS, version, platform.machine(), _processor()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _processor() -> str:
    """What the processor can do, for homes that several machines share."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


def _seal(path: Path) -> Path:
    return path.with_suffix(".json")


def _is_intact(path: Path) -> bool:
    try:
        sealed = json.loads(_seal(path).read_text(encoding="utf-8"))
        return (
            all(map(_is_own, (path, _seal(path))))
            and sealed == {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "key": path.stem}
        )  # fmt: skip
    except (OSError, ValueError):
        return False


def _is_own(path: Path) -> bool:
    """Whether a file or folder, which must not be a link, belongs to the user and nobody else can write it."""
    found = path.lstat()
    mine = not hasattr(os, "getuid") or found.st_uid == os.getuid()
    return mine and not stat.S_ISLNK(found.st_mode) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
