"""Small data sets in the layouts of the real ones, and what augments and normalizes them."""

import csv
import gzip
import io
import pickle
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from iterand import philox

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # by which images are normalized
CIFAR_FILES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")


def cifar_records(count: int = 20) -> dict[str, np.ndarray]:
    """Rows of one label and 3,072 pixels for each of the six files."""
    random = np.random.RandomState(0)
    rows = random.randint(0, 256, (len(CIFAR_FILES), count, 3073)).astype(np.uint8)
    rows[:, :, 0] %= 10
    return dict(zip(CIFAR_FILES, rows))


def write_cifar_binary(folder: Path, records: dict[str, np.ndarray]) -> Path:
    folder = folder / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name, rows in records.items():
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
    (folder / "batches.meta.txt").write_text("airplane\n")
    return folder


def write_cifar_python(folder: Path, records: dict[str, np.ndarray]) -> Path:
    """As Python 2 wrote it: protocol 2, keys and texts are bytes."""
    folder = folder / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name, rows in records.items():
        values = {
            b"batch_label": b"training batch 1 of 5",
            b"labels": rows[:, 0].tolist(),
            b"data": np.ascontiguousarray(rows[:, 1:]),
            b"filenames": [b"leptodactylus_pentadactylus_s_000004.png"] * len(rows),
        }
        (folder / name).write_bytes(pickle.dumps(values, protocol=2))
    return folder


def pack(folder: Path, archive: Path) -> Path:
    """The folder as a tar, compressed if the name says so."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz" if archive.suffix == ".gz" else "w") as file:
        file.add(folder, arcname=folder.name)
    return archive


def picture(number: int, width: int, height: int) -> Image.Image:
    """A smooth picture whose colours depend on the number."""
    y, x = np.mgrid[:height, :width]
    planes = [(x * (number + 1) // 2) % 256, (y * 2 + 31 * number) % 256, (x + y) % 256]
    return Image.fromarray(np.stack(planes, axis=2).astype(np.uint8))


def jpeg(number: int, width: int = 90, height: int = 70) -> bytes:
    file = io.BytesIO()
    picture(number, width, height).save(file, "JPEG", quality=95)
    return file.getvalue()


def write_imagenet(root: Path, classes: tuple[str, ...] = ("n01", "n02", "n03"), train: int = 40, val: int = 4) -> Path:
    """A tree of class folders; images have different sizes."""
    for part, count in (("train", train), ("val", val)):
        for label, name in enumerate(classes):
            folder = root / "imagenet" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                (folder / f"{number:04}.JPEG").write_bytes(jpeg(40 * label + number, 80 + number, 100 - number))
    return root / "imagenet"


def reviews(part: str, count: int) -> list[tuple[str, int, str]]:
    """Names, labels and texts, sorted by class."""
    words = ["good", "bad", "film", "plot", "it's", "boring", "superb", part]
    rows = []
    for label, name in ((1, "pos"), (0, "neg")):
        for number in range(count // 2):
            text = " ".join(words[(number * 7 + label + k * k) % 8] for k in range(1 + number % 5)) + "!<br />"
            rows.append((f"{name}/{number}_{1 + 8 * label}", label, text))
    return rows


def write_imdb_folder(root: Path, train: int = 40, test: int = 20) -> Path:
    for part, count in (("train", train), ("test", test)):
        for name, _, text in reviews(part, count):
            path = root / "aclImdb" / part / f"{name}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    unlabelled = root / "aclImdb" / "train" / "unsup"
    unlabelled.mkdir()
    (unlabelled / "0_0.txt").write_text("nobody knows")
    return root / "aclImdb"


def write_imdb_csv(root: Path, train: int = 40, test: int = 20) -> Path:
    (root / "imdb").mkdir(parents=True)
    for part, count in (("train", train), ("test", test)):
        text = io.StringIO(newline="")
        rows = csv.writer(text)
        rows.writerow(["id", "label", "rating", "text"])
        rows.writerows((name, label, 5, review) for name, label, review in reviews(part, count))
        (root / "imdb" / f"{part}.csv.gz").write_bytes(gzip.compress(text.getvalue().encode()))
    return root / "imdb"


def write_image_folder(root: Path, parts: dict[str, int], classes: tuple[str, ...] = ("blue", "green", "red")) -> Path:
    """Class folders of small photos, each class in a colour of its own; ``parts`` says how many images a class has.

    The part ``""`` has its class folders in the root.
    """
    random = np.random.RandomState(0)
    for part, count in parts.items():
        for label, name in enumerate(classes):
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.randint(0, 90, (14 + number, 18, 3)).astype(np.uint8)
                pixels[:, :, 2 - label % 3] += 150
                Image.fromarray(pixels).save(folder / f"{number:03}.png")
    return root


def seeded(epoch: int = 0) -> Callable[[Tensor], Sequence[Tensor]]:
    """Random words as the training loop hands them over."""
    key = philox.key(7, "augmentation")
    return lambda index: philox.philox(index, epoch, key, philox.DATA)


def pixels(images: Tensor) -> Tensor:
    """What was normalized."""
    mean, deviation = (255 * torch.tensor(values).view(3, 1, 1) for values in (MEAN, DEVIATION))
    return (images * deviation + mean).round().to(torch.uint8)
