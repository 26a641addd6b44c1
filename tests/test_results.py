"""Tables are generated from records and say what these say; every record can be looked up."""

import importlib
import json
import re
import sys
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch
from matplotlib.figure import Figure

from iterand.lab.experiments.catalog import find_experiment
from iterand.lab.training import recipe_file
from iterand.lab.training.folder import default_path
from iterand.ticket import load_ticket, read_ticket

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
RECORDS = RESULTS / "records"
RUNS = sorted(path for path in RECORDS.rglob("*.json") if path.parent.name != "benchmarks")
REPRODUCTION, BEYOND = "docs/explanation/reproduction.md", "docs/explanation/beyond.md"
NOTES = "results/notes/2026-11-before.md"


def load_tool(name):
    """A program in tools, which imports its neighbours by name."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "tools"))


tables = load_tool("tables")


def cells(experiment, least=2):
    (outcome,) = (outcome for outcome in tables.report().outcomes if outcome.experiment.name == experiment)
    return [cell for cell in outcome.cells if cell.summary and cell.summary.n >= least]


def rows(name):
    """The rows of all tables of a page, without what makes them bold."""
    return rows_of((ROOT / name).read_text().splitlines())


def rows_of(lines):
    return [line.replace("*", "") for line in lines if line.startswith("|")]


def counted(cell, usual=None):
    """As in a table where most cells have so many runs."""
    return said(cell) + ("" if cell.summary.n == usual else f" (n = {cell.summary.n})")


def said(cell):
    spread = f" ± {cell.summary.std:.2f}" if cell.summary.n > 1 else ""
    return f"{cell.summary.mean:.2f}{spread}"


def of_paper(cell):
    return f"{cell.cell.paper.mean:.2f} ± {cell.cell.paper.std:.2f}"


def difference(cell):
    return f"{cell.summary.mean - cell.cell.paper.mean:+.2f}".replace("-", "−")


def test_every_table_is_as_the_records_have_it():
    for path in tables.pages():
        assert tables.stale(path.read_text()) == [], f"{path}: run python tools/tables.py"


def test_the_picture_of_our_recipes_has_the_numbers_of_their_table():
    axes = Figure().add_subplot()
    load_tool("draw_beyond").panel(axes, "ResNet20")
    (drawn,) = (one for one in axes.containers if one.get_label().startswith("ours"))
    searches = [row for row in rows_of(tables.best_imp()) if row.startswith("| ResNet20")]
    assert [f"{mean:.2f}" for mean in drawn.lines[0].get_ydata()] == [
        re.search(r"\| (\d+\.\d+) ±", row)[1] for row in searches
    ]


def test_no_results_are_typed():
    """Means and deviations are between markers, where they are generated."""
    for path in tables.pages():
        outside = re.sub(r"<!-- table: .*?<!-- end -->", "", path.read_text(), flags=re.DOTALL)
        typed = [line for line in outside.splitlines() if line.startswith("|") and re.search(r"\d ± \d", line)]
        assert typed == [], path


def test_a_changed_number_is_stale(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- table: imdb -->\n<!-- end -->\nkept\n<!-- table: sparsity -->\n<!-- end -->\n")
    monkeypatch.setattr(tables, "pages", lambda: [page])
    assert tables.main(["--check"]) == 1
    assert tables.main([]) == 0
    assert tables.main(["--check"]) == 0
    whole = page.read_text()
    assert "\nkept\n" in whole
    changed, count = re.subn(r"\d(?= ± )", lambda digit: str((int(digit[0]) + 1) % 10), whole, count=1)
    assert count == 1
    page.write_text(changed)
    capsys.readouterr()
    assert tables.main(["--check"]) == 1
    assert capsys.readouterr().out == f"{page}: table imdb is stale; run python tools/tables.py\n"


def test_a_changed_record_is_stale(monkeypatch):
    page = "<!-- table: scaling-billion -->\n<!-- end -->\n"
    whole = tables.filled(page)
    assert tables.stale(whole) == []
    measured = sys.modules["measured_tables"]
    read = measured.read_json
    monkeypatch.setattr(measured, "read_json", lambda name: read(name) | {"drawing_seconds": 5.0})
    assert tables.stale(whole) == ["scaling-billion"]


def test_the_table_of_fine_tuning(monkeypatch, tmp_path):
    measured = sys.modules["measured_tables"]
    monkeypatch.setattr(measured, "BENCHMARKS", tmp_path)
    runs = [
        ("mask", 90.0, 958_000, 0, 1e-3), ("mask", 91.0, 958_200, 1, 1e-3), ("lora", 89.5, 664_000, 0, 2e-3),
        ("lora", 89.9, 664_000, 0, 1e-3), ("other", 1.0, 1, 0, 1e-3),
    ]  # fmt: skip
    for number, (method, accuracy, count, seed, rate) in enumerate(runs):
        settings = {"method": method, "rank": 4, "sparsity": 0.2, "lr": rate, "seed": seed}
        record = {"benchmark": "fine-tuning" if method != "other" else "other", "settings": settings, "bytes": count}
        record |= {"test_accuracy": accuracy, "validation_accuracy": 90 + rate, "switch_ms": 11.5, "environment": {}}
        (tmp_path / f"{number}.json").write_text(json.dumps(record))
    *_, lora, mask = measured.TABLES["fine-tuning"]()
    assert lora == "| LoRA, rank 4 | 89.50 | 664.0 kB | 0.002 | 11.50 |  |"  # better on validation, not on test
    assert mask == "| mask, p = 0.2 | 90.50 ± 0.71 | 958.1 kB | 0.001 | 11.50 |  |"
    assert "n = 1 to 2" in measured.TABLES["fine-tuning"]()[0]


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("<!-- table: imbd -->\n<!-- end -->\n", "there is no table 'imbd'; there are ablation, "),
        ("<!-- table: imdb -->\n| 1 |\n", "a table has no end"),
    ],
)
def test_what_is_no_table_is_named(page, sentence):
    with pytest.raises(SystemExit, match=re.escape(sentence)):
        tables.filled(page)


@pytest.mark.parametrize("name", ["results/README.md", BEYOND])
def test_a_row_for_every_cell_of_best(name):
    lines = rows(name)
    for cell in cells("best"):
        place = dict(cell.cell.axes)
        label = cell.cell.label
        if name == BEYOND:  # IMP is in the row of its sparsity, dense SGD in rows of its network
            rows_of = {"IMP": "{network}, p = {sparsity:g}"}
            rows_of |= dict.fromkeys(("dense SGD", "dense SGD, norms untrained"), "{network}")
            label = rows_of.get(str(place["method"]), label).format(**place)
        assert any(said(cell) in line for line in lines if line.startswith(f"| {label}"))


def test_the_rows_of_figure_2():
    lines = rows("results/README.md")
    for cell in cells("figure2", 1):
        place = dict(cell.cell.axes)
        label = f"| {place['network']}, {place['method']}, ρ = {place['width']:g} |"
        (own,) = [line for line in lines if line.startswith(label)]
        assert f"| {said(cell)} (n = {cell.summary.n}) | {of_paper(cell)} | {difference(cell)} |" in own


def test_the_rows_of_film_reviews():
    lines, notes = rows(REPRODUCTION), rows(NOTES)
    (outcome,) = (outcome for outcome in tables.report().outcomes if outcome.experiment.name == "imdb")
    records = [json.loads(path.read_text()) for path in RECORDS.glob("exploration/*lstm*.json")]
    closed = [record for record in records if "forget_bias" not in record["recipe"]["network"]]  # made before it was
    for cell in outcome.cells:
        recipe = cell.cell.recipe
        of_cell = [
            record["result"]["test_accuracy"]
            for record in closed
            if (record["recipe"]["network"]["name"], record["recipe"]["method"]["name"])
            == (recipe.network.name, recipe.method.name)
        ]
        spread = f" ± {stdev(of_cell):.2f}" if len(of_cell) > 1 else ""
        row = f"| {cell.cell.label} | {mean(of_cell):.2f}{spread} | {len(of_cell)} | {of_paper(cell)} |"
        assert row in notes
        assert f"| {cell.cell.label} | {counted(cell)} | {of_paper(cell)} | {difference(cell)} |" in lines


def test_the_best_epochs_of_film_reviews():
    lines = rows("results/README.md")
    labels = {"iterand": "IteRand (SC)", "edge_popup": "edge-popup (SC)", "sgd": "SGD"}
    records = [json.loads(path.read_text()) for path in RECORDS.glob("imdb/*.json")]
    assert len(records) >= 10
    for record in records:
        recipe, best = record["recipe"], min(record["metrics"], key=lambda metrics: metrics["validation_loss"])
        label = f"{recipe['network']['name'].replace('lstm', 'LSTM').replace('bi', 'Bi')}, "
        label += labels[recipe["method"]["name"]]
        validation = f"{best['validation_loss']:.3f} | {best['validation_accuracy']:.2f}"
        test = f"{record['result']['test_accuracy']:.2f}"
        machine = record["environment"]["hardware"].get("gpu") or record["environment"]["hardware"]["cpu"]
        assert f"| {label} | {machine} | {recipe['seed']} | {best['epoch']} | {validation} | {test} |" in lines


def test_the_rows_of_word_vectors():
    lines = rows(REPRODUCTION)
    runs = json.loads((RECORDS / "benchmarks" / "word-vectors.json").read_text())["runs"]
    groups = {}
    for run in runs:
        two_ways = run["recipe"].startswith("bilstm")
        groups.setdefault((two_ways, run["known_words"] > 0, run["vectors"], run["method"]), []).append(run["best"])
    assert sorted(map(len, groups.values())) == [1, 1, 1, 1, 1, 3, 3, 3, 3, 3, 3]

    def shown(values):
        return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f} (n = {len(values)})" if len(values) > 1 else "")

    for (two_ways, known, vectors, method), found in groups.items():
        end = " | ".join(shown([best[name] for best in found]) for name in ("accuracy", "test_accuracy"))
        (own,) = [line for line in lines if line.endswith(f"| {end} |")]
        state = {"masked": "half of the numbers pruned"}.get(vectors, vectors)
        assert f", {state} |" in own
        assert ("SGD" in own, "IteRand" in own) == (method == "sgd", method == "iterand")
        assert ("GloVe" in own, "BiLSTM" in own) == (known, two_ways)


def test_what_a_narrow_conv6_comes_to_with_one_setting_changed():
    """At ρ = 0.25, where our runs are above the paper."""
    settings = {
        "float32": lambda recipe: recipe["training"]["precision"] == "float32",
        "pixels": lambda recipe: recipe["data"]["normalization"] == "cifar10",
        "scores": lambda recipe: recipe["method"]["score_distribution"] == "kaiming_normal",
        "the last, smaller batch": lambda recipe: not recipe["data"]["drop_last"],
        "learning rate 0.25": lambda recipe: recipe["learning_rate"]["initial"] == 0.25,
        "learning rate 0.2": lambda recipe: recipe["learning_rate"]["initial"] == 0.2,
    }
    page = (ROOT / REPRODUCTION).read_text().partition("<!-- table: narrow-conv6 -->")[2].partition("<!-- end -->")[0]
    table = [[entry.strip() for entry in line.split("|")] for line in rows_of(page.splitlines())]
    found = {}
    for path in RECORDS.glob("exploration/conv6-*.json"):
        record = json.loads(path.read_text())
        recipe, method = record["recipe"], record["recipe"]["method"]
        if recipe["network"]["width_factor"] == 0.25:
            (way,) = (name for name, holds in settings.items() if holds(recipe))
            column = {"edge_popup": {"signed_constant": 2, "kaiming_uniform": 3}, "iterand": {"signed_constant": 4}}
            place = way, column[method["name"]][method["weight_distribution"]]
            found.setdefault(place, []).append(record["result"]["test_accuracy"])
    assert sorted(map(len, found.values())) == [1, 1, 3, 3, 3, 3, 3, 3, 6]
    for (way, column), values in found.items():
        (row,) = [line for line in table if re.match(rf"{way}(?!\d)", line[1])]
        spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
        assert row[column] == f"{mean(values):.2f}{spread} (n = {len(values)})"


def test_what_conv6_comes_to_with_one_setting_changed():
    """At p = 0.9, where our runs are below the paper."""
    lines = rows(REPRODUCTION)
    records = [json.loads(path.read_text()) for path in RECORDS.glob("exploration/conv6-*.json")]
    methods = [record["recipe"]["method"] for record in records]
    kinds = [(method["sparsity"], method.get("mask", "binary")) for method in methods]
    tried = [record for record, kind in zip(records, kinds) if kind == (0.9, "binary")]
    assert len(tried) == 5
    for record in tried:
        (own,) = [line for line in lines if line.endswith(f"| {record['result']['test_accuracy']:.2f} (n = 1) |")]
        rate = record["recipe"]["learning_rate"]["initial"]
        assert ("learning rate" in own) == (rate != 0.3)
        assert rate == 0.3 or f"learning rate {rate}" in own


@pytest.mark.parametrize(("name", "symbol", "usual"), [("sparsity", "p", 3), ("imp", "p", 1), ("width", "ρ", 1)])
def test_the_tables_with_a_column_for_each_value(name, symbol, usual):
    lines = rows(REPRODUCTION)
    own = cells(name, 1)
    shares = sorted({cell.axes[-1][1] for cell in find_experiment(name).cells})
    header = lines.index(f"|  | {' | '.join(f'{symbol} = {share:g}' for share in shares)} |")
    for cell in own:
        *names, share = (value for _, value in cell.cell.axes)
        start = f"| {', '.join(names)} |"
        row = next(number for number, line in enumerate(lines) if number > header and line.startswith(start))
        ours, theirs = ([entry.strip() for entry in line.split("|")[2:]] for line in lines[row : row + 2])
        assert ours[shares.index(share)] == counted(cell, usual)
        assert theirs[shares.index(share)] == of_paper(cell)


def test_the_columns_of_the_overviews():
    lines = rows_of(tables.best())
    found = {tuple(dict(cell.cell.axes).values()): cell for cell in cells("best")}
    for (network, method, share), cell in found.items():
        if method == "IteRand":
            (own,) = [line for line in lines if line.startswith(f"| {network}, {100 * share:g} % |")]
            imp = found.get((network, "IMP", share))
            both = f"{counted(cell, 3)} | {counted(imp, 3) if imp else ''}"
            assert f"| {both} | {counted(found[network, 'dense SGD', 0.0], 3)} |" in own
    lines = rows_of(tables.digits())
    for cell in cells("digits"):
        assert any(line.startswith(f"| {cell.cell.label} |") and said(cell) in line for line in lines)
    lines = rows(REPRODUCTION)
    for cell in cells("figure2"):
        place = dict(cell.cell.axes)
        header = next(number for number, line in enumerate(lines) if line.startswith(f"| {place['network']} | ρ"))
        own = next(line for line in lines[header:] if line.startswith(f"| {place['method']} |")).split(" | ")
        column = lines[header].split(" | ").index(f"ρ = {place['width']:g}")
        assert [entry.strip(" |") for entry in own[column : column + 3]] == [
            counted(cell, 3), of_paper(cell), difference(cell),
        ]  # fmt: skip


def test_the_ablation():
    lines = rows(BEYOND)
    (whole,) = (cell for cell in cells(tables.ABLATION) if cell.cell.label == "p = 0.9, all of it")
    for cell in (cell for cell in cells(tables.ABLATION) if dict(cell.cell.axes)["sparsity"] == 0.9):
        (own,) = [line for line in lines if f" {said(cell)} |" in line]
        if cell is not whole:
            assert own.endswith(f"| −{whole.summary.mean - cell.summary.mean:.2f} |")


def test_what_the_pages_conclude():
    """The sentences about these tables."""
    assert [cell.summary.mean > cell.cell.paper.mean for cell in cells("best") if cell.cell.paper] == [True] * 13
    found = {tuple(dict(cell.cell.axes).values()): cell for cell in cells("figure2", least=1)}
    apart = {place: cell for place, cell in found.items() if abs(cell.comparison.difference) >= 0.5}
    assert f"{len(found) - len(apart)} of these {len(found)} cells are within 0.5" in (ROOT / REPRODUCTION).read_text()
    assert [width for _, _, width in apart] == [0.25] * 4
    assert all(cell.comparison.difference > 0 for cell in apart.values())
    for (network, method, width), ours in found.items():
        if method.startswith("IteRand"):
            theirs = found[network, method.replace("IteRand", "edge-popup"), width]
            difference = ours.summary.mean - theirs.summary.mean
            assert difference > 0
            if min(ours.summary.n, theirs.summary.n) >= 3:
                assert difference > 2 * max(ours.summary.std, theirs.summary.std)


def test_the_names_of_the_method_page_exist():
    """Each `module.name` in its tables can be imported."""
    page = (ROOT / "docs" / "explanation" / "method.md").read_text()
    names = set(re.findall(r"`((?:[a-z_]+\.)+[A-Za-z_.]+)`", page)) - {
        "philox.py",
        "distributions.py",
        "optimizer.step",
    }
    names -= {"torch.optim.SGD", "training.select_epoch"}
    assert len(names) > 15
    for name in names:
        module, attributes = importlib.import_module("iterand"), name.split(".")
        while attributes:
            if not hasattr(module, attributes[0]):
                module = importlib.import_module(f"{module.__name__}.{attributes.pop(0)}")
            else:
                module = getattr(module, attributes.pop(0))


def test_no_record_is_damaged_or_counted_twice():
    assert tables.report().damaged == ()
    assert tables.report().superseded == ()


@pytest.mark.parametrize("path", RUNS, ids=[str(path.relative_to(RECORDS)) for path in RUNS])
def test_a_record_is_named_by_its_recipe_and_says_where_it_ran(path):
    record = json.loads(path.read_text())
    recipe = recipe_file.from_dict(record["recipe"])
    assert path.stem.removesuffix("-plain") == default_path(recipe).name
    environment = record["environment"]
    assert environment["command"].startswith("iterand ")
    assert environment["hardware"]["cpu"]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("tickets/*.ticket")), ids=lambda path: path.stem)
def test_a_ticket_is_the_network_of_its_record(path):
    result = json.loads((RECORDS / "best" / f"{path.stem}.json").read_text())["result"]
    assert path.stat().st_size == result["ticket_bytes"]
    ticket = read_ticket(path)
    assert all(ticket.metrics[name] == pytest.approx(result[name], abs=1e-4) for name in ticket.metrics)
    assert sum(int(layer.mask.sum()) for layer in ticket.layers.values()) == result["kept"]
    state = ticket.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in load_ticket(path).state_dict().items())
