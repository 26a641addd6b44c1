"""All test images of CIFAR-10 through compile_ticket: the classes beside torch's, and what int8 activations lose.

python tools/inference_accuracy.py OUT TICKET... [--data-dir DIR]

The record is results/records/benchmarks/inference-accuracy.json.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import iterand
from iterand.lab.data import load_data
from iterand.lab.training import environment

SAMPLE = 512  # validation images from which the ranges of bytes are chosen


def main() -> None:
    """One row for each ticket."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("tickets", type=Path, nargs="+")
    parser.add_argument("--data-dir", type=Path)
    arguments = parser.parse_args()
    rows = [row(path, arguments.data_dir) for path in arguments.tickets]
    described = environment.describe(torch.device("cpu"))
    described["command"] = shlex.join(["python", "tools/inference_accuracy.py", *sys.argv[1:]])
    found = {"environment": described, "sample": SAMPLE, "rows": rows}
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def row(path: Path, data_dir: Path | None) -> dict[str, Any]:
    """Accuracies in percent, and differences to torch in float32."""
    recipe = iterand.read_ticket(path).recipe or {}
    normalization = recipe["data"]["normalization"]
    data = load_data("cifar10", torch.device("cpu"), data_dir, normalization=normalization)
    (images,), labels = batch(data.test, len(data.test))
    (sample,), _ = batch(data.validation, SAMPLE)
    model = iterand.load_ticket(path).eval()
    with torch.no_grad():
        expected = torch.cat([model(part) for part in torch.split(images, 500)]).numpy()
    inputs, answers = images.numpy(), labels.numpy()
    floats = iterand.compile_ticket(path)(inputs)
    bytes_ = iterand.compile_ticket(path, activations="int8", sample=sample)(inputs)
    found = {
        "ticket": path.name, "images": len(inputs),
        "torch": accuracy(expected, answers), "float32": accuracy(floats, answers), "int8": accuracy(bytes_, answers),
        "float32_other_classes": int((floats.argmax(1) != expected.argmax(1)).sum()),
        "int8_other_classes": int((bytes_.argmax(1) != expected.argmax(1)).sum()),
        "float32_difference": float(np.abs(floats - expected).max() / np.abs(expected).max()),
        "int8_difference": float(np.abs(bytes_ - expected).max() / np.abs(expected).max()),
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    return found


def batch(split: Any, count: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """The first examples of a split."""
    found = next(iter(split.batches(torch.arange(count), count)))
    return found.inputs, found.labels


def accuracy(outputs: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
    """Right answers in percent."""
    return 100 * float((outputs.argmax(1) == labels).mean())


if __name__ == "__main__":
    main()
