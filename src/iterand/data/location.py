"""Where data lies."""

import os
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "ITERAND_DATA"


@dataclass(frozen=True)
class Located:
    """A data set that is there: in which folder of data sets, as what folder or file, in which of its layouts."""

    root: Path
    path: Path
    layout: str


def data_folder(given: Path | None = None) -> Path:
    """The folder of all data sets: the given one, else $ITERAND_DATA, else ``data`` in the working folder."""
    return given if given is not None else Path(os.environ.get(VARIABLE) or "data")


def first_there(root: Path, name: str, layouts: dict[str, str]) -> Located | None:
    """The first of the paths (with their layouts) that exists in ``root`` or in its subfolder ``name``."""
    for folder in (root, root / name):
        for path, layout in layouts.items():
            if (folder / path).exists():
                return Located(root, folder / path, layout)
    return None
