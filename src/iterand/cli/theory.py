"""``iterand theory``: Section 4 of the paper: its bounds, exact probabilities, simulations and constructions."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import track
from rich.table import Table

from iterand.checks import counted, shown
from iterand.cli.console import counting, err, out, print_json
from iterand.cli.options import Json, named
from iterand.errors import extra

if TYPE_CHECKING:
    from iterand.lab.theory.construct import Summary
    from iterand.lab.theory.simulate import Estimate


class Weights(StrEnum):
    """Distributions of random weights with a theory."""

    UNIFORM = "uniform"
    SIGNED_CONSTANT = "signed_constant"


def _check_plot(path: Path | None) -> Path | None:
    # An option callback, so that a wrong suffix is refused before the computation.
    if path is not None:
        with extra("lab", "drawing"):
            from iterand.lab.theory.tables import kind_of
        kind_of(path)
    return path


@contextmanager
def _loading() -> Iterator[None]:
    """Import the theory and what it needs, which takes seconds."""
    with err.status("loading"), extra("lab", "the theory"):
        yield


app = typer.Typer(no_args_is_help=True, help="How wide a random network must be, and what redraws save.")

Epsilon = Annotated[float, typer.Option(help="Allowed error ε.")]
Delta = Annotated[float, typer.Option(help="Allowed probability of failure δ.")]
Rounds = Annotated[int | None, typer.Option(help="R, the number of draws of each weight (default: a range).")]
RandomWeights = Annotated[
    Weights, typer.Option("--weights", help="Random weights: from U[-1, 1] as in the paper, or ±c with equal chances.")
]
Trials = Annotated[int, typer.Option(help="Number of simulated networks.")]
Seed = Annotated[int, typer.Option(help="Seed of all draws.")]
Plot = Annotated[Path | None, typer.Option(callback=_check_plot, help="Also plot into this file (svg, png, pdf).")]


@app.command()
def width(
    epsilon: Epsilon = 0.1,
    delta: Delta = 0.05,
    rounds: Rounds = None,
    widths: Annotated[str, typer.Option(help="Widths d_0,…,d_l of the target; 1,1 is f(x) = w·x.")] = "1,1",
    weights: RandomWeights = Weights.UNIFORM,
    trials: Trials = 1000,
    seed: Seed = 0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """The hidden width that is enough.

    With uniform weights: by the paper's bound and by the repaired one. With signed_constant: by its bound, and for
    widths 1,1 also exact and over the number of layers. For widths 1,1 both are simulated, too.
    """
    with _loading():
        from iterand.lab.theory import bounds, exact, tables

    sizes = _parse_widths(widths)
    if weights is Weights.SIGNED_CONSTANT:
        _signed_width(epsilon, delta, rounds, sizes, trials, seed, plot, as_json)
        return
    chosen = [rounds] if rounds is not None else tables.rounds_over(epsilon, delta, sizes)
    with counting("simulating", tables.width_rows_draws(epsilon, sizes, chosen, trials)) as advance:
        rows = [tables.width_row(epsilon, delta, sizes, count, trials, seed, advance) for count in chosen]
    needed = {
        "paper": tables.claimed_rounds(epsilon, delta, sizes),
        "repaired": exact.repaired_rounds(epsilon, delta, sizes),
        "at_least": bounds.width_two_rounds(epsilon, delta) if sizes == tables.SCALAR else None,
    }
    malach = bounds.malach_width_scale(epsilon, delta, max(sizes), len(sizes) - 1)
    pensia = bounds.pensia_width_scale(epsilon, delta, max(sizes), len(sizes) - 1)
    if plot:
        tables.draw_widths(rows, plot)
    if as_json:
        print_json(
            {
                "epsilon": epsilon,
                "delta": delta,
                "target_widths": sizes,
                "rounds_for_twice_the_width": needed,
                "scales_without_redraws": {"malach": malach, "pensia": pensia},
                "rows": [asdict(row) for row in rows],
            }
        )
        return
    table = Table("R", "paper", "repaired", "simulated", title=f"hidden width, ε = {epsilon:g}, δ = {delta:g}")
    for row in rows:
        simulated = "" if row.simulated is None else str(row.simulated)
        table.add_row(str(row.rounds), _join(row.paper), _join(row.repaired), simulated)
    out.print(table)
    floor = f"; at least {needed['at_least']} whatever is done" if needed["at_least"] else ""
    out.print(
        f"R for twice the width of the target: paper {needed['paper']}, repaired {needed['repaired']}{floor}",
        highlight=False,
    )
    out.print(
        f"without redraws, up to a constant: Malach et al. {malach:.3g}, Pensia et al. {pensia:.3g}", highlight=False
    )


@app.command()
def simulate(
    epsilon: Epsilon = 0.1,
    delta: Delta = 0.05,
    rounds: Rounds = None,
    weight: Annotated[float, typer.Option(help="w of the target f(x) = w·x.")] = 1.0,
    weights: RandomWeights = Weights.UNIFORM,
    trials: Trials = 20_000,
    seed: Seed = 0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """How often a random network has no subnetwork for f(x) = w·x.

    With uniform weights: how often the proof fails at width 2, by its bound, exact and simulated, and how often the
    best draws and masks fail. With signed_constant: how often the best draws and masks fail at the least width and at
    twice that, exact and simulated.
    """
    with _loading():
        from iterand.lab.theory import tables

    if weights is Weights.SIGNED_CONSTANT:
        _signed_simulate(epsilon, delta, rounds, weight, trials, seed, plot, as_json)
        return
    chosen = [rounds] if rounds is not None else tables.rounds_over(epsilon, delta)
    total = tables.failure_rows_draws(epsilon, chosen, weight=weight, trials=trials)
    with counting("simulating", total) as advance:
        rows = tables.failure_rows(epsilon, chosen, weight=weight, trials=trials, seed=seed, progress=advance)
    with err.status("trying every choice"):
        small = tables.best_rows(weight, seed=seed)
    if plot:
        tables.draw_failures(rows, plot)
    if as_json:
        settings = {"epsilon": epsilon, "delta": delta, "weight": weight, "trials": trials, "seed": seed}
        print_json({**settings, "rows": [asdict(row) for row in rows], "exhaustive": [asdict(row) for row in small]})
        return
    halves = Table("R", "paper", "exact", "simulated", title=f"failure of one half, ε = {epsilon:g}, w = {weight:g}")
    both = Table("R", "exact", "simulated", "with the best draws and masks", title="failure of both halves together")
    for row in rows:
        count = str(row.rounds)
        halves.add_row(count, f"{row.paper_half:.3g}", f"{row.exact_half:.3g}", _interval(row.simulated_half))
        both.add_row(count, f"{row.exact:.3g}", _interval(row.simulated), _interval(row.best))
    errors = Table("width", "R", "best draws and masks", "construction", title="median error, every choice tried")
    for case in small:
        errors.add_row(str(case.width), str(case.rounds), f"{case.best:.3g}", f"{case.construction:.3g}")
    out.print(halves, both, errors)


@app.command()
def construct(
    epsilon: Epsilon = 0.1,
    delta: Delta = 0.05,
    rounds: Annotated[
        int | None, typer.Option(help="R, the number of draws of each weight (default: enough for the least width).")
    ] = None,
    hidden: Annotated[int, typer.Option(help="Hidden width of the target network, which is trained on digits.")] = 12,
    weights: RandomWeights = Weights.UNIFORM,
    trials: Annotated[int, typer.Option(help="Number of networks to build, from consecutive seeds.")] = 1,
    seed: Seed = 0,
    ticket: Annotated[Path | None, typer.Option(callback=named, help="Save the first network as a ticket.")] = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Build the network of the theorem and prove its error. The target is trained on digits."""
    with _loading():
        from iterand.lab.theory.bounds import check_count
        from iterand.lab.theory.construct import Experiment, digits_experiment, error_rows
        from iterand.lab.theory.signed_construct import SignedExperiment
        from iterand.lab.theory.simulate import check_draws

    check_count("trials", trials)
    constant = weights is Weights.SIGNED_CONSTANT
    if plot and constant:
        raise ValueError("plot shows the error over R, and with signed constants R does not change it; leave it out")
    with err.status("training the target"):
        kind = SignedExperiment if constant else Experiment
        experiment = digits_experiment(hidden, epsilon, delta, rounds, kind)
    total = trials * experiment.draws
    check_draws(total, f"building {counted(trials, 'network')} with up to {counted(experiment.rounds, 'round')}")
    done = []
    with counting("building", total) as advance:
        for number in range(seed, seed + trials):
            trial, model = experiment.run(number, advance)
            done.append(trial)
            if ticket and number == seed:
                from iterand.ticket import save_ticket

                save_ticket(model, ticket)
    if plot:
        from iterand.lab.theory import tables

        grid = [4**power for power in range(2, 8)]
        curve = error_rows(experiment.target, grid, seed)
        tables.draw_errors(list(track(curve, "drawing", len(grid), console=err, transient=True)), plot)
    summary = experiment.summary(done)
    if as_json:
        chosen = f"--weights {weights} " if constant else ""
        command = (
            f"iterand theory construct --epsilon {epsilon:g} --delta {delta:g} --rounds {summary.rounds} "
            f"--hidden {hidden} {chosen}--trials {trials} --seed {seed} --json"
        )
        print_json({"command": command, **asdict(summary), "rows": [asdict(trial) for trial in done]})
        return
    out.print(_summary_table(summary, f"ε = {epsilon:g}, δ = {delta:g}"))


def _summary_table(summary: "Summary", given: str) -> Table:
    """What some constructions have in common; ``given`` is ε and δ in words."""
    title = f"target {_join(summary.target_widths, '-')}, {given}"
    table = Table("", "", title=title, show_header=False)
    table.add_row("draws of every weight, R", str(summary.rounds))
    table.add_row("hidden widths", _join(summary.hidden_widths))
    table.add_row("probability that the event fails", f"{summary.exact_failure:.3g}")
    table.add_row("trials with a proven error within ε", f"{summary.within_epsilon} of {summary.trials}")
    table.add_row("trials in which the event held", f"{summary.event_held} of {summary.trials}")
    table.add_row("largest error found", f"{summary.largest_measured:.4g}")
    table.add_row("largest error proven", f"{summary.largest_proven:.4g}")
    table.add_row("accuracy of the target", f"{summary.target_accuracy:.2%}")
    table.add_row("accuracy of the constructions", f"{summary.lowest_accuracy:.2%} to {summary.highest_accuracy:.2%}")
    table.add_row("decisions the proven error could change", f"{summary.largest_unprotected:.2%}")
    return table


def _signed_width(
    epsilon: float,
    delta: float,
    rounds: int | None,
    sizes: tuple[int, ...],
    trials: int,
    seed: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    with _loading():
        from iterand.lab.theory import signed, signed_tables, tables

    chosen = [rounds] if rounds is not None else signed_tables.rounds_over(epsilon, delta, sizes)
    scalar = sizes == tables.SCALAR
    with counting("simulating", signed_tables.width_rows_draws(epsilon, sizes, chosen, trials)) as advance:
        rows = [signed_tables.width_row(epsilon, delta, sizes, count, trials, seed, advance) for count in chosen]
    with err.status("counting in digits"):
        depths = signed_tables.depth_rows(epsilon, delta, trials, seed) if scalar else []
    needed = signed.bound_rounds(epsilon, delta, sizes)
    kaiming = signed.kaiming_widths(epsilon, sizes)
    if plot:
        signed_tables.draw_widths(rows, plot)
    if as_json:
        print_json(
            {
                "epsilon": epsilon,
                "delta": delta,
                "target_widths": sizes,
                "weights": Weights.SIGNED_CONSTANT,
                "steps": signed.network_steps(epsilon, sizes),
                "units": signed.scalar_units(epsilon) if scalar else None,
                "rounds_for_the_least_width": needed,
                "kaiming_widths": kaiming,
                "rows": [asdict(row) for row in rows],
                "depths": [asdict(row) for row in depths],
            }
        )
        return
    table = Table("R", "bound", "exact", "simulated", title=f"width, ±c, ε = {epsilon:g}, δ = {delta:g}")
    for row in rows:
        known = ("" if number is None else str(number) for number in (row.exact, row.simulated))
        table.add_row(str(row.rounds), _join(row.bound), *known)
    out.print(table)
    if scalar:
        head = ("layers", "base", "all signs drawn", "R for that", "one draw", "simulated failure", "at least")
        deep = Table(*head, title="hidden width over depth")
        for depth in depths:
            numbers = (depth.layers, depth.base, depth.redrawn, depth.rounds, depth.single)
            deep.add_row(*map(str, numbers), f"{depth.simulated.value:.3g}", str(depth.necessary))
        out.print(deep)
        out.print(f"two layers need a width of at least {2 * signed.scalar_units(epsilon)} at any R", highlight=False)
    out.print(f"R for the least width: {needed}", highlight=False)
    out.print(f"width at which c = √(2 / fan_in) is fine enough: {_join(kaiming)}", highlight=False)


def _signed_simulate(
    epsilon: float,
    delta: float,
    rounds: int | None,
    weight: float,
    trials: int,
    seed: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    with _loading():
        from iterand.lab.theory import signed_tables

    widths = signed_tables.failure_widths(epsilon, weight)
    chosen = [rounds] if rounds is not None else signed_tables.rounds_over(epsilon, delta)
    total = signed_tables.failure_rows_draws(epsilon, chosen, weight=weight, trials=trials)
    with counting("simulating", total) as advance:
        rows = signed_tables.failure_rows(epsilon, chosen, weight=weight, trials=trials, seed=seed, progress=advance)
    with err.status("trying every choice"):
        small = signed_tables.slope_rows()
    if plot:
        signed_tables.draw_failures(rows, widths, plot)
    if as_json:
        settings = {"epsilon": epsilon, "delta": delta, "weight": weight, "trials": trials, "seed": seed}
        kind = {"weights": Weights.SIGNED_CONSTANT, "widths": widths}
        tables = {"rows": [asdict(row) for row in rows], "exhaustive": [asdict(row) for row in small]}
        print_json({**settings, **kind, **tables})
        return
    title = f"failure of the best draws and masks, ±c, ε = {epsilon:g}, w = {weight:g}"
    table = Table("R", *(f"{kind}, width {width}" for width in widths for kind in ("exact", "simulated")), title=title)
    for row in rows:
        narrow = f"{row.narrow:.3g}", _interval(row.narrow_simulated)
        table.add_row(str(row.rounds), *narrow, f"{row.wide:.3g}", _interval(row.wide_simulated))
    slopes = Table("hidden widths", "best", "digits", "bound", title="largest slope, every choice tried")
    for case in small:
        slopes.add_row(_join(case.widths), str(case.best), str(case.digits), str(case.bound))
    out.print(table, slopes)


def _parse_widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"widths are {shown(text)}; name whole numbers with commas between, such as 64,12,10"
        ) from None


def _interval(estimate: "Estimate") -> str:
    return f"{estimate.value:.3g} [{estimate.low:.3g}, {estimate.high:.3g}]"


def _join(numbers: Sequence[int], between: str = ", ") -> str:
    return between.join(str(number) for number in numbers)
