"""Free memory of the host and of CUDA devices, checked before large allocations.

With memory overcommit, an allocation that is too large does not fail: the kernel kills the process once it touches the
memory. So sizes that come from a setting or a file are compared with the free memory first.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from iterand.errors import NotEnoughMemoryError

if TYPE_CHECKING:
    import torch

_CGROUPS = {  # version: folder, files of limit and usage, prefix of the entries of memory.stat
    2: ("sys/fs/cgroup", "memory.max", "memory.current", ""),
    1: ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}
_MUCH = 0.2  # share of a GPU's memory; some is of this process, but not torch's
_EXHAUSTED = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")


def require(needed: float, what: str, hint: str, device: "torch.device | None" = None) -> None:
    """Raise NotEnoughMemoryError if ``what`` needs more bytes than are free on the device.

    ``needed`` should be a lower bound, so that nothing that would work is refused. ``hint`` ends the error message.
    """
    free = available(device)
    if free is not None and needed > free:
        where = "" if device is None or device.type == "cpu" else f" on {device}"
        raise NotEnoughMemoryError(
            f"{what} takes at least {amount(needed)} of memory, but {amount(free)} are free{where}; {hint}"
        )


def available(device: "torch.device | None" = None) -> int | None:
    """Free bytes on a device, by default of the host. None if unknown."""
    if device is not None and device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        # Memory cached by torch's allocator is free for this process.
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return main_memory()


def main_memory(root: Path = Path("/")) -> int | None:
    """Free bytes of host memory: the minimum over the machine, the cgroups and ``ulimit -v``. None if unknown."""
    meminfo = _entries(root / "proc/meminfo")
    if "MemAvailable:" in meminfo:
        swap = 1024 * meminfo.get("SwapFree:", 0)
        found = [1024 * meminfo["MemAvailable:"] + swap, *(free + swap for free in _cgroup_free(root))]
    else:
        found = _physical_memory()
    found += _address_space(root)
    return max(0, min(found)) if found else None


def amount(count: float) -> str:
    """A number of bytes, human-readable."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB", "EB"):
        if count < 999.5 or unit == "EB":
            return f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError


@contextlib.contextmanager
def exhaustion_explained(hint: str) -> Iterator[None]:
    """Turn out-of-memory errors of Python, torch and CUDA into NotEnoughMemoryError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in _EXHAUSTED):
            raise
        asked = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        more = f", {asked[1]} more were asked for" if asked else ""
        where = f"on the GPU{_taken_by_others(str(error))}" if "CUDA" in str(error) else "on this machine"
        raise NotEnoughMemoryError(f"there is not enough memory {where}{more}; {hint}") from error


def _taken_by_others(message: str) -> str:
    """What other processes have of the GPU's memory, if it is much."""
    import torch

    number = re.search(r"GPU (\d+) has", message)
    device = int(number[1]) if number else None
    try:
        free, total = torch.cuda.mem_get_info(device)
        taken = total - free - torch.cuda.memory_reserved(device)
    except (AssertionError, RuntimeError):  # no CUDA in this torch, or the device no longer answers
        return ""
    return f", of whose {amount(total)} other processes have {amount(taken)}" if taken > _MUCH * total else ""


def _entries(path: Path) -> dict[str, int]:
    """Parse a file of lines "name integer", such as /proc/meminfo."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except (OSError, ValueError):
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}


def _cgroup_free(root: Path) -> list[int]:
    """Free bytes in each cgroup of this process. The page cache counts as free."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, ValueError):
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, limit_name, use_name, prefix = _CGROUPS[1 if controllers else 2]
        # In a container the cgroup may be mounted as the root, though its path is the one outside.
        inner = Path(path.lstrip("/"))
        for folder in {root / base / part for part in (inner, *inner.parents)}:
            limit, use = _read_int(folder / limit_name), _read_int(folder / use_name)
            if limit is not None and use is not None:
                kinds = _entries(folder / "memory.stat")
                cached = sum(kinds.get(f"{prefix}{kind}", 0) for kind in ("active_file", "inactive_file"))
                found.append(limit - use + cached)
    return found


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such cgroup, or no limit ("max")
        return None


def _physical_memory() -> list[int]:
    """Total memory, for systems that do not report free memory."""
    if sys.platform != "win32" and {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= os.sysconf_names.keys():
        pages = os.sysconf("SC_PHYS_PAGES")
        return [pages * os.sysconf("SC_PAGE_SIZE")] if pages > 0 else []
    return []  # on Windows an allocation that is too large fails


def _address_space(root: Path) -> list[int]:
    """Free bytes under the address space limit of this process (``ulimit -v``)."""
    if sys.platform != "win32":
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            with contextlib.suppress(OSError, ValueError, IndexError):
                pages = int((root / "proc/self/statm").read_text().split()[0])
                return [limit - pages * resource.getpagesize()]
            return [limit]
    return []
