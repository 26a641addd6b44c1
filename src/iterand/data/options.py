"""What a run may choose about its data."""

from dataclasses import dataclass

from iterand.data.normalization import NORMALIZATIONS as STATISTICS

AUGMENTATIONS = ("none", "crop", "crop_cutout", "resized_crop")
NORMALIZATIONS = ("default", *STATISTICS)


@dataclass(frozen=True)
class Options:
    """How training examples are augmented, how inputs are normalised, and how many examples of each part are used.

    ``workers`` is how many processes decode images; 0 is none but threads, and None leaves the choice to the loader.
    """

    augmentation: str = "none"
    normalization: str = "default"
    limit: int | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and (type(self.limit) is not int or self.limit < 1):
            raise ValueError(f"limit is {self.limit!r}; it is how many examples of each part to use, at least 1")
        if self.workers is not None and (type(self.workers) is not int or self.workers < 0):
            raise ValueError(f"workers is {self.workers!r}; it is a number of processes, or 0 for threads")

    def fit(self, name: str, augmentations: tuple[str, ...], normalizations: tuple[str, ...]) -> None:
        """Refuse what the data set of this name cannot do."""
        known = {"augmentation": augmentations, "normalization": normalizations}
        for key, choices in known.items():
            if getattr(self, key) not in choices:
                raise ValueError(f"{key} is {getattr(self, key)!r}; {name} knows {', '.join(choices)}")
