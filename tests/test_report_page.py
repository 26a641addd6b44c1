"""The page in a real Chromium: it loads without a word, shows every figure, sorts, and fits phone, night and paper."""

import io
import re
from dataclasses import replace
from itertools import chain

import pytest
from PIL import Image

from browser import CHROMIUM, Browser
from iterand.lab.experiments.experiment import Cell, Experiment, PaperNumber
from iterand.lab.report.assembly import read_report
from iterand.lab.report.formats import as_html
from reporting import as_record, install, recipe, tiny, widths, write, write_runs

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found; apt-get install chromium")

EVIL = "<script>document.title = 'broken'</script><img src=x onerror=\"document.title = 'broken'\">"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


def experiments() -> list[Experiment]:
    """One of each kind of plot, and one that stays open."""

    def cells(paper: PaperNumber | None = None, **values: list) -> tuple[Cell, ...]:
        places = [{}]
        for name, entries in values.items():
            places = [place | {name: entry} for place in places for entry in entries]
        return tuple(
            Cell(
                ", ".join(map(str, place.values())),
                recipe(
                    network=f"{place.get('network', 'one')}-{place.get('method', '')}",
                    rate=place.get("rate", 0.1),
                    period=int(place.get("period", 300)),
                ),
                tuple(place.items()),
                paper,
            )
            for place in places
        )

    networks, methods = ["Conv6", "ResNet18"], ["IteRand (SC)", "edge-popup (SC)", "SGD"]
    sized = PaperNumber(90.0, None, "Table 4", parameters=6.38)
    return [
        widths(),
        Experiment("period", "Periods", cells(network=networks, period=[1.0, 30.0, 300.0]), 3, "", "curves", "period"),
        Experiment("rate", "Rates", cells(network=networks, rate=[0.0, 0.1, 1.0]), 3, "Figure 1", "bars", "rate"),
        Experiment("grid", "Both", cells(period=[1.0, 30.0], rate=[0.1, 1.0]), 3, "Figure 5", "heat map", "period"),
        Experiment("imagenet", "Sizes", cells(sized, network=networks, method=methods), 1, "Figure 3", "parameters"),
        Experiment("training", "Curves", cells(method=methods), 2, "Figure 3", "training"),
        Experiment("imdb", "Words", cells(network=["LSTM", "BiLSTM"], method=methods), 5, "Table 10", "bars"),
        Experiment("time", "Time", cells(method=["SGD"]), 1, "Table 5", "none", measure="seconds"),
        Experiment("open", "Not yet", (Cell("one", recipe(network="never")),), 1),
    ]


FIGURES = {"widths": 1, "period": 2, "rate": 2, "grid": 1, "imagenet": 1, "training": 2, "imdb": 2}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    everything = experiments()
    for experiment in everything[:-1]:
        for number, cell in enumerate(experiment.cells[: -1 if experiment.name == "grid" else None]):
            write_runs(folder / "runs", cell.recipe, 85.0 + number, 86.0 + 1.1 * number)
    without = replace(everything[3].cells[0].recipe, seed=2)  # a run without a ticket, so that its cell has none
    write(folder / "runs" / "without.json", as_record(without, 85.5, result={"test_accuracy": 85.5}))
    write_runs(folder / "runs", tiny(everything[1]).cells[0].recipe, 12.0)
    write(folder / "runs" / "stranger.json", as_record(replace(recipe(network="x"), name=EVIL), 50.0))
    with pytest.MonkeyPatch.context() as patch:
        install(patch, *everything)
        for scale in ("full", "tiny"):
            (folder / f"{scale}.html").write_text(as_html(read_report(folder / "runs", scale=scale)))
    return folder


@pytest.fixture(scope="module")
def browser():
    opened = Browser()
    yield opened
    opened.close()


def column(browser: Browser, number: int) -> list[str]:
    """A column of the first table of the section ``widths``."""
    script = f"[...document.querySelector('#widths table').tBodies[0].rows].map(row => row.cells[{number}].innerText)"
    return [entry.strip() for entry in browser.run(script)]


@pytest.mark.parametrize("scale", ["full", "tiny"])
def test_it_loads_without_a_word_and_asks_for_nothing(browser, pages, scale):
    browser.open(pages / f"{scale}.html")
    assert browser.complaints() == []
    assert [address for address in browser.requests() if not address.startswith("data:")] == [
        (pages / f"{scale}.html").as_uri()
    ]
    assert browser.run("document.title").endswith("our runs beside the paper's")
    assert browser.run("document.querySelectorAll('.banner').length") == (scale == "tiny")


def test_what_a_record_says_is_text(browser, pages):
    browser.open(pages / "full.html")
    assert browser.run("document.querySelectorAll('script').length") == 1
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert EVIL in browser.run("document.querySelector('#unmatched td').textContent")


def test_every_figure_is_seen_and_named(browser, pages):
    browser.open(pages / "full.html")
    script = """[...document.querySelectorAll('main section')].map(section => [
        section.id,
        [...section.querySelectorAll('.panels svg')].map(svg => {
            const box = svg.getBoundingClientRect(), drawn = svg.getBBox();
            return [box.width, box.height, drawn.width, svg.getAttribute('aria-label'), svg.getAttribute('role')];
        })])"""
    found = {name: pictures for name, pictures in browser.run(script) if pictures}
    assert {name: len(pictures) for name, pictures in found.items()} == FIGURES
    for width, height, drawn, label, role in chain(*found.values()):
        assert width > 250
        assert height > 60
        assert drawn > 200
        assert role == "img"
        assert re.search(r"accuracy .*\d\d\.\d\d", label)


def test_no_two_elements_share_an_id(browser, pages):
    browser.open(pages / "full.html")
    names = browser.run("[...document.querySelectorAll('[id]')].map(element => element.id)")
    assert len(names) == len(set(names)) > 50


def test_every_link_leads_somewhere(browser, pages):
    browser.open(pages / "full.html")
    script = "[...document.querySelectorAll('a')].filter(a => !document.getElementById(a.hash.slice(1))).length"
    assert browser.run(script) == 0
    assert browser.run("document.querySelectorAll('a').length") > 10


def test_sorting_up_down_and_back(browser, pages):
    browser.open(pages / "full.html")
    means = column(browser, 2)
    assert [entry.split()[0] for entry in means] == ["85.50", "86.55", "87.60", "88.65"]
    click = "document.querySelectorAll('#widths thead th')[{}].querySelector('button').click()"
    orders = []
    for _ in range(3):
        browser.run(click.format(1))
        sort = browser.run("document.querySelectorAll('#widths thead th')[1].getAttribute('aria-sort')")
        orders.append((sort, column(browser, 1)))
    assert orders == [
        ("ascending", ["0.5", "0.5", "1", "1"]),
        ("descending", ["1", "1", "0.5", "0.5"]),
        (None, ["0.5", "1", "0.5", "1"]),
    ]
    for _ in range(2):
        browser.run(click.format(2))
    assert column(browser, 2) == means[::-1]
    assert browser.run("document.querySelectorAll('#widths thead [aria-sort]').length") == 1


def test_what_is_missing_sorts_last_in_both_directions(browser, pages):
    browser.open(pages / "full.html")
    heads = browser.run("[...document.querySelector('#grid table').tHead.rows[0].cells].map(th => th.innerText)")
    ticket = [head.strip() for head in heads].index("ticket")
    for _ in range(2):
        browser.run(f"document.querySelectorAll('#grid thead th')[{ticket}].querySelector('button').click()")
        cells = f"[...document.querySelector('#grid table').tBodies[0].rows].map(row => row.cells[{ticket}].innerText)"
        assert [cell.strip() for cell in browser.run(cells)] == ["424.0 kB", "424.0 kB", ""]


def test_cells_and_experiments_without_runs_come_after_those_with_results(browser, pages):
    browser.open(pages / "full.html")
    rows = "[...document.querySelectorAll('#grid table')].map(table => table.tBodies[0].rows.length)"
    assert browser.run(rows)[:2] == [3, 1]
    folded = "document.querySelectorAll('#grid table')[1].closest('details')"
    assert not browser.run(f"{folded}.open")
    assert browser.run(f"{folded}.querySelector('summary').innerText") == "1 cell without runs"
    names = browser.run("[...document.querySelector('main table').tBodies[0].rows].map(row => row.cells[0].innerText)")
    assert [name.strip() for name in names] == [entry.name for entry in experiments()[:-1]]
    sections = browser.run("[...document.querySelectorAll('main section')].map(section => section.id)")
    assert sections.index("left") == len(names)


def test_sorting_by_keyboard(browser, pages):
    browser.open(pages / "full.html")
    browser.run("document.querySelectorAll('#widths thead th')[0].querySelector('button').focus()")
    browser.press("Tab", 9)
    browser.press("Enter", 13, "\r")
    assert browser.run("document.activeElement.closest('th').getAttribute('aria-sort')") == "ascending"
    assert column(browser, 1) == ["0.5", "0.5", "1", "1"]


def test_a_link_to_a_folded_part_opens_it(browser, pages):
    browser.open(pages / "full.html")
    browser.run("document.querySelector('#unmatched td').id = 'inside'")
    assert not browser.run("document.querySelector('#unmatched details').open")
    browser.run("new Promise(done => { addEventListener('hashchange', done); location.hash = 'inside'; })")
    assert browser.run("document.querySelector('#unmatched details').open")


def test_the_hardware_of_a_run_leads_to_its_versions_and_command(browser, pages):
    browser.open(pages / "full.html")
    facts = "[...document.querySelectorAll('.facts dt')]"
    of_all = browser.run(f"{facts}.find(name => name.textContent == 'runs').nextElementSibling.textContent")
    assert browser.run("document.querySelector('#machines td').textContent") == of_all  # all on one machine
    first = "document.querySelector('#machine-1').checkVisibility()"
    assert not browser.run(first)
    link = "document.querySelector('a[href=\"#machine-1\"]')"
    browser.run(f"new Promise(done => {{ addEventListener('hashchange', done); {link}.click(); }})")
    assert browser.run(first)


def test_a_phone_never_scrolls_sideways(browser, pages):
    browser.open(pages / "full.html", width=360, height=740, phone=True)
    browser.run("document.querySelectorAll('details').forEach(folded => folded.open = true)")
    assert browser.run("[innerWidth, document.documentElement.scrollWidth]") == [360, 360]
    widths_of = "[...document.querySelectorAll('.panels svg')].map(svg => svg.getBoundingClientRect().width)"
    assert all(250 < width <= 360 for width in browser.run(widths_of))
    # What is too wide scrolls by itself.
    wide = "[...document.querySelectorAll('.scroll')].some(part => part.scrollWidth > part.clientWidth)"
    assert browser.run(wide)


def colours(png: bytes) -> tuple[float, float]:
    """The share of dark and of light pixels."""
    shades = Image.open(io.BytesIO(png)).convert("L").resize((200, 200)).tobytes()
    return sum(shade < 60 for shade in shades) / len(shades), sum(shade > 220 for shade in shades) / len(shades)


def test_light_and_dark(browser, pages):
    text = "getComputedStyle(document.querySelector('.panels svg text')).fill"
    browser.open(pages / "full.html", prefers_color_scheme="light")
    assert browser.run(BACKGROUND) == "rgb(255, 255, 255)"
    assert browser.run(text) == "rgb(27, 31, 36)"
    dark, light = colours(browser.screenshot(whole=False))
    assert light > 0.85
    browser.open(pages / "full.html", prefers_color_scheme="dark")
    assert browser.run(BACKGROUND) == "rgb(20, 23, 26)"
    assert browser.run(text) == "rgb(230, 232, 234)"
    dark, light = colours(browser.screenshot(whole=False))
    assert dark > 0.85


def test_paper_is_white_even_at_night(browser, pages):
    browser.open(pages / "full.html", prefers_color_scheme="dark")
    browser.media("print", prefers_color_scheme="dark")
    assert browser.run(BACKGROUND) == "rgb(255, 255, 255)"
    heights = "[...document.querySelectorAll('.panels svg')].map(svg => svg.getBoundingClientRect().height)"
    assert all(height > 50 for height in browser.run(heights))
    assert browser.run("getComputedStyle(document.querySelector('thead button')).display") == "contents"
    pdf = browser.pdf()
    assert pdf.startswith(b"%PDF")
    assert len(pdf) > 20_000
