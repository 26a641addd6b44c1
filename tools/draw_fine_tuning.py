"""Draws docs/images/fine-tuning.svg: test accuracy over the size of a task's file, from the records of fine-tuning.

Run from the repository: python tools/draw_fine_tuning.py
"""

import statistics
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from measured_tables import fine_tuning_runs

TARGET = Path(__file__).parents[1] / "docs" / "images" / "fine-tuning.svg"
BLUE, ORANGE, GRAY = "#1c6dd0", "#c2500a", "#8a8f98"


def main() -> None:
    """Masks as one line, LoRA as another, the others as points."""
    mpl.rcParams.update({"svg.hashsalt": "iterand", "svg.fonttype": "none", "font.family": "sans-serif"})
    figure, axis = plt.subplots(figsize=(7, 3.8), layout="constrained")
    figure.patch.set_facecolor("white")
    lines: dict[str, list[tuple[float, float, float]]] = {"mask": [], "LoRA": []}
    for label, records in fine_tuning_runs("fine-tuning").items():
        accuracies = [record["test_accuracy"] for record in records]
        spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
        point = statistics.mean(record["bytes"] for record in records), statistics.mean(accuracies), spread
        kind = next((kind for kind in lines if label.startswith(kind)), None)
        if kind is not None:
            lines[kind].append(point)
        else:
            axis.errorbar(*point[:2], point[2], fmt="s", color=GRAY, markersize=5)
        short = label.removeprefix("mask, p = ").removeprefix("LoRA, ")
        above = kind == "mask"
        place = "right" if label in ("all weights", "LoRA, rank 2") else "center"
        place = "left" if label in ("only a linear head", "mask, p = 0.3", "LoRA, rank 4") else place
        axis.annotate(
            short, point[:2], xytext=(0, 7 if above else -15), textcoords="offset points", fontsize=9, ha=place
        )
    for (kind, points), colour in zip(lines.items(), (BLUE, ORANGE)):
        if points:
            sizes, means, spreads = zip(*sorted(points))
            axis.errorbar(
                sizes,
                means,
                spreads,
                fmt="o-",
                color=colour,
                markersize=5,
                label="mask, with p" if kind == "mask" else kind,
            )
    axis.set_xscale("log")
    axis.margins(0.08, 0.1)
    axis.set_xlabel("bytes of the file of a task")
    axis.set_ylabel("test accuracy (%)")
    axis.grid(color="#e3e6ea", linewidth=0.7)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="lower right")
    figure.savefig(TARGET, metadata={"Date": None})


if __name__ == "__main__":
    main()
