"""Results that take long to make, kept in a file beside the data, or with the user where that is not allowed."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from iterand.files import atomic_write

Value = TypeVar("Value")


def cached(
    root: Path,
    name: str,
    make: Callable[[], Value],
    dump: Callable[[Value], bytes],
    parse: Callable[[bytes], Value],
) -> Value:
    """What ``make`` gives, from the cache if it is there and can be parsed.

    The name must hold a digest of everything the value depends on, so that a cache is never out of date.
    """
    places = [folder / name for folder in (root / "cache", _user_cache())]
    for path in places:
        with contextlib.suppress(OSError, ValueError):
            return parse(path.read_bytes())
    value = make()
    for path in places:
        with contextlib.suppress(OSError):
            atomic_write(path, dump(value))
            break
    return value


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "iterand"
