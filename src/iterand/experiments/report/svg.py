"""Plots as SVG that takes its colours and fonts from the page around it: light, dark or printed."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# matplotlib wants colours as numbers. These stand for the page's colours and are exchanged for them at the end.
INK, MUTED, GRID, SURFACE = "#000001", "#000002", "#000003", "#000004"
_HUES, _SHADES = 8, 2
_SERIES = {(hue, shade): f"#0000{hue}{shade}" for hue in range(1, _HUES + 1) for shade in range(1, _SHADES + 1)}
_NAMES = {INK: "ink", MUTED: "muted", GRID: "grid", SURFACE: "surface"} | {
    colour: f"series-{hue}-{shade}" for (hue, shade), colour in _SERIES.items()
}
_MARKERS = {"circle": "o", "square": "s", "triangle": "^", "diamond": "D", "tip": "v"}
_METHODS = ("IteRand", "edge-popup", "SGD", "IMP")
"""These have the same hue in every report; a series without a name is IteRand's, whose settings are varied."""

_SETTINGS: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar sign in a recipe's name is a dollar sign
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.labelsize": 9.5,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "lines.linewidth": 1.7,
    "lines.markersize": 5,
    "lines.markeredgewidth": 1.2,
    "errorbar.capsize": 0,
}


@dataclass(frozen=True)
class Style:
    """How a series looks, in the plots and in their legend."""

    colour: str
    marker: str

    @property
    def marker_code(self) -> str:
        """matplotlib's name of the marker."""
        return _MARKERS[self.marker]

    @property
    def variable(self) -> str:
        """The page's name of the colour."""
        return _NAMES[self.colour]


class Styles:
    """A style for each name, the same in every figure of a page: the hue tells the method, the shade its variant."""

    def __init__(self) -> None:
        self._hues = {name: number for number, name in enumerate(_METHODS)} | {"": 0}
        self._variants: dict[str, list[str]] = {}

    def __getitem__(self, name: str) -> Style:
        method, *variant = re.split(r", | \(", name, maxsplit=1)  # "IteRand, SC" and "IteRand (SC)"
        hue = self._hues.setdefault(method, len(self._hues) - 1)
        known = self._variants.setdefault(method, [])
        known += [entry for entry in variant if entry not in known]
        number = known.index(variant[0]) if variant else 0
        marker = list(_MARKERS)[(hue + len(_METHODS) * number) % len(_MARKERS)]
        return Style(_SERIES[hue % _HUES + 1, number % _SHADES + 1], marker)


def render(draw: Callable[[Axes], None], *, key: str, title: str, height: float = 3.0) -> str:
    """Draw on fresh axes and give the SVG; ``key`` keeps its names apart from those of the page's other plots."""
    with matplotlib.rc_context(_SETTINGS | {"svg.hashsalt": key}):
        figure = Figure(figsize=(4.4, height), layout="constrained")
        draw(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _themed(buffer.getvalue(), title)


def _themed(svg: str, title: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' font-family: [^;"]*;?', "", svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r"\s*\n\s*", " ", svg)
    for colour, name in _NAMES.items():
        svg = svg.replace(colour, f"var(--{name})")
    box = re.search(r'viewBox="([^"]*)"', svg)
    assert box is not None
    label = escape(title)
    opening = f'<svg viewBox="{box[1]}" role="img" aria-label="{label}"><title>{label}</title>'
    return re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1).strip()
