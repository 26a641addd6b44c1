"""What the report draws: every number at its position, ours apart from the paper's."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from matplotlib.figure import Figure

from iterand.lab.experiments.catalog import experiment_names, find_experiment
from iterand.lab.experiments.experiment import Cell, PaperNumber
from iterand.lab.report import plots
from iterand.lab.report.assembly import read_report
from iterand.lab.report.figures import draw
from iterand.lab.report.formats import as_html
from iterand.lab.report.layout import Styles, coordinates, panels
from reporting import install, recipe, widths, write_runs


class TestLayout:
    @pytest.mark.parametrize(
        ("positions", "expected"),
        [
            ((0.25, 0.5, 1.0, 2.0), [math.log(0.25), math.log(0.5), 0.0, math.log(2.0)]),
            ((1, 30, 300, 3000), [0.0, math.log(30), math.log(300), math.log(3000)]),
            ((0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99), [0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99]),
            ((0.0, 0.01, 0.1, 1.0), [0.0, 1.0, 2.0, 3.0]),
            ((1.0, 2.0), [1.0, 2.0]),
            ((5.0,), [5.0]),
            ((), []),
        ],
    )
    def test_an_axis_is_straight_logarithmic_or_in_steps(self, positions, expected):
        assert coordinates(positions) == pytest.approx(expected)

    def test_panels_are_networks_and_series_what_is_left(self, tmp_path, monkeypatch):
        cells = tuple(
            Cell(
                "x", recipe(network=network, width=width), (("network", network), ("method", method), ("width", width))
            )
            for network in ("conv6", "resnet18")
            for method in ("IteRand", "SGD")
            for width in (0.5, 1.0)
        )
        install(monkeypatch, replace(widths(), cells=cells))
        found = panels(read_report(tmp_path).outcomes[0], "width")
        assert [(panel.title, [(series.name, len(series.cells)) for series in panel.series]) for panel in found] == [
            ("conv6", [("IteRand", 2), ("SGD", 2)]),
            ("resnet18", [("IteRand", 2), ("SGD", 2)]),
        ]

    def test_a_method_has_one_hue_whatever_its_variant(self):
        styles = Styles()
        hue = {name: styles[name].variable.rpartition("-")[0] for name in ("SGD", "IteRand, SC", "IteRand (KU)", "new")}
        assert hue == {"SGD": "series-3", "IteRand, SC": "series-1", "IteRand (KU)": "series-1", "new": "series-5"}
        assert styles["IteRand, SC"] != styles["IteRand (KU)"]
        assert styles[""] == styles["IteRand"] == styles["IteRand, SC"]


def outcome_of(tmp_path, monkeypatch, experiment, *accuracies):
    """The outcome of an experiment whose cells have these accuracies; none leaves a cell open."""
    install(monkeypatch, experiment)
    for cell, values in zip(experiment.cells, accuracies):
        write_runs(tmp_path, cell.recipe, *values)
    return read_report(tmp_path).outcomes[0]


def lines(axes):
    """What is drawn with a line: its points, and whether it is dashed."""
    return [
        (list(line.get_xdata()), pytest.approx(list(line.get_ydata())), line.is_dashed()) for line in axes.get_lines()
    ]


@pytest.fixture
def axes():
    return Figure().add_subplot()


class TestDrawing:
    def test_curves(self, tmp_path, monkeypatch, axes):
        outcome = outcome_of(tmp_path, monkeypatch, widths(), (87.0, 88.0), (90.0,), (), (92.0,))
        (panel,) = panels(outcome, "width")
        plots.curves(axes, panel, Styles(), "width", "accuracy")
        assert lines(axes) == [
            ([0.5, 1.0], [88.0, 90.0], True),  # the paper's IteRand
            ([0.5, 1.0], [87.5, 90.0], False),
            ([0.5, 1.0], [89.0, 91.0], True),  # the paper's SGD
            ([1.0], [92.0], False),
        ]
        assert [label.get_text() for label in axes.get_xticklabels()] == ["0.5", "1"]
        # One deviation on either side of ours: that of 87 and 88 is 1/√2, a single run has none.
        bars = [segment[:, 1].tolist() for drawn in axes.collections for segment in drawn.get_segments()]
        low, high = 87.5 - 0.5**0.5, 87.5 + 0.5**0.5
        assert bars == [pytest.approx([low, high]), [90.0, 90.0], [92.0, 92.0]]

    def test_names_of_ticks_that_would_touch_are_left_out(self, tmp_path, monkeypatch, axes):
        places = (0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99)
        cells = tuple(Cell("", recipe(sparsity=p), (("sparsity", p),)) for p in places)
        experiment = replace(widths(), cells=cells, across="sparsity")
        (panel,) = panels(outcome_of(tmp_path, monkeypatch, experiment, (50.0,)), "sparsity")
        plots.curves(axes, panel, Styles(), "sparsity", "accuracy")
        names = [label.get_text() for label in axes.get_xticklabels()]
        assert names == ["0.1", "0.3", "0.5", "0.7", "0.9", "", "0.99"]
        assert list(axes.get_xticks()) == list(places)

    def test_dots(self, tmp_path, monkeypatch, axes):
        experiment = replace(widths(), plot="bars", across="width")
        outcome = outcome_of(tmp_path, monkeypatch, experiment, (87.0, 88.0), (90.0,), (), (92.0,))
        (panel,) = panels(outcome, "width")
        plots.dots(axes, panel, Styles(), "width", "accuracy")
        assert [label.get_text() for label in axes.get_yticklabels()] == ["0.5", "1"]
        drawn = sorted((line.get_xdata()[0], round(line.get_ydata()[0])) for line in axes.get_lines())
        assert drawn == [(87.5, 0), (88.0, 0), (89.0, 0), (90.0, 1), (90.0, 1), (91.0, 1), (92.0, 1)]

    def test_dots_have_a_row_for_each_cell_with_a_number(self, tmp_path, monkeypatch, axes):
        labels = ("Conv6, p = 0.5", "Conv6, open, p = 0.9", "Conv6, a supermask of many coats and words, p = 0.9")
        cells = tuple(
            Cell(label, recipe(rate=rate), (("network", "Conv6"), ("rate", rate)))
            for label, rate in zip(labels, (0.1, 0.2, 0.3))
        )
        other = Cell("ResNet18", recipe(network="resnet18"), (("network", "ResNet18"), ("rate", 0.1)))
        experiment = replace(widths(), cells=(*cells, other, other), plot="bars", across="")
        outcome = outcome_of(tmp_path, monkeypatch, experiment, (87.0,), (), (92.0,))
        panel, _ = panels(outcome)
        plots.dots(axes, panel, Styles(), "", "accuracy")
        names = [label.get_text().replace("\u00a0", " ") for label in axes.get_yticklabels()]
        assert names == ["p = 0.5", "a supermask of many coats and\nwords, p = 0.9"]
        assert [line.get_ydata()[0] for line in axes.get_lines()] == [0, 1]

    def test_the_longest_names_of_rows_leave_room_for_the_plot(self, tmp_path):
        for cell in find_experiment("claims").cells:
            write_runs(tmp_path, cell.recipe, 50.0)
        (outcome,) = (found for found in read_report(tmp_path).started if found.experiment.name == "claims")
        (panel,) = panels(outcome, "")
        figure = Figure(figsize=(4.4, plots.dots_height(panel, "")), layout="constrained")
        axes = figure.add_subplot()
        plots.dots(axes, panel, Styles(), "", "test accuracy (%)")
        figure.draw_without_rendering()
        assert axes.get_position().width > 0.4
        boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
        assert not any(one.overlaps(other) for one, other in pairwise(boxes))

    def test_heat_map(self, tmp_path, monkeypatch, axes):
        cells = tuple(
            Cell("", recipe(rate=r, period=k), (("period", float(k)), ("rate", r)), PaperNumber(80.0 + k, None, ""))
            for r in (0.1, 1.0)
            for k in (30, 1)
        )
        experiment = replace(widths(), cells=cells, plot="heat map", across="period")
        outcome = outcome_of(tmp_path, monkeypatch, experiment, (91.0,), (92.0,), (93.0,))
        (panel,) = panels(outcome, "period", "rate")
        plots.heat_map(axes, panel, "period", "rate")
        words = {(text.xy, text.get_text()) for text in axes.texts}
        assert words == {
            ((1, 0), "91.00"), ((1, 0), "(110.00)"), ((0, 0), "92.00"), ((0, 0), "(81.00)"),
            ((1, 1), "93.00"), ((1, 1), "(110.00)"), ((0, 1), "open"), ((0, 1), "(81.00)"),
        }  # fmt: skip

    def test_sizes_are_the_papers_or_what_the_runs_kept(self, tmp_path, monkeypatch, axes):
        cells = (
            Cell("", recipe(network="a"), (("network", "A"),), PaperNumber(70.0, None, "", parameters=6.38)),
            Cell("", recipe(network="b"), (("network", "B"),), PaperNumber(75.0, None, "")),
        )
        experiment = replace(widths(), cells=cells, plot="parameters")
        outcome = outcome_of(tmp_path, monkeypatch, experiment, (69.0,), (76.0,))
        (panel,) = panels(outcome, "network")
        plots.sizes(axes, panel, Styles(), "accuracy")
        assert lines(axes) == [([1.0, 6.38], [75.0, 70.0], True), ([1.0, 6.38], [76.0, 69.0], False)]
        assert {(text.get_text(), text.xy) for text in axes.texts} == {("A", (6.38, 70.0)), ("B", (1.0, 76.0))}

    def test_training_curves_are_means_with_a_band(self, tmp_path, monkeypatch, axes):
        experiment = replace(widths(), cells=widths().cells[:1], plot="training", across="")
        (panel,) = panels(outcome_of(tmp_path, monkeypatch, experiment, (90.0, 92.0)))
        plots.training(axes, panel, Styles(), "validation_accuracy", "accuracy")
        # Epoch by epoch 86, 88, 90 and 88, 90, 92, whose deviation is √2.
        assert lines(axes) == [([1, 2, 3], [87.0, 89.0, 91.0], False)]
        (band,) = axes.collections
        assert band.get_datalim(axes.transData).extents == pytest.approx([1, 87 - 2**0.5, 3, 91 + 2**0.5])


def test_the_paper_is_named_in_a_caption_only_where_it_is_drawn(tmp_path, monkeypatch):
    outcome = outcome_of(tmp_path, monkeypatch, widths(), (87.0,))
    assert draw(outcome, Styles()).caption.endswith("dashed and hollow: the paper's")
    without = tuple(replace(cell, paper=None) for cell in outcome.experiment.cells)
    outcome = replace(outcome, experiment=replace(outcome.experiment, cells=without))
    assert draw(outcome, Styles()).caption == "test accuracy (%) over width ρ"


def test_a_picture_tells_its_numbers_in_words(tmp_path, monkeypatch):
    outcome = outcome_of(tmp_path, monkeypatch, widths(), (87.0,), (89.0,), (90.0,))
    (picture,) = draw(outcome, Styles()).pictures
    words = "Varying the width: test accuracy (%) over width ρ. IteRand from 87.00 to 89.00; SGD 90.00."
    assert f'aria-label="{words}"><title>{words}</title>' in picture.svg
    assert "#0000" not in picture.svg  # every colour is the page's
    assert "var(--series-1-1)" in picture.svg


def test_a_dollar_is_a_dollar(tmp_path, monkeypatch):
    cells = tuple(Cell("", recipe(width=width), (("price $x$", width),)) for width in (0.5, 1.0))
    outcome = outcome_of(tmp_path, monkeypatch, replace(widths(), cells=cells, across="price $x$"), (87.0,))
    assert ">price $x$</text>" in draw(outcome, Styles()).pictures[0].svg


def test_every_experiment_is_drawn(tmp_path):
    for name in experiment_names():
        for cell in find_experiment(name, scale="tiny").cells:
            write_runs(tmp_path, cell.recipe, 50.0)
    found = read_report(tmp_path, scale="tiny")
    assert [outcome.experiment.name for outcome in found.started] == experiment_names()
    assert not found.unmatched
    page = as_html(found)
    for outcome in found.outcomes:
        _, section = page.split(f'<section id="{outcome.experiment.name}"')
        figure, _, _ = section.partition("</section>")
        assert ("<svg" in figure) == (outcome.experiment.plot != "none")
        assert figure.count("<tr>") == 2 + 2 * len(outcome.cells)  # two tables: results and runs
