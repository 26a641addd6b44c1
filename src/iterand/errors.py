"""What can go wrong outside the caller's control: one root, a few leaves."""


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
