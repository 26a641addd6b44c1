"""What can go wrong outside the caller's control: one root, a few leaves."""

from collections.abc import Iterator
from contextlib import contextmanager

_ON_PYPI = {"PIL": "pillow", "sklearn": "scikit-learn", "tomli_w": "tomli-w"}  # packages with another name there


class IterandError(Exception):
    """The root: something from outside (a file, a folder, a setting on disk) is not as it must be."""


class RecipeError(IterandError):
    """A recipe, or an override of one, that cannot be used."""


class DataError(IterandError):
    """Data that is missing, damaged or not what it claims to be."""


class CheckpointError(IterandError):
    """A checkpoint that cannot be read, or belongs to other settings."""


class TicketError(IterandError):
    """A ticket that cannot be read, or does not fit the model."""


class NotEnoughMemoryError(IterandError):
    """More memory is needed than there is."""


class MissingExtraError(IterandError):
    """An optional dependency that is not installed."""

    def __init__(self, package: str, purpose: str, extra: str) -> None:
        super().__init__(f"{purpose} needs {package}, which is not installed; pip install 'iterand[{extra}]'")


@contextmanager
def extra(name: str, purpose: str) -> Iterator[None]:
    """Import optional packages in this block: if one is missing, the error says what it is for and how to install it.

    Args:
        name: The extra of ``iterand`` that the packages belong to.
        purpose: What they are for, the subject of a sentence.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "iterand"):
            raise
        raise MissingExtraError(_ON_PYPI.get(package, package), purpose, name) from error
