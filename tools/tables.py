"""Write the tables of numbers in README.md, docs/ and results/README.md from records.

    python tools/tables.py             write them in place
    python tools/tables.py --check     name the stale ones, exit with 1
    python tools/tables.py --list      the names of all tables

A table is what is between ``<!-- table: NAME -->`` and ``<!-- end -->``: a caption with its conditions, and rows.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import measured_tables
from measured_tables import ROOT, Lines, markdown, read_json

from iterand.lab.experiments.experiment import PaperNumber, find_number
from iterand.lab.experiments.extras import UNTRAINED_NORMS
from iterand.lab.experiments.paper import CIFAR10, OPENLTH, SPARSITIES
from iterand.lab.report.assembly import CellOutcome, Outcome, Report, read_report
from iterand.lab.report.formatting import Summary, compare, difference, machine, plus_minus, size, summarize
from iterand.lab.report.records import Record, read_records
from iterand.lab.training.folder import default_path
from iterand.lab.training.recipe import Recipe

RESULTS = ROOT / "results"
ABLATION = "ablation"
_MARKED = re.compile(r"(<!-- table: ([^ ]*) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """The pages that may hold tables."""
    return [ROOT / "README.md", RESULTS / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(page: str) -> str:
    """A page with its tables as the records have them."""

    def one(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        if name not in TABLES:
            raise SystemExit(f"there is no table {name!r}; there are {', '.join(sorted(TABLES))}")
        return "\n".join([begin, *TABLES[name](), "", end])

    if page.count("<!-- table: ") != len(_MARKED.findall(page)):
        raise SystemExit("a table has no end: each needs <!-- table: NAME --> and <!-- end --> on lines of their own")
    return _MARKED.sub(one, page)


def stale(page: str) -> list[str]:
    """The names of the tables of a page that are not as the records have them."""
    both = zip(_MARKED.finditer(page), _MARKED.finditer(filled(page)))
    return [before[2] for before, after in both if before[0] != after[0]]


@cache
def report() -> Report:
    """All records beside the experiments, in profile ``paper``."""
    return read_report(RESULTS)


def outcome(name: str) -> Outcome:
    """An experiment and its results."""
    return next(outcome for outcome in report().outcomes if outcome.experiment.name == name)


def cells(experiment: str, **axes: str | float) -> dict[tuple[str | float, ...], CellOutcome]:
    """The cells with results at these places, by the values of their other axes."""
    found = {}
    for cell in outcome(experiment).cells:
        place = dict(cell.cell.axes)
        if cell.summary and all(place.get(name) == value for name, value in axes.items()):
            found[tuple(value for name, value in place.items() if name not in axes)] = cell
    return found


@cache
def records() -> tuple[Record, ...]:
    """The records of all runs."""
    return read_records(RESULTS).found


def explored(network: str) -> list[Record]:
    """The records in ``exploration`` whose network is this one."""
    return [run for run in records() if run.path.parent.name == "exploration" and run.recipe.network.name == network]


def accuracy(cell: CellOutcome, usual: int | None = None) -> str:
    """Our mean and deviation, and the number of runs where it is not the usual one."""
    return _shown(cell.summary, usual)


def mean_of(values: Iterable[float], usual: int | None = None) -> str:
    """The same of numbers that are no cell's."""
    return _shown(summarize(list(values)), usual)


def _shown(summary: Summary | None, usual: int | None) -> str:
    if summary is None:
        return ""
    return plus_minus(summary.mean, summary.std) + (f" (n = {summary.n})" if summary.n != usual else "")


def of_paper(number: PaperNumber | None) -> str:
    """The paper's mean and deviation."""
    return plus_minus(number.mean, number.std) if number else ""


def delta(cell: CellOutcome) -> str:
    """Ours minus the paper's."""
    return difference(cell.comparison) if cell.comparison else ""


def ticket_bytes(cell: CellOutcome) -> str:
    """The size of the ticket of the last seed."""
    return size(float(cell.runs[-1].result["ticket_bytes"]))


def caption(what: str, found: Iterable[CellOutcome], usual: int, command: str) -> Lines:
    """What the numbers are, of how many runs, on which hardware, and how to get them."""
    runs = [run for cell in found for run in cell.runs]
    precision = ", ".join(sorted({run.recipe.training.precision for run in runs}))
    n = f"n = {usual} (seeds 0-{usual - 1})" if usual > 1 else "n = 1 (seed 0)"
    where = f"{hardware(runs)}, {precision}"
    text = f"{what}; mean ± standard deviation, {n} unless a cell says otherwise; {where}; `{command}`."
    return [f"*{text}*", ""]


def hardware(runs: Iterable[Record]) -> str:
    """The machines of runs."""
    return ", ".join(sorted({machine(run.environment) for run in runs}))


def beside_paper(found: Iterable[CellOutcome]) -> Lines:
    """A row for each cell: ours, the paper's, and the difference."""
    rows = [[cell.cell.label, accuracy(cell), of_paper(cell.cell.paper), delta(cell)] for cell in found]
    return markdown(["", "ours", "paper", "Δ"], rows)


def digits() -> Lines:
    """The quickstart's three methods."""
    rows = []
    found = outcome("digits").finished
    for cell in found:
        result = cell.runs[0].result
        trained = cell.cell.recipe.method.trains_weights
        tickets = cell.mean("ticket_bytes")
        ours = "**" if cell.cell.label == "IteRand" else ""
        rows.append([
            f"{ours}{cell.cell.label}{ours}", "yes" if trained else "never", f"{ours}{accuracy(cell, 5)}{ours}",
            f"{result['kept']:,} / {result['weights']:,}", size(4 * result["weights"]),
            size(tickets) if tickets else "—",
        ])  # fmt: skip
    what = "Test accuracy in % on scikit-learn's digits, Kaiming uniform weights, a quarter of the width (ρ = 0.25)"
    head = ["method", "weights trained", "test accuracy", "weights kept", "float32", "ticket (mean)"]
    return [*caption(what, found, 5, "iterand reproduce digits --seeds 5"), *markdown(head, rows, left=2)]


def figure2_wide(network: str, usual: int = 3) -> Lines:
    """Figure 2 for one network: methods by widths, beside the paper."""
    found = cells("figure2", network=network)
    widths = sorted({width for _, width in found})
    rows = []
    for method in dict.fromkeys(method for method, _ in found):
        row = [str(method)]
        for width in widths:
            cell = found.get((method, width))
            row += [accuracy(cell, usual), of_paper(cell.cell.paper), delta(cell)] if cell else ["", "", ""]
        rows.append(row)
    measured = {(entry["network"], entry["width_factor"]): entry for entry in read_json("ticket.json")["sizes"]}
    last = [found["IteRand (SC)", width].runs[-1] for width in widths]
    sizes = [measured.get((run.recipe.network.name, width), run.result) for width, run in zip(widths, last)]
    for label, key in (("ticket of IteRand (SC)", "ticket_bytes"), ("float32", "float32_bytes")):
        rows.append([label, *(entry for each in sizes for entry in (size(each[key]), "", ""))])
    head = [network, *(entry for width in widths for entry in (f"ρ = {width:g}", "paper", "Δ"))]
    epochs = next(iter(found.values())).cell.recipe.training.epochs
    what = f"{network} on CIFAR-10, test accuracy in %, {epochs} epochs; Δ is ours minus the paper's"
    command = f"iterand reproduce --only 'figure2/{network}*'"
    return [*caption(what, found.values(), usual, command), *markdown(head, rows)]


def figure2() -> Lines:
    """Every cell of Figure 2 that has runs."""
    found = outcome("figure2").finished
    what = "Figure 2 (Table 3), CIFAR-10, test accuracy in %"
    return [*caption(what, found, 3, "iterand reproduce figure2"), *beside_paper(found)]


def width_saved() -> Lines:
    """How much wider edge-popup must be to reach IteRand, with signed constants."""
    rows, shown = [], []
    for network in ("Conv6", "ResNet18"):
        found = cells("figure2", network=network)
        widths = sorted({width for method, width in found if method == "edge-popup (SC)"})
        for narrow, wide in pairwise(widths):
            ours, *theirs = (
                found["IteRand (SC)", narrow],
                *(found["edge-popup (SC)", width] for width in (narrow, wide)),
            )
            low, high = (cell.summary.mean for cell in theirs if cell.summary)
            mean = ours.summary.mean if ours.summary else 0.0
            factor = (wide / narrow) ** ((mean - low) / (high - low))
            shown += [ours, *theirs]
            rows.append(
                [f"{network}, ρ = {narrow:g}", *(accuracy(cell, 3) for cell in (ours, *theirs)), f"{factor:.2f}"]
            )
    what = "Signed constants on CIFAR-10, test accuracy in %; factor: how much wider edge-popup reaches IteRand's "
    what += "accuracy, interpolated over log ρ"
    head = ["", "IteRand (SC)", "edge-popup (SC)", "edge-popup (SC) at 2ρ", "factor"]
    return [*caption(what, shown, 3, "iterand reproduce figure2"), *markdown(head, rows)]


def narrow_conv6() -> Lines:
    """Conv6 at ρ = 0.25 with one setting changed."""
    changes: dict[str, Callable[[Record], bool]] = {
        "float32 and plain torch on one CPU core": lambda run: run.recipe.training.precision == "float32",
        "learning rate 0.2 (the paper's text)": lambda run: run.recipe.learning_rate.initial == 0.2,
        "learning rate 0.25": lambda run: run.recipe.learning_rate.initial == 0.25,
        "the last, smaller batch of an epoch is used": lambda run: not run.recipe.data.drop_last,
        "pixels normalized by the statistics of CIFAR-10": lambda run: run.recipe.data.normalization == "cifar10",
        "scores from Kaiming normal": lambda run: run.recipe.method.score_distribution == "kaiming_normal",
    }
    methods = {
        "edge-popup (SC)": ("edge_popup", "signed_constant"),
        "edge-popup (KU)": ("edge_popup", "kaiming_uniform"),
        "IteRand (SC)": ("iterand", "signed_constant"),
    }
    narrow = [run for run in explored("conv6") if run.recipe.network.width_factor == 0.25]
    base = cells("figure2", network="Conv6", width=0.25)

    def column(runs: Iterable[Record], method: str) -> list[float]:
        kind = methods[method]
        fitting = (run for run in runs if (run.recipe.method.name, run.recipe.method.weight_distribution) == kind)
        return [run.result["test_accuracy"] for run in fitting]

    rows = [["profile `paper` (learning rate 0.3)", *(accuracy(base[method,]) for method in methods)]]
    for label, holds in changes.items():
        fitting = [run for run in narrow if holds(run)]
        rows.append([label, *(mean_of(column(fitting, method)) for method in methods)])
    rows.append(["paper", *(of_paper(base[method,].cell.paper) for method in methods)])
    what = "Conv6 at ρ = 0.25, test accuracy in %, one setting changed; number of seeds in brackets"
    text = f"*{what}; NVIDIA H200, bfloat16 unless the row says otherwise; the command is in each record.*"
    return [text, "", *markdown(["", *methods], rows)]


def across(experiment: str, symbol: str, what: str, usual: int) -> Lines:
    """A table of the paper with a column for each value of its last axis: our rows, and the paper's below."""
    found = {tuple(value for _, value in cell.cell.axes): cell for cell in outcome(experiment).cells}
    values = sorted({float(place[-1]) for place in found})
    rows, shown = [], []
    for names in dict.fromkeys(place[:-1] for place in found):
        row = [found.get((*names, value)) for value in values]
        if any(cell and cell.summary for cell in row):
            rows += [[", ".join(map(str, names)), *(accuracy(cell, usual) if cell else "" for cell in row)]]
            rows += [["… paper", *(of_paper(cell.cell.paper) if cell else "" for cell in row)]]
            shown += [cell for cell in row if cell]
    head = ["", *(f"{symbol} = {value:g}" for value in values)]
    return [*caption(what, shown, usual, f"iterand reproduce {experiment}"), *markdown(head, rows)]


def rates_and_periods() -> Lines:
    """Figures 1 and 4 for Conv6."""
    rows, shown = [], []
    for label, name, symbol in (("Figure 1", "figure1", "r"), ("Figure 4", "period", "K_per")):
        found = [(value, cell) for (value,), cell in cells(name, network="Conv6").items()]
        values = ", ".join(f"{value:,g}" for value, _ in found)
        numbers = ", ".join(accuracy(cell, 3) for _, cell in found)
        rows.append([label, f"{symbol} = {values}", numbers])
        shown += [cell for _, cell in found]
    what = "Conv6 with Kaiming uniform weights, validation accuracy in % after the last epoch"
    command = "iterand reproduce --only 'figure1/Conv6*' --only 'period/Conv6*'"
    return [*caption(what, shown, 3, command), *markdown(["", "", "validation"], rows, left=2)]


def sparse_conv6() -> Lines:
    """Conv6 at p = 0.9 with one setting changed."""
    base = cells("sparsity", network="Conv6", method="IteRand (SC)")[0.9,]
    usual = base.cell.recipe
    rows = []
    for run in explored("conv6"):
        recipe = run.recipe
        if recipe.method.sparsity != 0.9 or recipe.method.mask != usual.method.mask:
            continue
        changes = {
            f"learning rate {recipe.learning_rate.initial:g}": recipe.learning_rate != usual.learning_rate,
            recipe.training.precision: recipe.training.precision != usual.training.precision,
            f"r = {recipe.method.rate:g}": recipe.method.rate != usual.method.rate,
            f"K_per = {recipe.method.period}": recipe.method.period != usual.method.period,
        }
        (label,) = (label for label, changed in changes.items() if changed)
        rows.append([label, mean_of([run.result["test_accuracy"]])])
    rows.append([f"profile `paper` (learning rate {usual.learning_rate.initial:g})", accuracy(base)])
    rows.append(["paper", of_paper(base.cell.paper)])
    text = "*Conv6, IteRand (SC), p = 0.9, test accuracy in %, one setting changed; NVIDIA H200.*"
    return [text, "", *markdown(["", "test"], sorted(rows[:-2]) + rows[-2:])]


def imdb() -> Lines:
    """Table 10."""
    found = outcome("imdb").finished
    machines = hardware(run for cell in found for run in cell.runs)
    text = f"*Table 10, IMDB film reviews, test accuracy in %; {machines}; float32; `iterand reproduce imdb`.*"
    return [text, "", *beside_paper(found)]


def imdb_runs() -> Lines:
    """The epoch that is tested, run by run."""
    rows = []
    for cell in outcome("imdb").cells:
        for run in cell.runs:
            epochs = json.loads((RESULTS / run.path).read_text(encoding="utf-8"))["metrics"]
            tested = min(epochs, key=lambda metrics: metrics["validation_loss"])
            rows.append([
                cell.cell.label, hardware([run]), str(run.recipe.seed), str(tested["epoch"]),
                f"{tested['validation_loss']:.3f}", f"{tested['validation_accuracy']:.2f}",
                f"{run.result['test_accuracy']:.2f}",
            ])  # fmt: skip
    text = "*Film reviews, run by run: the epoch of the lowest validation loss is tested; float32.*"
    head = ["", "hardware", "seed", "epoch", "validation loss", "validation %", "test %"]
    return [text, "", *markdown(head, rows, left=2)]


def word_vectors() -> Lines:
    """Film reviews with pretrained word vectors."""
    labels = {"sgd": "SGD", "edge_popup": "edge-popup (SC)", "iterand": "IteRand (SC)"}
    states = ["trained", "fixed", "masked"]
    found: dict[tuple[str, bool, str, str], list[dict[str, Any]]] = {}
    for run in read_json("word-vectors.json")["runs"]:
        network = "BiLSTM" if run["recipe"].startswith("bilstm") else "LSTM"
        found.setdefault((network, bool(run["known_words"]), run["vectors"], run["method"]), []).append(run)
    rows = []
    for key in sorted(found, key=lambda key: (key[0] != "LSTM", not key[1], states.index(key[2]), key[3] != "sgd")):
        network, known, state, method = key
        runs = found[key]
        then = {"masked": "half of the numbers pruned"}.get(state, state)
        rows.append([
            f"{network}, {labels[method]}", f"{'GloVe' if known else 'N(0, 1)'}, {then}",
            "NVIDIA H200" if "H200" in str(runs[0]["hardware"]) else "one CPU core",
            *(mean_of([run["best"][name] for run in runs], 1) for name in ("accuracy", "test_accuracy")),
        ])  # fmt: skip
    text = "*LSTM and BiLSTM with pretrained word vectors, accuracy in %, mean ± standard deviation, n = 1 (seed 0) "
    text += "unless a cell says otherwise (seeds 0-2); `tools/probe_word_vectors.py`.*"
    return [text, "", *markdown(["", "words", "hardware", "validation", "test"], rows, left=3)]


def imdb_settings() -> Lines:
    """Settings of the pruned LSTM with random embeddings, by validation accuracy."""
    found: dict[str, list[Record]] = {}
    for run in explored("lstm"):
        if run.recipe.learning_rate.schedule == "cosine":
            words = run.environment["command"].split()
            set_to = [word for before, word in pairwise(words) if before == "--set"]
            chosen = [word for word in set_to if "schedule" not in word and not word.startswith("seed=")]
            found.setdefault(", ".join(f"`{word}`" for word in chosen) or "nothing else", []).append(run)
    rows = [
        [settings, *(mean_of([run.result[f"{split}_accuracy"] for run in runs], 1) for split in ("validation", "test"))]
        for settings, runs in found.items()
    ]
    rows.sort(key=lambda row: row[1], reverse=True)
    text = "*LSTM on IMDB with random embeddings, none trained, accuracy in %, mean ± standard deviation, "
    text += "n = 1 (seed 0) unless a cell says otherwise (seeds 0-2); NVIDIA H200, float32; "
    text += "`iterand train lstm --set learning_rate.schedule=cosine --set SETTING`.*"
    return [text, "", *markdown(["set beside the schedule", "validation", "test"], rows)]


def best_networks() -> Lines:
    """Our recipes for networks of Figure 2."""
    rows, found = [], []
    for network in CIFAR10:
        for (share,), cell in sorted(cells("best", network=network, method="IteRand").items()):
            sgd = find_number("figure2", {"network": network, "method": "SGD", "width": 1.0})
            found.append(cell)
            rows.append([
                f"{network}, p = {share:g}", f"**{accuracy(cell, 3)}**",
                of_paper(cell.cell.paper) if cell.cell.paper else "", of_paper(sgd), ticket_bytes(cell),
            ])  # fmt: skip
    what = "Recipes `best-*` on CIFAR-10, test accuracy in %, 100 epochs; ticket of the last seed"
    head = ["", "ours", "paper's IteRand", "paper's SGD", "ticket"]
    return [*caption(what, found, 3, "iterand reproduce best"), *markdown(head, rows)]


def best_imp() -> Lines:
    """Our recipes beside the paper's magnitude pruning."""
    rows, found = [], []
    for network in sorted(OPENLTH):
        for (share,), cell in cells("best", network=network, method="IteRand").items():
            theirs = find_number("imp", {"network": network, "method": "IteRand (SC)", "sparsity": share})
            found.append(cell)
            rows.append([
                f"{network}, p = {share:g}", str(cell.cell.recipe.training.epochs), f"**{accuracy(cell, 4)}**",
                of_paper(cell.cell.paper), of_paper(theirs),
                delta(cell), f"{standard_errors(cell):.1f}", ticket_bytes(cell),
            ])  # fmt: skip
    what = "Recipes `best-*` on CIFAR-10, test accuracy in %; Δ is ours minus the paper's IMP, s.e. the same in "
    what += "standard errors of the difference (with n = 3 for the paper, which does not say); ticket of the last seed"
    head = ["", "epochs", "ours", "IMP, paper", "IteRand, paper", "Δ", "s.e.", "ticket"]
    return [*caption(what, found, 4, "iterand reproduce best --seeds 4"), *markdown(head, rows)]


def standard_errors(cell: CellOutcome) -> float:
    """The difference to the paper in standard errors of the difference; for the paper's means n = 3 is assumed."""
    ours, paper = cell.summary, cell.cell.paper
    if ours is None or paper is None or ours.std is None or paper.std is None:
        raise ValueError(f"{cell.cell.label} has no deviations to compare")
    return compare(ours, paper).difference / (ours.std**2 / ours.n + paper.std**2 / 3) ** 0.5


def best() -> Lines:
    """Our recipes beside dense SGD and magnitude pruning on the same data, and beside the paper."""
    rows, found = [], []
    for (network, _), dense in cells("best", method="dense SGD").items():
        for (share,), ours in sorted(cells("best", network=network, method="IteRand").items()):
            imp = cells("best", network=network, method="IMP").get((share,))
            found += [ours, dense, *([imp] if imp else [])]
            rows.append([
                f"{network}, {100 * share:g} %", *_best_in_bold(ours, imp), accuracy(dense, 3),
                *_of_paper(ours), ticket_bytes(ours), size(4 * ours.runs[0].result["weights"]),
            ])  # fmt: skip
    what = "CIFAR-10, test accuracy in % by the share of pruned weights; search: `iterand` with the recommended "
    what += "settings, which trains no weight; IMP: iterative magnitude pruning, which trains them four times; dense "
    what += "SGD prunes nothing; both have the data and augmentation of the search at 90 % (Conv6: 50 %); VGG11 up to "
    what += "70 % is searched with cutout, too, and ResNet20 at 99 % without augmentation; blank: not run; the higher "
    what += "mean of search and IMP in bold; tickets of the last seed"
    head = ["", "search", "IMP", "dense SGD", "IMP, paper", "IteRand, paper", "ticket", "float32"]
    return [*caption(what, found, 3, "iterand reproduce best --seeds 4"), *markdown(head, rows)]


def _of_paper(cell: CellOutcome) -> tuple[str, str]:
    """The paper's IMP and its IteRand for a cell of ours."""
    place = dict(cell.cell.axes)
    if place["network"] not in OPENLTH:
        return "", of_paper(cell.cell.paper)
    return of_paper(cell.cell.paper), of_paper(find_number("imp", place | {"method": "IteRand (SC)"}))


def _best_in_bold(ours: CellOutcome, imp: CellOutcome | None) -> tuple[str, str]:
    """Two accuracies, the higher one in bold if both have runs; that of IMP is the second."""
    if imp is None or not (ours.summary and imp.summary):
        return accuracy(ours, 3), ""
    first, second = accuracy(ours, 3), accuracy(imp, 3)
    return (f"**{first}**", second) if ours.summary.mean > imp.summary.mean else (first, f"**{second}**")


def best_cells() -> Lines:
    """Every cell of our recipes that has runs."""
    found = outcome("best").finished
    what = "Recipes `best-*` on CIFAR-10, test accuracy in %; paper: IMP for ResNet20 and VGG11, IteRand for the others"
    return [*caption(what, found, 4, "iterand reproduce best --seeds 4"), *beside_paper(found)]


def tiny() -> Lines:
    """Small tickets of ResNet20, by validation accuracy."""
    best_tiny = cells("best", network="ResNet20", method="best-tiny")[0.95,]
    found = [("float32", cells("best", network="ResNet20", method="IteRand")[0.95,].runs)]
    found += [("half precision (`best-tiny`)", best_tiny.runs)]
    tried = [run for run in explored("resnet20") if run.recipe.training.norm_statistics == "recomputed_half"]
    found += [("half precision", [run]) for run in sorted(tried, key=lambda run: -run.result["ticket_bytes"])]
    rows = []
    for statistics, runs in found:
        recipe, last = runs[0].recipe, runs[-1].result
        rows.append([
            f"ρ = {recipe.network.width_factor:g}, p = {recipe.method.sparsity:g}", statistics,
            mean_of([run.result["validation_accuracy"] for run in runs], 1), size(last["ticket_bytes"]),
        ])  # fmt: skip
    text = "*ResNet20 on CIFAR-10, 160 epochs, validation accuracy in %, mean ± standard deviation, n = 1 (seed 0) "
    text += "unless a cell says otherwise; NVIDIA H200, bfloat16; "
    text += "`iterand train best-tiny --set width_factor=0.5 --set sparsity=0.8`.*"
    return [text, "", *markdown(["", "statistics", "validation", "ticket"], rows, left=2)]


UNTRAINED = "dense SGD, norms untrained"
PEERS = ("dense SGD", UNTRAINED, "IMP")  # methods of the experiment best that train weights


def best_peers() -> Lines:
    """The search beside dense SGD and magnitude pruning with the same data, schedule and statistics."""
    rows, found, rates = [], [], []
    for (network, _), dense in cells("best", method="dense SGD").items():
        pruned = cells("best", network=network, method="IMP")
        recipe = dense.cell.recipe
        rates.append(f"{network} {recipe.learning_rate.initial:g}, {recipe.optimizer.weight_decay:g}")
        found.append(dense)
        searches = {place: cell for place, cell in cells("best", network=network).items() if place[0] not in PEERS}
        for (_, sparsity), search in sorted(searches.items(), key=lambda found: found[0][1]):
            imp = pruned.get((sparsity,))
            peers = [entry for peer in (dense, imp) for entry in (_with_epochs(peer), _gap_of(search, peer))]
            rows.append([search.cell.label, _with_epochs(search), *peers])
            found += [search, *([imp] if imp else [])]
    what = "CIFAR-10, test accuracy in % (epochs); gaps are search minus the other, ± its standard error; learning "
    what += f"rate and weight decay of dense SGD and IMP: {'; '.join(rates)}"
    head = ["", "search", "dense SGD", "gap", "IMP", "gap"]
    return [*caption(what, found, 3, "iterand reproduce best"), *markdown(head, rows)]


def tuned(usual: Recipe) -> dict[tuple[int, float, float], float]:
    """Validation accuracy of a recipe with other epochs, learning rates and weight decays, by these three."""
    found = {}
    for run in explored(usual.network.name):
        recipe = run.recipe
        settings = {"optimizer": recipe.optimizer, "learning_rate": recipe.learning_rate}
        if recipe == replace(usual, **settings, training=replace(usual.training, epochs=recipe.training.epochs)):
            place = recipe.training.epochs, recipe.learning_rate.initial, recipe.optimizer.weight_decay
            found[place] = float(run.result["validation_accuracy"])
    return found


def dense_grid() -> Lines:
    """How the learning rate and weight decay of dense SGD were chosen."""
    rows, decays = dict[tuple[str, int, float], dict[float, str]](), set[float]()
    for (network, _), whole in cells("best", method="dense SGD").items():
        usual = whole.cell.recipe
        found, chosen = tuned(usual), (usual.learning_rate.initial, usual.optimizer.weight_decay)
        if usual.training.epochs in {epochs for epochs, _, _ in found}:
            (first,) = [run for run in whole.runs if run.recipe.seed == usual.seed]
            found[usual.training.epochs, *chosen] = float(first.result["validation_accuracy"])
        for (epochs, rate, decay), value in sorted(found.items()):
            text = f"**{value:.2f}**" if (rate, decay) == chosen else f"{value:.2f}"
            rows.setdefault((network, epochs, rate), {})[decay] = text
            decays.add(decay)
    text = "*Dense SGD on CIFAR-10, validation accuracy in % by learning rate and weight decay (columns); the chosen "
    text += "settings in bold; n = 1 (seed 0); NVIDIA H200, bfloat16; `iterand train best-resnet18-sgd --set epochs=20 "
    text += "--set learning_rate.initial=0.025`.*"
    table = [
        [network, str(epochs), f"{rate:g}", *(found.get(decay, "") for decay in sorted(decays))]
        for (network, epochs, rate), found in rows.items()
    ]
    return [text, "", *markdown(["", "epochs", "learning rate", *(f"{decay:g}" for decay in sorted(decays))], table)]


def untrained_norms() -> Lines:
    """Dense SGD with and without trained norms: short runs by validation accuracy, and whole ones."""
    rows, found = [], []
    for (network, _), whole in cells("best", method="dense SGD").items():
        if network not in UNTRAINED_NORMS:
            continue
        usual = whole.cell.recipe
        with_norms, without = tuned(usual), tuned(replace(usual, method=replace(usual.method, train_norms=False)))
        both = with_norms.keys() & without.keys()
        (epochs,) = {epochs for epochs, _, _ in both}
        others = cells("best", network=network, method=UNTRAINED).get((0.0,))
        short = [f"{max(grid[place] for place in both):.2f}" for grid in (with_norms, without)]
        search = min(cells("best", network=network, method="IteRand").items())[1]
        untrained = others.summary if others else None
        rows.append([
            f"{network}, {search.cell.label.partition(', ')[2]}", str(epochs), *short, accuracy(whole, 3),
            _shown(untrained, 3), accuracy(search, 3), _gap(search.summary, untrained),
        ])  # fmt: skip
        found += [whole, search, *([others] if others else [])]
    what = "Dense SGD on CIFAR-10 whose norms learn a scale and a shift, or neither (untrained), accuracy in %; short: "
    what += "validation, the best of six settings with one run each; whole: test, with the chosen settings; gap: "
    what += "search minus dense SGD with untrained norms, ± its standard error"
    head = ["", "epochs", "short", "short, untrained", "whole", "whole, untrained", "search", "gap"]
    return [*caption(what, found, 3, "iterand reproduce --only 'best/*norms untrained'"), *markdown(head, rows)]


def untrained_norms_probe() -> Lines:
    """The search beside dense SGD with and without trained norms, on 30,000 validation images."""
    found: dict[tuple[str, str], list[float]] = {}
    read = read_json("untrained-norms.json")
    for run in read["runs"]:
        _, _, decay = run["command"].partition("weight_decay=")
        found.setdefault((run["label"], f"{float(decay.split()[0]):g}"), []).append(run["validation_accuracy"])
    rows = [[label, decay, mean_of(values, 1)] for (label, decay), values in found.items()]
    text = "*ResNet18 trained with 20,000 images of CIFAR-10 for 80 epochs, the search at p = 0.9, accuracy in % on "
    text += "30,000 other training images, n = 1 (seed 0) unless a cell says otherwise; "
    text += f"{machine(read['environment'])}, bfloat16; `tools/probe_untrained_norms.py`.*"
    return [text, "", *markdown(["", "weight decay", "validation"], rows)]


def _with_epochs(cell: CellOutcome | None) -> str:
    if cell is None or cell.summary is None:
        return ""
    number, epochs = accuracy(cell, cell.summary.n), cell.cell.recipe.training.epochs
    return f"{number} ({epochs})" if cell.summary.n == 3 else f"{number} ({epochs}; n = {cell.summary.n})"


def _gap_of(ours: CellOutcome, other: CellOutcome | None) -> str:
    """The gap between two cells."""
    return _gap(ours.summary, other.summary if other else None)


def _gap(ours: Summary | None, other: Summary | None) -> str:
    """The difference of two means, and the standard error of the difference."""
    if not (ours and other) or None in (ours.std, other.std):
        return ""
    error = sum(float(one.std or 0) ** 2 / one.n for one in (ours, other)) ** 0.5
    return f"{ours.mean - other.mean:+.2f} ± {error:.2f}".replace("-", "−")


def few_labels() -> Lines:
    """Recipes on a tenth of the labels of CIFAR-10, with the gap to dense SGD."""
    rows, found = [], list(cells("few-labels").values())
    for cell in found:
        place = dict(cell.cell.axes)
        chosen = ", weight decay chosen" if "chosen" in place["method"] else ""
        (dense,) = cells("few-labels", network=place["network"], method=f"dense SGD{chosen}").values()
        is_dense = cell is dense
        rows.append([
            cell.cell.label, accuracy(cell, 3), "" if is_dense else _gap_of(cell, dense),
            "" if is_dense else ticket_bytes(cell),
        ])  # fmt: skip
    what = (
        "CIFAR-10 with 4,500 training images, test accuracy in %, 100 epochs; gap to dense SGD ± its standard error, "
    )
    what += "to that with a chosen weight decay where the row has one; ticket of the last seed"
    head = ["", "test", "gap", "ticket"]
    return [*caption(what, found, 3, "iterand reproduce few-labels"), *markdown(head, rows)]


def weight_decay() -> Lines:
    """ResNet18 on a tenth of the labels by weight decay: validation accuracy of the search and of dense SGD."""
    found: dict[float, dict[str, list[float]]] = {}
    for method, sparsity in (("ours", 0.9), ("dense SGD", 0.0)):
        usual = cells("few-labels", network="ResNet18")[method, sparsity].cell.recipe
        for run in records():
            decay = run.recipe.optimizer.weight_decay
            optimizer = replace(usual.optimizer, weight_decay=decay)
            if run.recipe == replace(usual, seed=run.recipe.seed, optimizer=optimizer):
                by_method = found.setdefault(decay, {"ours": [], "dense SGD": []})
                by_method[method].append(run.result["validation_accuracy"])
    rows = [
        [f"{decay:g}", *(mean_of(one, 1) if one else "" for one in found[decay].values())] for decay in sorted(found)
    ]
    text = "*ResNet18 on CIFAR-10 with 4,500 training images, 100 epochs, validation accuracy in %; mean ± standard "
    text += "deviation, n = 1 (seed 0) unless a cell says otherwise; the search at p = 0.9; NVIDIA H200, bfloat16; "
    text += "`iterand train best-resnet18 --set sparsity=0.9 --set train_limit=4500 --set weight_decay=0.001`.*"
    return [text, "", *markdown(["weight decay", "search", "dense SGD"], rows)]


def long() -> Lines:
    """The search of ResNet18, alone and with a teacher, and dense SGD, by epochs."""
    rows, found = [], []
    for name in ("best", "long"):
        there = cells(name, network="ResNet18")
        search, dense = there[("IteRand", 0.9)], there[("dense SGD", 0.0)]
        taught, taught_dense = (
            summarize([run.result["test_accuracy"] for run in _taught(cell.cell.recipe, dense)])
            for cell in (search, dense)
        )
        numbers = [entry for ours in (search.summary, taught) for entry in (_shown(ours, 3), _gap(ours, dense.summary))]
        rows.append([str(search.cell.recipe.training.epochs), accuracy(dense, 3), *numbers, _shown(taught_dense, 3)])
        found += [search, dense]
    what = "ResNet18 on CIFAR-10, test accuracy in %; search at p = 0.9; the teacher is one run of dense SGD of as "
    what += "many epochs (weight of 0.9, temperature of 4); gaps are search minus dense SGD, ± its standard error"
    head = ["epochs", "dense SGD", "search", "gap", "search with a teacher", "gap", "dense SGD with a teacher"]
    return [*caption(what, found, 3, "iterand reproduce long"), *markdown(head, rows)]


def _taught(recipe: Recipe, teacher: CellOutcome) -> list[Record]:
    """The runs of this recipe with one of these runs as the teacher."""
    folders = {str(default_path(run.recipe)) for run in teacher.runs}

    def alone(run: Record) -> Recipe:
        training = run.recipe.training
        training = replace(training, teacher="", teacher_sha256="", teacher_weight=0.5, teacher_temperature=1.0)
        return replace(run.recipe, seed=recipe.seed, training=training)

    found = explored(recipe.network.name)
    return [run for run in found if run.recipe.training.teacher in folders and alone(run) == recipe]


def label_smoothing() -> Lines:
    """VGG11 at p = 0.9 with and without label smoothing, by validation accuracy."""
    with_it = cells("best", network="VGG11", method="IteRand")[0.9,]
    usual, rows = with_it.cell.recipe, []
    plain = replace(usual, training=replace(usual.training, label_smoothing=0.0))
    without = [run for run in explored("vgg11") if replace(run.recipe, seed=usual.seed) == plain]
    seeds = {run.recipe.seed for run in without}
    smoothed = [run for run in with_it.runs if run.recipe.seed in seeds]
    for label, runs in (("label smoothing of 0.1 (the recipe)", smoothed), ("none", without)):
        summary = summarize([float(run.result["validation_accuracy"]) for run in runs])
        if summary:
            rows.append([label, plus_minus(summary.mean, summary.std)])
    what = f"VGG11 at p = 0.9, validation accuracy in %; mean ± standard deviation, n = {len(without)} (seeds 0-2)"
    command = "iterand train best-vgg11 --set sparsity=0.9 --set label_smoothing=0"
    return [f"*{what}; NVIDIA H200, bfloat16; `{command}`.*", "", *markdown(["", "validation"], rows)]


def gain() -> Lines:
    """Larger weights in networks without norms."""
    found = cells("gain")
    gains = list(dict.fromkeys(gain for _, _, gain in found))
    rows, shown = [], []
    for network, sparsity in dict.fromkeys((network, sparsity) for network, sparsity, _ in found):
        there = [found.get((network, sparsity, gain)) for gain in gains]
        if sum(cell is not None for cell in there) < 2:
            continue  # nothing to compare yet
        rows.append([f"{network}, p = {sparsity:g}", *(accuracy(cell, 3) if cell else "" for cell in there)])
        shown += [cell for cell in there if cell]
    what = "Test accuracy in % by the gain of the weights; digits of scikit-learn by the recipe `digits`, with ρ = 1 "
    what += "unless a row says otherwise, Conv6 on CIFAR-10 by `best-conv6`"
    return [*caption(what, shown, 3, "iterand reproduce gain"), *markdown(["", *map(str, gains)], rows)]


def ablation() -> Lines:
    """One part of the recipe left out at a time."""
    found = cells(ABLATION, sparsity=0.9)
    (whole,) = (cell for (label,), cell in found.items() if label == "all of it")
    parts = [(label, cell) for (label,), cell in found.items() if cell is not whole]
    parts.sort(key=lambda part: part[1].summary.mean if part[1].summary else 0.0)
    rows = [["all of it", f"**{accuracy(whole, 3)}**", ""]]
    for label, cell in parts:
        if cell.summary and whole.summary:
            lost = f"{cell.summary.mean - whole.summary.mean:+.2f}".replace("-", "−")
            rows.append([str(label), accuracy(cell, 3), lost])
    what = "ResNet20 at p = 0.9 on CIFAR-10, 40 epochs, test accuracy in %, one part left out at a time"
    command = "iterand reproduce --only 'ablation/p = 0.9*'"
    return [*caption(what, found.values(), 3, command), *markdown(["", "test", "difference"], rows)]


def family() -> Lines:
    """Kinds of masks: accuracy with and without randomization at two sparsities, and the ticket at the lower."""
    columns = [(sparsity, way) for sparsity in (0.5, 0.9) for way in ("never redrawn", "IteRand")]
    lines, shown = [], []
    for network in ("Conv6", "ResNet18"):
        for settings, whose in (("the paper's", "the paper's"), ("ours", "our")):
            found = cells("family", network=network, settings=settings)
            kinds = dict.fromkeys(kind for _, kind, _ in found)
            if len(kinds) < 2:
                continue  # nothing to compare yet
            rows = []
            for kind in kinds:
                there = [found.get((sparsity, kind, way)) for sparsity, way in columns]
                first = next(cell for cell in there if cell)
                name = f"{kind} ({first.cell.recipe.method.coats} coats)" if kind == "multi-coated" else str(kind)
                sizes = [ticket_bytes(there[number]) if there[number] else "" for number in (1, 3)]
                rows.append([name, *(accuracy(cell, 1) if cell else "" for cell in there), *sizes])
            head = [f"{network}, {whose} settings", *(f"p = {sparsity:g}, {way}" for sparsity, way in columns)]
            table = [[*head, "ticket, p = 0.5", "ticket, p = 0.9"], *rows]
            filled = [number for number in range(len(table[0])) if any(row[number] for row in rows)]
            head, *rows = [[row[number] for number in filled] for row in table]
            lines += [*markdown(head, rows), ""]
            shown += list(found.values())
    what = "Kinds of masks on CIFAR-10, test accuracy in %, and tickets with IteRand"
    return [*caption(what, shown, 1, "iterand reproduce family"), *lines[:-1]]


def claims() -> Lines:
    """What papers claim of other kinds of masks."""
    found = outcome("claims").finished
    rows = []
    for cell in found:
        number = cell.cell.paper
        published = f"{of_paper(number)}, {number.where}" if number else ""
        rows.append([cell.cell.label, accuracy(cell, 3), published, delta(cell)])
    what = "CIFAR-10, test accuracy in %"
    return [*caption(what, found, 3, "iterand reproduce claims"), *markdown(["", "ours", "published", "Δ"], rows)]


def norm_statistics() -> Lines:
    """Running averages beside recomputed statistics."""
    found: dict[tuple[str, float], Record] = {}
    for run in records():
        recipe = run.recipe
        settings = (
            recipe.network.name,
            recipe.method.name,
            recipe.training.epochs,
            recipe.data.augmentation,
            recipe.seed,
        )
        if settings == ("resnet20", "iterand", 160, "crop", 0) and recipe.method.norms == "shifted":
            place = recipe.training.norm_statistics, recipe.method.sparsity
            if place in found:
                raise ValueError(f"two runs have {place}")
            found[place] = run
    rows = [
        [label, *(f"{found[kind, share].result['test_accuracy']:.2f}" for share in SPARSITIES)]
        for kind, label in (("running", "running averages"), ("recomputed", "recomputed"))
    ]
    text = "*ResNet20 on CIFAR-10 with augmentation, 160 epochs, test accuracy in %, seed 0 (n = 1); p = 0.99 with the "
    text += (
        "settings of p = 0.9; NVIDIA H200, bfloat16; `iterand train best-resnet20 --set sparsity=0.9 --set epochs=160 "
    )
    text += "--set augmentation=crop --set norm_statistics=running`.*"
    return [text, "", *markdown(["", *(f"p = {share:g}" for share in SPARSITIES)], rows)]


def own_model() -> Lines:
    """The example with a small network on digits."""
    shares = ("0.5", "0.9")
    records = {share: read_json(f"own-model-{share}.json") for share in shares}
    rows = []
    for name in records["0.5"]["ways"]:
        row = [name]
        for share in shares:
            way = records[share]["ways"][name]
            summary = summarize(way["test_accuracies"])
            if summary is None:
                raise ValueError(f"{name} has no runs")
            row += [plus_minus(summary.mean, summary.std), size(sum(way["bytes"]) / len(way["bytes"]))]
        rows.append(row)
    text = "*Test accuracy in % and size of the file on scikit-learn's digits, 60 epochs; mean ± standard "
    text += "deviation, n = 3 (seeds 0-2); one core of a Neoverse-N1, float32; "
    text += "`OMP_NUM_THREADS=1 python examples/own_model.py --sparsity 0.5`.*"
    head = ["", *(entry for share in shares for entry in (f"p = {share}", "size"))]
    return [text, "", *markdown(head, rows)]


def experiments() -> Lines:
    """All experiments, and how much of each has been run."""
    rows = []
    for entry in report().outcomes:
        experiment = entry.experiment
        seeds = sorted({len(cell.runs) for cell in entry.cells if cell.runs})
        span = "-".join(map(str, dict.fromkeys((seeds[0], seeds[-1])))) if seeds else "0"
        runs = f"{entry.done} of {len(entry.cells)}" + (f", n = {span}" if seeds else "")
        where = "" if experiment.where in ("", "ours") else experiment.where
        rows.append([f"`{experiment.name}`", where, experiment.title, f"{len(entry.cells)} × {experiment.seeds}", runs])
    text = "*Experiments and their cells with recorded runs; `iterand reproduce EXPERIMENT` runs what is missing.*"
    return [
        text,
        "",
        *markdown(["experiment", "in the paper", "what", "cells × seeds", "cells with runs"], rows, left=3),
    ]


def folders() -> Lines:
    """The folders of records."""
    about = {
        "ablation": "one part of `best-resnet20` left out at a time, 40 epochs",
        "benchmarks": "speed, memory, ticket sizes, the theory, probes: everything that is not a run",
        "best": "the recipes `best-*`",
        "claims": "what the papers of other kinds of masks claim",
        "digits": "the quickstart",
        "exploration": "runs with other settings, which no table of an experiment counts",
        "family": "other kinds of masks",
        "few-labels": "CIFAR-10 with a tenth of its labels",
        "gain": "the gain of the weights, in networks without norms",
        "figure1": "Figure 1, the rate r",
        "figure2": "Figure 2 (Table 3) of the paper",
        "imagenet-tree": "ResNet50 by its ImageNet recipe on a made-up tree of 10 classes",
        "imdb": "Table 10, film reviews",
        "imp": "Table 7, beside magnitude pruning",
        "long": "300 epochs of ResNet18",
        "period": "Figure 4, the period K_per",
        "sparsity": "Table 6",
        "width": "Table 8, the width that edge-popup needs",
    }
    there = sorted(path for path in (RESULTS / "records").iterdir() if path.is_dir())
    rows = [[f"`records/{path.name}`", about[path.name], str(len(list(path.iterdir())))] for path in there]
    return markdown(["folder", "what", "files"], rows, left=2)


TABLES: dict[str, Callable[[], Lines]] = {
    "digits": digits,
    "tiny": tiny,
    "figure2": figure2,
    "figure2-conv6": lambda: figure2_wide("Conv6"),
    "figure2-resnet18": lambda: figure2_wide("ResNet18"),
    "figure2-resnet34": lambda: figure2_wide("ResNet34", usual=1),
    "narrow-conv6": narrow_conv6,
    "width-saved": width_saved,
    "sparsity": lambda: across("sparsity", "p", "Table 6, test accuracy in %", 3),
    "imp": lambda: across("imp", "p", "Table 7, test accuracy in %", 1),
    "width": lambda: across("width", "ρ", "Table 8, ResNet18 with Kaiming uniform weights, test accuracy in %", 1),
    "rates-and-periods": rates_and_periods,
    "sparse-conv6": sparse_conv6,
    "imdb": imdb,
    "imdb-runs": imdb_runs,
    "word-vectors": word_vectors,
    "imdb-settings": imdb_settings,
    "best": best,
    "best-cells": best_cells,
    "best-networks": best_networks,
    "best-imp": best_imp,
    "best-peers": best_peers,
    "dense-grid": dense_grid,
    "few-labels": few_labels,
    "weight-decay": weight_decay,
    "gain": gain,
    "long": long,
    "label-smoothing": label_smoothing,
    "untrained-norms": untrained_norms,
    "untrained-norms-probe": untrained_norms_probe,
    "ablation": ablation,
    "family": family,
    "claims": claims,
    "norm-statistics": norm_statistics,
    "own-model": own_model,
    "experiments": experiments,
    "folders": folders,
} | measured_tables.TABLES


def main(arguments: Sequence[str]) -> int:
    """Write, check or list."""
    if arguments == ["--list"]:
        print("\n".join(TABLES))
    elif arguments == ["--check"]:
        found = [(path, name) for path in pages() for name in stale(path.read_text(encoding="utf-8"))]
        for path, name in found:
            print(f"{path}: table {name} is stale; run python tools/tables.py")
        return 1 if found else 0
    elif arguments:
        print(__doc__)
        return 2
    else:
        for path in pages():
            page = path.read_text(encoding="utf-8")
            path.write_text(filled(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
