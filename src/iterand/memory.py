"""How much memory there is, asked before it is taken.

Where the system promises more memory than it has, an allocation that is too large does not fail: the process is killed
once it touches the memory. So whatever takes its size from a setting or a file is compared with what there is first.
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

_CGROUPS = {  # version: folder, limit, use, and what the entries of memory.stat begin with
    2: ("sys/fs/cgroup", "memory.max", "memory.current", ""),
    1: ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}
_EXHAUSTED = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")


def require(needed: float, what: str, hint: str, device: "torch.device | None" = None) -> None:
    """Refuse ``what`` if it takes more bytes than are free on the device; ``hint`` is the way out.

    ``needed`` should be a lower bound, so that nothing is refused that would work.
    """
    free = available(device)
    if free is not None and needed > free:
        where = "" if device is None or device.type == "cpu" else f" on {device}"
        raise NotEnoughMemoryError(
            f"{what} takes at least {amount(needed)} of memory, but {amount(free)} are free{where}; {hint}"
        )


def available(device: "torch.device | None" = None) -> int | None:
    """The bytes that are free on a device, by default in the main memory; None where the system does not say."""
    if device is not None and device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        # Memory that torch holds back for later is free to this process.
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return main_memory()


def main_memory(root: Path = Path("/")) -> int | None:
    """The bytes of main memory this process can still get: of the machine, its control groups and its own limit."""
    meminfo = _entries(root / "proc/meminfo")
    if "MemAvailable:" in meminfo:
        swap = 1024 * meminfo.get("SwapFree:", 0)
        found = [1024 * meminfo["MemAvailable:"] + swap, *(room + swap for room in _cgroup_rooms(root))]
    else:
        found = _physical_memory()
    found += _address_space(root)
    return max(0, min(found)) if found else None


def amount(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB", "EB"):
        if count < 999.5 or unit == "EB":
            return f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError


@contextlib.contextmanager
def exhaustion_explained(hint: str) -> Iterator[None]:
    """Turn any error by which Python, torch or CUDA say that memory ran out into a sentence."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in _EXHAUSTED):
            raise
        asked = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        more = f", {asked[1]} more were asked for" if asked else ""
        place = "on the GPU" if "CUDA" in str(error) else "on this machine"
        raise NotEnoughMemoryError(f"there is not enough memory {place}{more}; {hint}") from error


def _entries(path: Path) -> dict[str, int]:
    """Lines of a name and a whole number, as the kernel writes them."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except (OSError, ValueError):
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}


def _cgroup_rooms(root: Path) -> list[int]:
    """What each control group around this process leaves it; memory that caches files can be had back."""
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
        # A container may see its own group as the root, though it is told the name it has outside.
        inner = Path(path.lstrip("/"))
        for folder in {root / base / part for part in (inner, *inner.parents)}:
            limit, use = _whole(folder / limit_name), _whole(folder / use_name)
            if limit is not None and use is not None:
                kinds = _entries(folder / "memory.stat")
                cached = sum(kinds.get(f"{prefix}{kind}", 0) for kind in ("active_file", "inactive_file"))
                found.append(limit - use + cached)
    return found


def _whole(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such group, or no limit: "max"
        return None


def _physical_memory() -> list[int]:
    """All the memory there is, where the system does not say what of it is free."""
    if sys.platform != "win32" and {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= os.sysconf_names.keys():
        pages = os.sysconf("SC_PHYS_PAGES")
        return [pages * os.sysconf("SC_PAGE_SIZE")] if pages > 0 else []
    return []  # Windows refuses an allocation that is too large


def _address_space(root: Path) -> list[int]:
    """What the limit on this process leaves it (``ulimit -v``)."""
    if sys.platform != "win32":
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            with contextlib.suppress(OSError, ValueError, IndexError):
                pages = int((root / "proc/self/statm").read_text().split()[0])
                return [limit - pages * resource.getpagesize()]
            return [limit]
    return []
