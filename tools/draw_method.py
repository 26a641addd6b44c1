"""Draws docs/images/method.svg: one layer through a round of IteRand, with the package's own functions.

Run from the repository: python tools/draw_method.py
"""

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle
from torch import nn

import iterand

TARGET = Path(__file__).parents[1] / "docs" / "images" / "method.svg"
BLUE, GRAY = "#1c6dd0", "#5a606a"


def main() -> None:
    """One 8×8 layer: weights, scores, mask, subnetwork, and the weights after Randomize."""
    layer = iterand.prune_(nn.Linear(8, 8), sparsity=0.6, weights="kaiming_uniform", seed=3)
    state = iterand.masked_layers(layer)["weight"]
    before, scores, mask = state.weight.clone(), state.score.detach().clone(), state.mask
    iterand.randomize_(layer, rate=0.3)
    redrawn = state.draw > 0

    mpl.rcParams.update({"svg.hashsalt": "iterand", "svg.fonttype": "none", "font.family": "sans-serif"})
    figure, axes = plt.subplots(1, 5, figsize=(13, 3.2))
    figure.patch.set_facecolor("white")
    figure.subplots_adjust(left=0.04, right=0.96, top=0.92, bottom=0.2, wspace=0.5)
    limit = float(before.abs().max())
    colours = {"cmap": "RdBu", "vmin": -limit, "vmax": limit}
    kept = torch.where(mask, before, torch.nan)
    panel(axes[0], before, "θ  random weights", "drawn once, never trained", **colours)
    panel(axes[1], scores, "s  scores", "the only thing SGD trains", cmap="viridis")
    panel(axes[2], mask.float(), "m  mask", "keeps the top 1 − p of the scores", cmap="Greys", vmin=0, vmax=1.6)
    panel(axes[3], kept, "θ ⊙ m  network", "what computes, forward", **colours)
    panel(axes[4], state.weight, "Randomize(θ, m)", "some pruned weights, redrawn", **colours)
    for row, column in redrawn.nonzero().tolist():
        axes[4].add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=BLUE, linewidth=2))
    for left, right, text in zip(axes, axes[1:], ("", "Calculate\nMask", "", "every\nK_per\nsteps")):
        arrow(figure, left, right, text)
    figure.text(0.5, 0.02, "…and again: the redrawn weights get their chance", ha="center", color=BLUE, fontsize=13)
    TARGET.parent.mkdir(exist_ok=True)
    figure.savefig(TARGET, metadata={"Date": None})


def panel(axis: Axes, values: torch.Tensor, title: str, note: str, **style: object) -> None:
    """One matrix as coloured squares."""
    axis.imshow(values, **style)
    axis.set_title(title, fontsize=14)
    axis.set_xlabel(note, fontsize=12, color=GRAY)
    axis.set_xticks([])
    axis.set_yticks([])
    for spine in axis.spines.values():
        spine.set_color("#d0d4da")


def arrow(figure: plt.Figure, left: Axes, right: Axes, text: str) -> None:
    """An arrow between two panels."""
    a, b = left.get_position(), right.get_position()
    height = (a.y0 + a.y1) / 2
    start, end = (a.x1 + 0.008, height), (b.x0 - 0.008, height)
    figure.add_artist(FancyArrowPatch(start, end, transform=figure.transFigure, arrowstyle="-|>", mutation_scale=14))
    figure.text((start[0] + end[0]) / 2, height + 0.04, text, ha="center", va="bottom", fontsize=11, color=GRAY)


if __name__ == "__main__":
    main()
