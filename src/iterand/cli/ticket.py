"""``iterand ticket``: show a ticket, verify it."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from iterand.checks import counted
from iterand.cli.console import err, out, print_json, printable, say
from iterand.cli.options import Json
from iterand.errors import CheckpointError, IterandError, TicketError
from iterand.lab.report.formatting import size

if TYPE_CHECKING:
    from torch import Tensor

    from iterand.ticket import Ticket
    from iterand.ticket.inspect import Cost

app = typer.Typer(no_args_is_help=True, help="Show and verify tickets.")

File = Annotated[Path, typer.Argument(metavar="FILE", help="A ticket.")]

_SHORTEST_NAME = 16  # columns of a layer's name, however narrow the terminal is


@app.command()
def info(
    file: File,
    wide: Annotated[bool, typer.Option("--wide", help="Print layer names in full, however long.")] = False,
    json: Json = False,
) -> None:
    """Show the layers of a ticket and its size in bytes."""
    from iterand.ticket.inspect import cost, unmasked

    ticket = read(file)
    costs = cost(ticket)
    stored, share = unmasked(ticket)
    if json:
        sizes = asdict(costs)
        layers = sizes.pop("layers")
        others = {"unmasked": stored, "masked_share": share}
        print_json({"path": str(file), **_described(ticket), "layers": layers, **others, "bytes": sizes})
        return
    _print_layers(costs, wide)
    say("")
    out.print(_whole_table(ticket, costs, stored, share))


@app.command()
def verify(
    file: File,
    run: Annotated[Path | None, typer.Option(help="Folder of the run that wrote it: compare with its weights.")] = None,
    json: Json = False,
) -> None:
    """Decode a whole ticket and check it. With --run, compare it with the weights of that run."""
    ticket = read(file)
    state = decoded(file, ticket) if ticket.base is None else _checked_masks(file, ticket)
    if run is not None:
        with err.status("comparing"):
            _compare(file, state, run)
    kept = sum(layer.kept for layer in ticket.header.layers)
    if json:
        print_json({"path": str(file), "layers": len(ticket.layers), "kept": kept, "run": run and str(run), "ok": True})
        return
    what = "as they were saved" if ticket.base is None else f"of the base {printable(ticket.base)}; masks as saved"
    counts = f"{counted(len(ticket.layers), 'layer')}, {counted(kept, 'kept weight')}"
    say(f"{file}: intact; {counts}, {what}")
    if run is not None:
        say(f"equal, bit for bit, to the weights of {run}")


def _print_layers(costs: "Cost", wide: bool) -> None:
    """A line per layer; names are shortened to the width of the terminal, or to 80 columns where there is none."""
    cells = _layer_cells(costs)
    widths = [max(map(len, column)) for column in zip(*cells)]
    names = [printable(layer.name) for layer in costs.layers]
    room = max(_SHORTEST_NAME, out.width - sum(2 + width for width in widths))
    if not wide and max(map(len, names)) > room:
        names = _shortened(names, room)
    first = max(map(len, ["layer", *names]))
    for name, (shape, *numbers) in zip(["layer", *names], cells):
        aligned = [shape.ljust(widths[0]), *(number.rjust(width) for number, width in zip(numbers, widths[1:]))]
        say("  ".join([name.ljust(first), *aligned]))


def _layer_cells(costs: "Cost") -> list[list[str]]:
    """All columns but the name, headings first; redraws are left out where the ticket does not hold them."""
    known = any(layer.redrawn is not None for layer in costs.layers)
    rows = [["shape", "kept", "rounds", "redrawn", "bits"]]
    for layer in costs.layers:
        redrawn = "—" if layer.redrawn is None or not layer.kept else f"{100 * layer.redrawn / layer.kept:.1f} %"
        kept = f"{layer.kept:,} ({100 * layer.kept / layer.weights:.1f} %)"
        shape, bits = "×".join(map(str, layer.shape)), f"{layer.bits / layer.weights:.3f}"
        rows.append([shape, kept, str(layer.rounds), redrawn, bits])
    return rows if known else [[*row[:3], row[4]] for row in rows]


def _shortened(names: Sequence[str], width: int) -> list[str]:
    """The names with an ellipsis in place of their middle, cut where most of them stay distinct."""

    def cut(head: int) -> list[str]:
        tail = width - 1 - head
        return [name if len(name) <= width else f"{name[:head]}…{name[-tail:]}" for name in names]

    from_the_middle = sorted(range(1, width - 1), key=lambda head: abs(2 * head - width + 1))
    return max(map(cut, from_the_middle), key=lambda shortened: len(set(shortened)))


def _whole_table(ticket: "Ticket", costs: "Cost", stored: dict[str, tuple[int, ...]], share: float) -> Table:
    from iterand.parameter_kinds import name_tensors
    from iterand.ticket.header import stored_distribution

    weights, kept = sum(layer.weights for layer in costs.layers), sum(layer.kept for layer in costs.layers)
    settings = ticket.header.layers[0].settings
    origin = f"{printable(stored_distribution(settings))}, seed {settings.seed}"
    if ticket.base is not None:
        origin = f"those of the base {printable(ticket.base)}, which the ticket does not hold"
    parts = f"{size(costs.stream)} weights, {size(costs.other_tensors)} other tensors, {size(costs.header)} header"
    table = Table.grid(padding=(0, 2))
    table.add_row(
        "kept",
        f"{kept:,}",
        escape(f"of {weights:,} weights; {origin}"),
    )
    table.add_row("ticket", size(costs.file), f"{8 * costs.file / weights:.3f} bits per weight: {parts}")
    table.add_row("as float32", size(costs.float32), f"{costs.float32 / costs.file:.1f} times as much")
    table.add_row("entropy bound", size(round(costs.bound)), f"{100 * (1 - costs.bound / costs.file):.1f} % less")
    if stored:
        names = name_tensors({printable(name): shape for name, shape in stored.items()})
        what = f"stored in full: {names}; {100 * share:.1f} % of the numbers in matrices are masked"
        table.add_row("not masked", f"{sum(map(math.prod, stored.values())):,}", escape(what))
    for name, value in (ticket.metrics or {}).items():
        shown = f"{value:.6g}" if isinstance(value, float) else str(value)
        table.add_row(escape(printable(name)), escape(printable(shown)), "")
    return table


def _described(ticket: "Ticket") -> dict[str, object]:
    header = ticket.header
    return {
        "iterand": header.package,
        **({} if header.base is None else {"base": header.base, "base_tensors": len(header.base_tensors)}),
        "settings": [asdict(layer.settings) for layer in header.layers],
        "recipe": header.recipe,
        "metrics": header.metrics,
    }


def _compare(file: Path, state: dict[str, "Tensor"], run: Path) -> None:
    import torch

    from iterand.lab.training.checkpoint import read_checkpoint
    from iterand.lab.training.folder import RunFolder
    from iterand.lab.training.session import Session
    from iterand.masking import fold_
    from iterand.ticket import load_ticket

    saved = read_checkpoint(run)
    if saved is None:
        raise TicketError(f"{run} holds no checkpoint to compare with")
    recipe, network = RunFolder(run).recipe(), load_ticket(file).train()
    if recipe.method.trains_weights:
        raise TicketError(f"{run} is a run of {recipe.method.name!r}, which trains weights; give one of a search")
    try:
        session = Session(recipe, network, 1, torch.device("cpu"))
        session.restore(saved)
    except (ValueError, CheckpointError):
        raise TicketError(f"ticket {str(file)!r}: its network is not that of the run {str(run)!r}") from None
    theirs = fold_(session.model).state_dict()
    for name, tensor in state.items():
        if name not in theirs or not torch.equal(tensor, theirs[name]):
            raise TicketError(f"ticket {str(file)!r}: {name!r} is not what the run {str(run)!r} holds")


def read(file: Path) -> "Ticket":
    """Open a ticket that must exist."""
    from iterand.ticket import read_ticket

    if not file.exists():
        raise TicketError(f"there is no ticket {str(file)!r}")
    return read_ticket(file)


def decoded(file: Path, ticket: "Ticket") -> dict[str, "Tensor"]:
    """The tensors of a ticket; errors name its file."""
    with _decoding(file):
        return ticket.state_dict()


def _checked_masks(file: Path, ticket: "Ticket") -> dict[str, "Tensor"]:
    """Decode a ticket on a base as far as it goes without the base; gives the tensors that it holds."""
    with _decoding(file):
        _, weights = ticket.decode_layers()
    return ticket.other_tensors() | weights


@contextmanager
def _decoding(file: Path) -> Iterator[None]:
    """Name the file in errors."""
    with err.status("decoding"):
        try:
            yield
        except IterandError as error:
            raise type(error)(f"ticket {str(file)!r}: {error}") from None
