"""A network in C as a shared library: built by the system's compiler, kept in a cache, loaded and run."""

import atexit
import ctypes
import hashlib
import json
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from iterand.errors import IterandError
from iterand.files import atomic_write, user_cache
from iterand.inference.c.emitter import Source

FLAGS = ("-std=c99", "-O3", "-ffp-contract=off", "-fPIC", "-shared")
NATIVE = "-march=native"
_COMPILERS = ("cc", "gcc", "clang")
_SECONDS = 600
_ALIGNMENT = 64  # bytes: a cache line


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


def cached_library(source: Source, compiler: Sequence[str]) -> Path:
    """The library of a source, from the cache if it is there.

    The cache is a folder of the user's own, with a file of its SHA-256 beside each library. The name of a library is a
    digest of its source, the compiler and the processor. A file that others could have written, that has changed, or
    that was not built here is built again and never loaded.
    """
    key, cache = _key(source, compiler), _private_cache()
    path = None if cache is None else cache / f"{key}.so"
    if path is not None and _is_intact(path):
        return path
    folder = Path(tempfile.mkdtemp(prefix="iterand-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    built = build(source, compiler, folder)
    if path is None or not _store(built, path, key):
        return built
    shutil.rmtree(folder, ignore_errors=True)
    return path


def _store(built: Path, path: Path, key: str) -> bool:
    """Copy a library into the cache; whether the cache has it then."""
    data = built.read_bytes()
    if _is_intact(path):  # another process was first, and may be about to load its library
        return True
    try:
        for old in (path, _seal(path)):  # with their permissions
            old.unlink(missing_ok=True)
        atomic_write(path, data)
        atomic_write(_seal(path), json.dumps({"sha256": hashlib.sha256(data).hexdigest(), "key": key}).encode())
    except OSError:  # full, or not writable
        return False
    return _is_intact(path)


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
