"""Draws docs/images/inference.svg: test accuracy over the time of an image and over bytes, from the records.

Run from the repository: python tools/draw_inference.py
"""

import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from measured_tables import INFERENCE_TITLES

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "results" / "records"
TARGET = ROOT / "docs" / "images" / "inference.svg"
BLUE, ORANGE, GRAY, GREEN = "#1c6dd0", "#c2500a", "#8a8f98", "#2b8a3e"
MLPERF_BYTES, MLPERF_ACCURACY = 98_496, 85.0  # the reference network of MLPerf Tiny for these images, int8
DENSE = {"ResNet20": "resnet20", "VGG11": "vgg11"}


def main() -> None:
    """Two panels: microseconds on one core, and bytes of a network."""
    mpl.rcParams.update({"svg.hashsalt": "iterand", "svg.fonttype": "none", "font.family": "sans-serif"})
    figure, (times, sizes) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained", sharey=True)
    figure.patch.set_facecolor("white")
    accuracies = {row["ticket"]: row for row in benchmark("inference-accuracy.json")["rows"]}
    measured = {
        (row["network"], row["runtime"]): row
        for row in benchmark("inference-cpu.json")["benchmarks"]["inference"]["rows"]
        if row["batch"] == row["threads"] == 1
    }
    for network, colour in (("ResNet20", BLUE), ("VGG11", GREEN)):
        names = [name for name, title in INFERENCE_TITLES.items() if title.startswith(network)]
        for runtime, activations, look in (("iterand", "float32", "o--"), ("iterand-int8", "int8", "o-")):
            found = [accuracies[name][activations] for name in names]
            label = f"{network}, {activations}"
            line(times, [1000 * milliseconds(measured[name, runtime]) for name in names], found, look, colour, label)
        tickets = [(ROOT / "results" / "tickets" / name).stat().st_size for name in names]
        line(sizes, tickets, [accuracies[name]["float32"] for name in names], "o-", colour, f"{network}, ticket")
        dense, weights = trained(DENSE[network])
        dense_time = 1000 * milliseconds(measured[names[0], "onnxruntime"])
        for axis, place in ((times, dense_time), (sizes, weights)):
            axis.plot(place, dense, "s", color=ORANGE if network == "ResNet20" else GRAY, label=f"{network}, dense")
    sizes.plot(MLPERF_BYTES, MLPERF_ACCURACY, "k*", markersize=9, label="MLPerf Tiny reference, int8")
    for axis, title in ((times, "microseconds per image, one core"), (sizes, "bytes")):
        axis.set_xscale("log")
        axis.set_xlabel(title)
        axis.grid(color="#e3e6ea", linewidth=0.7)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8, loc="lower right")
    marks = (100, 200, 500, 1000, 2000, 5000)
    times.set_xticks(marks, [f"{mark:,}" for mark in marks])
    times.minorticks_off()
    times.set_ylabel("test accuracy on CIFAR-10 (%)")
    figure.savefig(TARGET, metadata={"Date": None})


def benchmark(name: str) -> Any:
    """A record of a benchmark."""
    return json.loads((RECORDS / "benchmarks" / name).read_text(encoding="utf-8"))


def milliseconds(row: dict[str, Any]) -> float:
    """The median."""
    return float(row["milliseconds"]["median"])


def trained(network: str) -> tuple[float, int]:
    """The accuracy of dense SGD, mean over seeds, and the bytes of its weights in float32."""
    found = [
        json.loads(path.read_text(encoding="utf-8")) for path in (RECORDS / "best").glob(f"best-{network}-sgd-*.json")
    ]
    return statistics.mean(one["result"]["test_accuracy"] for one in found), 4 * found[0]["result"]["weights"]


def line(axis: Axes, x: list[float], y: list[float], look: str, colour: str, label: str) -> None:
    """One network over its sparsities."""
    face = colour if look == "o-" else "white"
    axis.plot(x, y, look, color=colour, markerfacecolor=face, markersize=5, label=label)


if __name__ == "__main__":
    main()
