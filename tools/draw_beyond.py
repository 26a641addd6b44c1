"""Draws docs/images/beyond.svg: our recipes over sparsity, from the records, beside the paper's IMP and IteRand.

Run from the repository: python tools/draw_beyond.py
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from tables import cells

from iterand.lab.experiments.experiment import PaperNumber, find_number
from iterand.lab.experiments.paper import OPENLTH, SPARSITIES
from iterand.lab.report.formatting import Summary

TARGET = Path(__file__).parents[1] / "docs" / "images" / "beyond.svg"
BLUE, ORANGE, GRAY, GREEN = "#1c6dd0", "#c2500a", "#8a8f98", "#2b8a3e"


def main() -> None:
    """A panel for each network that the paper prunes by magnitude."""
    mpl.rcParams.update({"svg.hashsalt": "iterand", "svg.fonttype": "none", "font.family": "sans-serif"})
    figure, axes = plt.subplots(1, len(OPENLTH), figsize=(10, 3.4), layout="constrained")
    figure.patch.set_facecolor("white")
    for axis, network in zip(axes, sorted(OPENLTH)):
        panel(axis, network)
    axes[0].set_ylabel("test accuracy (%)")
    axes[0].legend(frameon=False, loc="lower left")
    TARGET.parent.mkdir(exist_ok=True)
    figure.savefig(TARGET, metadata={"Date": None})


def panel(axis: Axes, network: str) -> None:
    """Lines over the share of pruned weights; the steps between the shares are drawn alike."""
    places = range(len(SPARSITIES))
    ours = cells("best", network=network, method="IteRand")
    for dense in cells("best", network=network, method="dense SGD").values():
        if dense.summary:
            axis.axhline(dense.summary.mean, color=GREEN, linewidth=1, linestyle=":", label="dense SGD, same data")
    summaries = [ours[sparsity,].summary for sparsity in SPARSITIES]
    line(axis, places, summaries, BLUE, "o-", "ours: no weight is ever trained")
    for method, colour, look, label in (
        ("IMP", ORANGE, "s--", "magnitude pruning, trained four times (paper)"),
        ("IteRand (SC)", GRAY, "^--", "IteRand (paper)"),
    ):
        numbers = [find_number("imp", {"network": network, "method": method, "sparsity": p}) for p in SPARSITIES]
        line(axis, places, numbers, colour, look, label)
    axis.set_title(f"{network}, CIFAR-10", fontsize=11)
    axis.set_xticks(places, [f"{sparsity:.0%}" for sparsity in SPARSITIES])
    axis.set_xlabel("of its weights pruned")
    axis.grid(axis="y", color="#e3e6ea", linewidth=0.7)
    axis.spines[["top", "right"]].set_visible(False)


Numbers = Sequence[Summary | PaperNumber | None]


def line(axis: Axes, places: range, numbers: Numbers, colour: str, look: str, label: str) -> None:
    """Means with one standard deviation; the paper's are hollow."""
    known = [(place, number.mean, number.std or 0.0) for place, number in zip(places, numbers) if number]
    where, means, spread = zip(*known)
    face = colour if look.endswith("o-") else "white"
    axis.errorbar(where, means, spread, fmt=look, color=colour, markerfacecolor=face, markersize=5, label=label)


if __name__ == "__main__":
    main()
