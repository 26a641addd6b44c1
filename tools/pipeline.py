"""Images a second of the ImageNet pipeline, alone and in training, beside a bare loop that decodes.

    python tools/pipeline.py [--tree DIR] [--workers N ...] [--device cpu|cuda] [--json FILE]

DIR holds ``train`` and ``val``; without it images are made up. Its images are measured as they are, and enlarged to
500×375, the usual size of ImageNet's; for training, links to them make an epoch long. Each figure is the best of some
rounds, after the first batch; the rounds of all figures take turns, since other processes come and go. On a machine
that others use too, go by the images for each second of processor time, all processes counted.
"""

import argparse
import io
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from PIL import Image

from iterand import philox
from iterand.lab.data import catalog, load_data
from iterand.lab.data.decoding import Task, decode
from iterand.lab.data.imagenet import open_tree
from iterand.lab.data.images import words_of
from iterand.lab.data.packs import Scaling
from iterand.lab.data.workers import decoded, processors
from iterand.lab.experiments.library import find_recipe
from iterand.lab.training import recipe_file
from iterand.lab.training.environment import describe
from iterand.lab.training.folder import RunFolder
from iterand.lab.training.loop import NullObserver
from iterand.lab.training.run import run
from iterand.lab.training.steps import Execution

LARGE, QUALITY = (500, 375), 95


def seeded(index: torch.Tensor) -> Any:
    """Random words, as a run has them."""
    return philox.philox(index, 0, philox.key(0, "augmentation"), philox.DATA)


def made_up(folder: Path, images: int) -> Path:
    """A tree of smooth noise in two classes."""
    random = np.random.default_rng(0)
    for part, number in itertools.product(("train", "val"), range(images)):
        path = folder / part / f"n{number % 2}" / f"{number}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = Image.fromarray(random.integers(0, 256, (112, 112, 3), np.uint8))
        noise.resize((224, 224), Image.Resampling.BICUBIC).save(path)
    return folder


def enlarged(tree: Path, folder: Path) -> Path:
    """Some images of every class of the tree, as large as ImageNet's."""
    for part, count in (("train", 200), ("val", 50)):
        files = sorted((tree / part).glob("*/*"))
        for number, file in enumerate(files[:: max(1, len(files) // count)]):
            content = io.BytesIO()
            with Image.open(file) as image:
                image.convert("RGB").resize(LARGE, Image.Resampling.BICUBIC).save(content, "JPEG", quality=QUALITY)
            path = folder / part / file.parent.name / f"{number}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.getvalue())
    return folder


def lengthened(tree: Path, images: int) -> Path:
    """The tree with links to its training images until there are so many."""
    files = sorted((tree / "train").glob("*/*"))
    for path, copy in itertools.product(files, range(images // len(files))):
        path.with_name(f"{path.stem}-{copy}.JPEG").hardlink_to(path)
    return tree


@dataclass(frozen=True)
class Figure:
    """What is measured: gives how many images each batch has."""

    tree: str
    reader: str
    decoder: str
    batches: Callable[[], Iterator[int]]


def bare(folder: Path) -> Iterator[int]:
    """A loop that reads a file and decodes it, one after the other."""
    files = sorted((folder / "train").glob("*/*.JPEG"))
    words = words_of(torch.arange(len(files)), seeded).tolist()
    for path, word in itertools.cycle(zip(files, words)):
        decode(path.read_bytes(), word)
        yield 1


def pipeline(folder: Path, workers: int, size: int) -> Iterator[int]:
    """Batches of bytes, as they are before they go to the device; 0 workers are threads."""
    images = open_tree(folder)[0]
    order = philox.permutation(len(images.files), philox.key(0, "data order"), 0)
    groups = torch.split(order, size)
    tasks = (Task(images.contents(index), words_of(index, seeded).numpy()) for index in itertools.cycle(groups))
    for pixels, _ in decoded(tasks, size=size, images=1 << 40, workers=workers):
        yield len(pixels)


def on_device(folder: Path, workers: int, size: int, device: torch.device) -> Iterator[int]:
    """Batches as a network gets them: on the device, normalised."""
    train = load_data("imagenet", device, folder, augmentation="resized_crop", workers=workers).train
    while True:
        for batch in train.batches(torch.arange(len(train)), size, seeded):
            if device.type == "cuda":
                torch.cuda.synchronize()
            yield len(batch.labels)


def measure(figure: Figure, seconds: float) -> dict[str, float]:
    """Images a second; processor time an image in this process, and in it and its workers together."""
    batches = figure.batches()
    next(batches)
    images, start, own, all_used = 0, time.perf_counter(), time.process_time(), processor_seconds()
    while time.perf_counter() - start < seconds:
        images += next(batches)
    passed, own, all_used = time.perf_counter() - start, time.process_time() - own, processor_seconds() - all_used
    batches.close()  # type: ignore[attr-defined]
    return {
        "images_per_second": images / passed,
        "own_microseconds_per_image": 1e6 * own / images,
        "images_per_second_of_one_processor": images / all_used,
    }


def processor_seconds() -> float:
    """Time that this process and those it has started were given; Linux counts in hundredths of a second."""
    ticks = 0
    for pid in ("self", *Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def training(folder: Path, device: torch.device, workers: int, size: int, seconds: float) -> dict[str, Any]:
    """Images a second of the recipe, from the second step on."""
    seen: list[tuple[float, int]] = []

    class Enough(Exception):
        pass

    class Watch(NullObserver):
        def step(self, session: Any) -> None:
            if device.type == "cuda":
                torch.cuda.synchronize()
            seen.append((time.perf_counter(), session.seen))
            if session.step == session.steps_per_epoch or (len(seen) > 2 and seen[-1][0] - seen[1][0] > seconds):
                raise Enough

    recipe = recipe_file.override(find_recipe("imagenet-resnet18"), [f"batch_size={size}", "precision=float32"])
    if device.type == "cuda":
        recipe = replace(recipe, training=replace(recipe.training, precision="bfloat16"))
    os.environ["ITERAND_WORKERS"] = str(workers)
    with tempfile.TemporaryDirectory() as out:
        try:
            options = {"device": device, "data_dir": folder, "observer": Watch(), "execution": Execution(compile=False)}
            run(recipe, RunFolder(Path(out)), **options)
        except Enough:
            pass
    (start, before), (end, after) = seen[1], seen[-1]
    rate = (after - before) / (end - start)
    return {"recipe": recipe.name, "batch_size": size, "steps": len(seen) - 2, "images_per_second": round(rate, 1)}


def figures(folders: dict[tuple[str, str], Path], counts: list[int], size: int, device: torch.device) -> list[Figure]:
    """Everything that is measured of the pipeline alone."""
    found = []
    for (tree, reader), folder in folders.items():
        if reader == "files":
            found.append(Figure(tree, reader, "a bare loop", lambda folder=folder: bare(folder)))
            threads = f"{processors()} threads"
            found.append(Figure(tree, reader, threads, lambda folder=folder: pipeline(folder, 0, size)))
        for count in counts:
            name = f"{count} process" + ("es" if count > 1 else "")
            work = (lambda folder=folder, count=count: pipeline(folder, count, size),)
            found.append(Figure(tree, reader, name, *work))
        if reader == "files":
            name = f"{counts[-1]} processes, to {device.type}"
            work = (lambda folder=folder: on_device(folder, counts[-1], size, device),)
            found.append(Figure(tree, reader, name, *work))
    return found


def main() -> None:
    """Measure, print a table, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.4, help="of a round")
    parser.add_argument("--workers", type=int, nargs="+", default=sorted({1, 2, processors()}))
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device, size = torch.device(arguments.device), arguments.batch_size
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        tree = arguments.tree or made_up(base / "made-up", 300)
        large = enlarged(tree, base / "large")
        folders = {("as it is", "files"): tree, ("as it is", "pack"): base / "packed"}
        folders |= {("500×375", "files"): large, ("500×375", "pack"): base / "large-packed"}
        folders |= {("500×375", "pack, short side 256"): base / "large-scaled"}
        sizes = {}
        for (name, reader), folder in folders.items():
            if reader != "files":
                pack(folders[name, "files"], folder, Scaling(256) if "256" in reader else None)
                sizes[f"{name}, {reader}"] = (folder / "train.pack").stat().st_size
        wanted = figures(folders, arguments.workers, size, device)
        rounds = [[measure(figure, arguments.seconds) for figure in wanted] for _ in range(arguments.rounds)]
        record: dict[str, Any] = {
            **describe(device),
            "pillow": PIL.__version__,
            "load_average": os.getloadavg()[0],
            "command": command(arguments),
            "batch_size": size,
            "pack_bytes": sizes,
            "pipeline": [summary(figure, results) for figure, results in zip(wanted, zip(*rounds))],
        }
        if not arguments.no_training:
            small, images = (128, 20_000) if device.type == "cuda" else (8, 600)
            workers, seconds = arguments.workers[-1], 10 * arguments.seconds
            record["training"] = training(lengthened(large, images), device, workers, small, seconds)
            print(json.dumps(record["training"]))
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def pack(tree: Path, folder: Path, scaling: Scaling | None) -> None:
    """Packs of a tree, in a folder of their own."""
    folder.mkdir()
    for part in ("train", "val"):
        (folder / part).symlink_to((tree / part).resolve())
    catalog.pack("imagenet", folder, scaling, lambda done, total: None)
    for part in ("train", "val"):
        (folder / part).unlink()


def summary(figure: Figure, results: tuple[dict[str, float], ...]) -> dict[str, Any]:
    """The best round, printed and for the record."""
    best = max(results, key=lambda result: result["images_per_second"])
    per_processor = max(result["images_per_second_of_one_processor"] for result in results)
    best["images_per_second_of_one_processor"] = per_processor
    told = (
        "{images_per_second:8.0f} images/s {images_per_second_of_one_processor:8.0f} a processor "
        "{own_microseconds_per_image:6.0f} µs of the main process"
    ).format(**best)
    print(f"{figure.tree:9} {figure.reader:21} {figure.decoder:24} {told}", flush=True)
    return {
        "images": figure.tree,
        "from": figure.reader,
        "by": figure.decoder,
        **{key: round(value, 1) for key, value in best.items()},
        "rounds": [round(result["images_per_second"]) for result in results],
    }


def command(arguments: argparse.Namespace) -> str:
    """The command without its folders, which are nobody's business."""
    tree = "--tree DIR " if arguments.tree else ""
    workers = " ".join(map(str, arguments.workers))
    rounds = f"--rounds {arguments.rounds} --seconds {arguments.seconds}"
    return f"python tools/pipeline.py {tree}{rounds} --batch-size {arguments.batch_size} --workers {workers}"


if __name__ == "__main__":
    main()
