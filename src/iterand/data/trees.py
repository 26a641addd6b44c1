"""A tree of class folders, each of its parts as files or as a pack of them."""

import warnings
from pathlib import Path

from iterand.data.folders import ClassFolders, Images, same_classes, scan
from iterand.data.packed import open_pack
from iterand.data.packing import Progress, Scaling, header_of, write_pack
from iterand.errors import DataError

PARTS = ("train", "val")


class DataWarning(UserWarning):
    """Something is wrong with the data, but the run can go on."""


def layout(folder: Path) -> str | None:
    """What is in the folder, if both parts are."""
    folders = [part for part in PARTS if (folder / part).is_dir()]
    packs = [part for part in PARTS if _pack(folder, part).is_file()]
    if {*folders, *packs} != {*PARTS}:
        return None
    packed = "packed" if packs == [*PARTS] else f"{''.join(packs)} packed"
    return ", ".join(["class folders"] * bool(folders) + [packed] * bool(packs))


def open_tree(folder: Path) -> tuple[Images, Images]:
    """Images for training and for testing, of the same classes."""
    train, test = (_open(folder, part) for part in PARTS)
    same_classes(train, test)
    return train, test


def pack_tree(folder: Path, scaling: Scaling | None, progress: Progress) -> dict[str, Path]:
    """Write the pack of each part beside it; one that is there and holds the same is left as it is."""
    for part in PARTS:
        if not (folder / part).is_dir():
            raise DataError(f"{folder} has no class folders in {part}; a pack is written from them")
    trees = {part: scan(folder / part) for part in PARTS}
    same_classes(*trees.values())
    total = sum(len(tree.files) for tree in trees.values())
    before = 0

    def advance(images: int, _: int) -> None:
        progress(before + images, total)

    for part, tree in trees.items():
        _write(_pack(folder, part), tree, scaling, advance)
        before += len(tree.files)
        progress(before, total)
    return {part: _pack(folder, part) for part in PARTS}


def _write(path: Path, tree: ClassFolders, scaling: Scaling | None, progress: Progress) -> None:
    header = header_of(tree, scaling)
    try:
        there = path.is_file() and open_pack(path).header == header
    except DataError:
        there = False  # damaged: written anew
    if not there:
        write_pack(path, tree, header, scaling, progress)


def _open(folder: Path, part: str) -> Images:
    """The pack if there is one of the files that are there, else the files."""
    path = _pack(folder, part)
    if not path.is_file():
        return scan(folder / part)
    packed = open_pack(path)
    if (folder / part).is_dir() and (tree := scan(folder / part)).digest() != packed.header.tree:
        warnings.warn(
            f"{path} was written from other files than are in {folder / part} now, and is not used; "
            "'iterand data pack' writes it anew",
            DataWarning,
            stacklevel=4,
        )
        return tree
    if packed.header.short_side:
        warnings.warn(
            f"{path} holds images scaled to a short side of {packed.header.short_side} and compressed again, with "
            "other pixels than the files had; remove it to use those",
            DataWarning,
            stacklevel=4,
        )
    return packed


def _pack(folder: Path, part: str) -> Path:
    return folder / f"{part}.pack"
