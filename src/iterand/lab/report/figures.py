"""The figure of an experiment: panels as SVG, a legend, and a caption."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from matplotlib.axes import Axes

from iterand.lab.report import formatting, plots
from iterand.lab.report.assembly import Outcome, measure
from iterand.lab.report.layout import PANEL_AXIS, Panel, Style, Styles, axes, panels, render


@dataclass(frozen=True)
class Picture:
    """One panel."""

    title: str
    svg: str


@dataclass(frozen=True)
class Drawing:
    """A figure for the page."""

    caption: str
    pictures: tuple[Picture, ...]
    legend: tuple[tuple[str, Style], ...]


def draw(outcome: Outcome, styles: Styles) -> Drawing | None:
    """The figure of an experiment that has results; None if its plot is "none"."""
    kind = outcome.experiment.plot
    if kind == "none":
        return None
    if kind not in _KINDS:
        raise ValueError(f"plot is {kind!r}; it must be none, {', '.join(_KINDS)}")
    figure = _KINDS[kind](outcome, styles)
    names = dict.fromkeys(series.name for panel in figure.panels for series in panel.series if series.name)
    legend = tuple((name, styles[name]) for name in names) if figure.coloured else ()
    compared = any(cell.paper for cell in outcome.experiment.cells)
    caption = f"{figure.caption}; {figure.paper}" if figure.paper and compared else figure.caption
    return Drawing(caption, tuple(_pictures(outcome, figure)), legend)


@dataclass(frozen=True)
class _Figure:
    caption: str
    panels: tuple[Panel, ...]
    plots: tuple[tuple[str, Callable[[Axes, Panel], None]], ...]
    """The plots of each panel, each with its title."""
    height: Callable[[Panel], float] = lambda panel: 3.0
    coloured: bool = True
    paper: str = "solid: ours, with one standard deviation; dashed and hollow: the paper's"
    """How the caption explains the paper's numbers."""


def _pictures(outcome: Outcome, figure: _Figure) -> Iterator[Picture]:
    for panel in figure.panels:
        if not any(cell.summary for cell in panel.cells):
            continue
        for what, plot in figure.plots:
            title = ", ".join(filter(None, (panel.title, what)))
            key = f"{outcome.experiment.name} {title}"
            words = f"{title or outcome.experiment.title}: {figure.caption}. {_words(panel)}"

            def plot_panel(axes: Axes, panel: Panel = panel, plot: Callable[[Axes, Panel], None] = plot) -> None:
                plot(axes, panel)

            yield Picture(title, render(plot_panel, key=key, title=words, height=figure.height(panel)))


def _words(panel: Panel) -> str:
    """The results of a panel as text for screen readers."""
    words = []
    for series in panel.series:
        means = [cell.summary.mean for cell in series.cells if cell.summary]
        if means:
            lowest, highest = f"{min(means):.2f}", f"{max(means):.2f}"
            name = series.name or "ours"
            words.append(f"{name} {lowest}" if lowest == highest else f"{name} from {lowest} to {highest}")
    return "; ".join(words) + "."


def _curves_figure(outcome: Outcome, styles: Styles) -> _Figure:
    across, label = outcome.experiment.across, measure(outcome.experiment).title
    return _Figure(
        f"{label} over {formatting.axis(across)}",
        panels(outcome, across),
        (("", lambda axes, panel: plots.curves(axes, panel, styles, across, label)),),
    )


def _sizes_figure(outcome: Outcome, styles: Styles) -> _Figure:
    label = measure(outcome.experiment).title
    return _Figure(
        f"{label} over the number of parameters",
        panels(outcome, PANEL_AXIS),
        (("", lambda axes, panel: plots.sizes(axes, panel, styles, label)),),
    )


def _dots_figure(outcome: Outcome, styles: Styles) -> _Figure:
    across, label = outcome.experiment.across, measure(outcome.experiment).title
    return _Figure(
        f"{label} for each {formatting.axis(across)}" if across else label,
        panels(outcome, across),
        (("", lambda axes, panel: plots.dots(axes, panel, styles, across, label)),),
        height=lambda panel: plots.dots_height(panel, across),
        coloured=bool(across),
        paper="filled: ours, with one standard deviation; hollow: the paper's",
    )  # fmt: skip


def _heat_map_figure(outcome: Outcome, styles: Styles) -> _Figure:
    across = outcome.experiment.across
    up = next(name for name in axes(outcome.experiment) if name not in (across, PANEL_AXIS))
    return _Figure(
        f"{measure(outcome.experiment).title} over {formatting.axis(across)} and {formatting.axis(up)}",
        panels(outcome, across, up),
        (("", lambda axes, panel: plots.heat_map(axes, panel, across, up)),),
        coloured=False,
        paper="in brackets: the paper's",
    )


def _training_figure(outcome: Outcome, styles: Styles) -> _Figure:
    def plot(metric: str, label: str) -> Callable[[Axes, Panel], None]:
        return lambda axes, panel: plots.training(axes, panel, styles, metric, label)

    return _Figure(
        "accuracy over the epochs, mean of the runs with one standard deviation as a band",
        panels(outcome, outcome.experiment.across),
        (
            ("training", plot("train_accuracy", "training accuracy (%)")),
            ("validation", plot("validation_accuracy", "validation accuracy (%)")),
        ),
        paper="",
    )


_KINDS: dict[str, Callable[[Outcome, Styles], _Figure]] = {
    "bars": _dots_figure,
    "curves": _curves_figure,
    "parameters": _sizes_figure,
    "training": _training_figure,
    "heat map": _heat_map_figure,
}
