"""Where data sets come from."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from iterand.errors import DataError


@dataclass(frozen=True)
class Archive:
    """A published file and its MD5 checksum."""

    url: str
    md5: str

    @property
    def name(self) -> str:
        """What the file is called."""
        return PurePosixPath(self.url).name


ARCHIVES = {
    "cifar10": Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
    ),
    "imdb": Archive(
        "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
        "7c2ac02c03563afcf9b574c7e56c153a",
    ),
}

BY_HAND = {
    "imagenet": "ILSVRC2012 is given to registered users of https://image-net.org only; unpack its images into {folder}"
    "/train/CLASS/ and {folder}/val/CLASS/",
    "digits": "it comes with scikit-learn: pip install 'iterand[lab]'",
}


def missing(name: str, root: Path) -> DataError:
    """The error for a data set that is not there: what to do."""
    if name in ARCHIVES:
        return DataError(
            f"{name} is not in {root}; bring it with 'iterand data fetch {name} --data-dir {root}', or download "
            f"{ARCHIVES[name].url} and put the file there as it is"
        )
    return DataError(f"{name} is not in {root}; {by_hand(name, root)}")


def by_hand(name: str, root: Path) -> str:
    """How to get what cannot be fetched."""
    return BY_HAND[name].format(folder=root / name)
