"""An experiment's figure: its panels as SVG, the names of its series, and what it shows in words."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from matplotlib.axes import Axes

from iterand.experiments.report import drawing, formatting
from iterand.experiments.report.assembly import Outcome
from iterand.experiments.report.layout import PANEL_AXIS, Panel, axes, panels
from iterand.experiments.report.measures import measure
from iterand.experiments.report.svg import Style, Styles, render


@dataclass(frozen=True)
class Picture:
    """One panel."""

    title: str
    svg: str


@dataclass(frozen=True)
class Drawing:
    """A figure as the page needs it."""

    caption: str
    pictures: tuple[Picture, ...]
    legend: tuple[tuple[str, Style], ...]


def draw(outcome: Outcome, styles: Styles) -> Drawing | None:
    """The figure of an experiment that has results; none if it is told without one."""
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
    """What is drawn of each panel, and what distinguishes it."""
    height: Callable[[Panel], float] = lambda panel: 3.0
    coloured: bool = True
    paper: str = "solid: ours, with one standard deviation; dashed and hollow: the paper's"
    """How the paper's numbers are told from ours."""


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
    """The panel's results for those who do not see it."""
    said = []
    for series in panel.series:
        means = [cell.summary.mean for cell in series.cells if cell.summary]
        if means:
            lowest, highest = f"{min(means):.2f}", f"{max(means):.2f}"
            name = series.name or "ours"
            said.append(f"{name} {lowest}" if lowest == highest else f"{name} from {lowest} to {highest}")
    return "; ".join(said) + "."


def _curves(outcome: Outcome, styles: Styles) -> _Figure:
    across, label = outcome.experiment.across, measure(outcome.experiment).title
    return _Figure(
        f"{label} over {formatting.axis(across)}",
        panels(outcome, across),
        (("", lambda axes, panel: drawing.curves(axes, panel, styles, across, label)),),
    )


def _sizes(outcome: Outcome, styles: Styles) -> _Figure:
    label = measure(outcome.experiment).title
    return _Figure(
        f"{label} over the number of parameters",
        panels(outcome, PANEL_AXIS),
        (("", lambda axes, panel: drawing.sizes(axes, panel, styles, label)),),
    )


def _dots(outcome: Outcome, styles: Styles) -> _Figure:
    across, label = outcome.experiment.across, measure(outcome.experiment).title
    return _Figure(
        f"{label} for each {formatting.axis(across)}" if across else label,
        panels(outcome, across),
        (("", lambda axes, panel: drawing.dots(axes, panel, styles, across, label)),),
        height=lambda panel: 0.75 + 0.32 * len(drawing.row_names(panel, across)) * (
            max(1.0, len(panel.series) * 0.6) if across else 1.0
        ),
        coloured=bool(across),
        paper="filled: ours, with one standard deviation; hollow: the paper's",
    )  # fmt: skip


def _heat_map(outcome: Outcome, styles: Styles) -> _Figure:
    across = outcome.experiment.across
    up = next(name for name in axes(outcome.experiment) if name not in (across, PANEL_AXIS))
    return _Figure(
        f"{measure(outcome.experiment).title} over {formatting.axis(across)} and {formatting.axis(up)}",
        panels(outcome, across, up),
        (("", lambda axes, panel: drawing.heat_map(axes, panel, across, up)),),
        coloured=False,
        paper="in brackets: the paper's",
    )


def _training(outcome: Outcome, styles: Styles) -> _Figure:
    def plot(metric: str, label: str) -> Callable[[Axes, Panel], None]:
        return lambda axes, panel: drawing.training(axes, panel, styles, metric, label)

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
    "bars": _dots,
    "curves": _curves,
    "parameters": _sizes,
    "training": _training,
    "heat map": _heat_map,
}
