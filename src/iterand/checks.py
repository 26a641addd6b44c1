"""Checks of arguments and settings, with one-sentence error messages."""

import difflib
import numbers
import os
import reprlib
from collections.abc import Iterable
from typing import Any

_SHORTENED = reprlib.Repr()
_SHORTENED.maxstring = _SHORTENED.maxlong = _SHORTENED.maxother = 100
_SHORTENED.maxlist = _SHORTENED.maxtuple = _SHORTENED.maxdict = 20


def shown(value: Any) -> str:
    """``repr`` of a value for an error message, shortened in the middle if long."""
    try:
        return _SHORTENED.repr(value)
    except ValueError:
        return "a whole number of thousands of digits"  # Python limits int to str conversion


def counted(count: int, noun: str) -> str:
    """A number and its noun, such as ``1 layer`` or ``2,000 layers``."""
    return f"{count:,} {noun}" + "s" * (count != 1)


def is_text(value: str) -> bool:
    """Whether a string can be encoded as UTF-8. File names with surrogate escapes cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_path(name: str, value: Any) -> None:
    """Raises ValueError unless the value is a path that is not empty."""
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError(f"{name} is of type {type(value).__name__}; it must be the path of a file")
    if value == "":
        raise ValueError(f"{name} is empty; it must be the path of a file")


def check_int(name: str, value: Any, rule: str, *, low: int, high: int | None = None) -> int:
    """The value as an int. Raises ValueError unless it is an integer with ``low`` ≤ value < ``high``."""
    number = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not number or value < low or (high is not None and value >= high):
        raise ValueError(f"{name} is {shown(value)}; it is {rule}")
    return int(value)


def check_fraction(name: str, value: Any, rule: str) -> float:
    """The value as a float. Raises ValueError unless it is a number from 0 to 1."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not 0 <= value <= 1:
        raise ValueError(f"{name} is {shown(value)}; it is {rule}, from 0 to 1")
    return float(value)


def unknown(what: str, name: Any, known: Iterable[str]) -> str:
    """Error message for an unknown name: suggests the closest known name, or lists all."""
    names = list(known)
    close = difflib.get_close_matches(str(name), names, n=1)
    return f"unknown {what} {shown(name)}; " + (
        f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"
    )
