"""Numbers and names that come from a user, checked: the wrong value, the rule, in one sentence."""

import difflib
import numbers
import reprlib
from collections.abc import Iterable
from typing import Any

_SHORTENED = reprlib.Repr()
_SHORTENED.maxstring = _SHORTENED.maxlong = _SHORTENED.maxother = 100
_SHORTENED.maxlist = _SHORTENED.maxtuple = _SHORTENED.maxdict = 20


def shown(value: Any) -> str:
    """A value as a sentence names it: as Python writes it, with the middle left out where that is long."""
    try:
        return _SHORTENED.repr(value)
    except ValueError:
        return "a whole number of thousands of digits"  # which Python refuses to write


def is_text(value: str) -> bool:
    """Whether UTF-8 can hold it; what Python makes of a name that is no text is not."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_int(name: str, value: Any, rule: str, *, low: int, high: int | None = None) -> int:
    """The value as an int, if it is a whole number of at least ``low`` and, where given, below ``high``."""
    number = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not number or value < low or (high is not None and value >= high):
        raise ValueError(f"{name} is {value!r}; it is {rule}")
    return int(value)


def check_fraction(name: str, value: Any, rule: str) -> float:
    """The value as a float, if it is a number from 0 to 1."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not 0 <= value <= 1:
        raise ValueError(f"{name} is {value!r}; it is {rule}, from 0 to 1")
    return float(value)


def unknown(what: str, name: Any, known: Iterable[str]) -> str:
    """What to say of a name that is none of these: the one that was meant, or all there are."""
    names = list(known)
    close = difflib.get_close_matches(str(name), names, n=1)
    return f"unknown {what} {shown(name)}; " + (
        f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"
    )
