"""Exceptions for problems outside the caller's control: files, data, memory, missing packages; a warning; messages."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_ON_PYPI = {"PIL": "pillow", "sklearn": "scikit-learn", "tomli_w": "tomli-w"}  # import name → name on PyPI


class IterandError(Exception):
    """Base class: a file, a folder or another external input is missing or invalid."""


class RecipeError(IterandError):
    """An invalid recipe or override."""


class DataError(IterandError):
    """A dataset that is missing, damaged or inconsistent."""


class CheckpointError(IterandError):
    """A checkpoint that cannot be read, or was written with other settings."""


class TicketError(IterandError):
    """A ticket that cannot be read, or does not fit the model."""


class UnmaskedWarning(UserWarning):
    """Parameters of a model are neither masked nor frozen, although no argument asks for that."""


class NotEnoughMemoryError(IterandError):
    """An operation needs more memory than is free."""


class MissingExtraError(IterandError):
    """An optional dependency that is not installed."""

    def __init__(self, package: str, purpose: str, extra: str) -> None:
        super().__init__(f"{purpose} needs {package}, which is not installed; pip install 'iterand[{extra}]'")


def sentence(error: Exception) -> str:
    """The message of an error; for one of the operating system, the file and the reason."""
    if isinstance(error, OSError) and error.strerror:
        where = f"cannot read or write {os.fsdecode(error.filename)}: " if error.filename else ""
        return f"{where}{error.strerror}"
    return str(error)


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip()


@contextmanager
def extra(name: str, purpose: str) -> Iterator[None]:
    """Import optional packages in this block. If one is missing, MissingExtraError says how to install it.

    Args:
        name: The extra of ``iterand`` that the packages belong to.
        purpose: What they are for; the subject of the error message.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "iterand"):
            raise
        raise MissingExtraError(_ON_PYPI.get(package, package), purpose, name) from error
