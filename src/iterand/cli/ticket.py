"""``iterand ticket`` and ``iterand export``: look into a ticket, check it, take the network out of it."""

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from iterand.cli.console import err, out, print_json, printable, say
from iterand.errors import IterandError, TicketError
from iterand.files import atomic_write
from iterand.lab.report.formatting import size

if TYPE_CHECKING:
    from torch import Tensor

    from iterand.ticket import Ticket
    from iterand.ticket.inspect import Cost

app = typer.Typer(no_args_is_help=True, help="Look into a ticket, check it, unpack it.")

File = Annotated[Path, typer.Argument(metavar="FILE", help="A ticket.")]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="Where to (beside FILE).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


class Format(StrEnum):
    """What a network can be exported to."""

    onnx = "onnx"
    safetensors = "safetensors"


@app.command()
def info(file: File, json: Json = False) -> None:
    """What is in a ticket, layer by layer, and what it costs."""
    from iterand.ticket import read_ticket
    from iterand.ticket.inspect import cost

    ticket = read_ticket(file)
    costs = cost(ticket)
    if json:
        sizes = asdict(costs)
        layers = sizes.pop("layers")
        print_json({"path": str(file), **_described(ticket), "layers": layers, "bytes": sizes})
        return
    out.print(_layer_table(costs))
    out.print(_whole_table(ticket, costs))


@app.command()
def verify(
    file: File,
    run: Annotated[Path | None, typer.Option(help="Folder of the run it came from: compare with its weights.")] = None,
    json: Json = False,
) -> None:
    """Decode a whole ticket and check it; with --run, compare it with the weights of a run."""
    from iterand.ticket import read_ticket

    ticket = read_ticket(file)
    state = _decoded(file, ticket)
    if run is not None:
        with err.status("comparing"):
            _compare(file, state, run)
    kept = sum(layer.kept for layer in ticket.header.layers)
    if json:
        print_json({"path": str(file), "layers": len(ticket.layers), "kept": kept, "run": run and str(run), "ok": True})
        return
    say(f"{file}: whole; {len(ticket.layers)} layers, {kept:,} kept weights, as they were saved")
    if run is not None:
        say(f"equal, bit for bit, to the weights of {run}")


@app.command()
def unpack(file: File, output: Output = None, json: Json = False) -> None:
    """Write the network as a dense state dict (safetensors)."""

    written = _unpack(file, output or file.with_suffix(".safetensors"))
    _report(file, written, json, "its tensors are dense: as many bytes as any state dict")


def export(
    file: File,
    to: Annotated[Format, typer.Option("--format", help="What to write.")],
    output: Output = None,
    input_shape: Annotated[
        str | None, typer.Option(metavar="1,3,32,32", help="Shape of an input, for ONNX (that of the recipe's data).")
    ] = None,
    integers: Annotated[
        str, typer.Option(help="For ONNX: int4, or int8 for runtimes that know no 4-bit numbers.")
    ] = "int4",
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets lie.")] = None,
    json: Json = False,
) -> None:
    """Write the network as ONNX or safetensors, for other programs.

    An ONNX file is checked by onnxruntime; a safetensors file holds dense tensors.
    """
    from iterand.ticket import load_ticket, read_ticket

    target = output or file.with_suffix(f".{to}")
    if to is Format.safetensors:
        _report(file, _unpack(file, target), json, "its tensors are dense")
        return
    from iterand.inference.onnx import export_onnx

    ticket, network = read_ticket(file), load_ticket(file)
    example = _example(ticket, input_shape, data_dir)
    with err.status("exporting"):
        done = export_onnx(ticket, network, example, target, integers=integers)
    note = (
        f"{len(done.whole_numbers)} of {len(ticket.layers)} layers in {integers}; onnxruntime agrees with torch to "
        f"{done.difference:.0e} of the largest output; dense kernels run no faster for the zeros"
    )
    _report(file, target, json, note, difference=done.difference)


def _layer_table(costs: "Cost") -> Table:
    table = Table("layer", "shape", "kept", "rounds", "redrawn", "bits")
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.no_wrap = True
    for column in table.columns[2:]:
        column.justify = "right"
    for layer in costs.layers:
        share = "" if layer.redrawn is None or not layer.kept else f"{100 * layer.redrawn / layer.kept:.1f} %"
        table.add_row(
            escape(printable(layer.name)),
            "×".join(map(str, layer.shape)),
            f"{layer.kept:,} ({100 * layer.kept / layer.weights:.1f} %)",
            str(layer.rounds),
            share or "—",
            f"{layer.bits / layer.weights:.3f}",
        )
    return table


def _whole_table(ticket: "Ticket", costs: "Cost") -> Table:
    weights, kept = sum(layer.weights for layer in costs.layers), sum(layer.kept for layer in costs.layers)
    settings = ticket.header.layers[0].settings
    parts = f"{size(costs.stream)} weights, {size(costs.other_tensors)} other tensors, {size(costs.header)} header"
    table = Table.grid(padding=(0, 2))
    table.add_row(
        "kept",
        f"{kept:,}",
        escape(f"of {weights:,} weights; {printable(settings.weight_distribution)}, seed {settings.seed}"),
    )
    table.add_row("ticket", size(costs.file), f"{8 * costs.file / weights:.3f} bits a weight: {parts}")
    table.add_row("as float32", size(costs.float32), f"{costs.float32 / costs.file:.1f} times as much")
    table.add_row("entropy bound", size(round(costs.bound)), f"{100 * (1 - costs.bound / costs.file):.1f} % less")
    for name, value in (ticket.metrics or {}).items():
        table.add_row(escape(printable(name)), escape(printable(str(value))), "")
    return table


def _described(ticket: "Ticket") -> dict[str, object]:
    header = ticket.header
    return {
        "iterand": header.package,
        "settings": [asdict(layer.settings) for layer in header.layers],
        "recipe": header.recipe,
        "metrics": header.metrics,
    }


def _compare(file: Path, state: dict[str, "Tensor"], run: Path) -> None:
    import torch

    from iterand.lab.training.folder import RunFolder, read_checkpoint
    from iterand.lab.training.session import Session
    from iterand.masking import fold_
    from iterand.ticket import load_ticket

    saved = read_checkpoint(run)
    if saved is None:
        raise TicketError(f"{run} holds no checkpoint to compare with")
    session = Session(RunFolder(run).recipe(), load_ticket(file).train(), 1, torch.device("cpu"))
    session.restore(saved)
    theirs = fold_(session.model).state_dict()
    for name, tensor in state.items():
        if name not in theirs or not torch.equal(tensor, theirs[name]):
            raise TicketError(f"ticket {str(file)!r}: {name!r} is not what the run {str(run)!r} holds")


def _decoded(file: Path, ticket: "Ticket") -> dict[str, "Tensor"]:
    with err.status("decoding"):
        try:
            return ticket.state_dict()
        except IterandError as error:
            raise type(error)(f"ticket {str(file)!r}: {error}") from None


def _unpack(file: Path, target: Path) -> Path:
    from safetensors.torch import save

    from iterand.ticket import read_ticket

    state = _decoded(file, read_ticket(file))
    # Tied tensors share memory, which the format does not hold: each gets its own.
    atomic_write(target, save({name: tensor.clone() for name, tensor in state.items()}))
    return target


def _example(ticket: "Ticket", shape: str | None, data_dir: Path | None) -> tuple["Tensor", ...]:
    import torch

    if shape is not None:
        parts = shape.split(",")
        if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
            raise ValueError(f"--input-shape is {shape!r}; it must be whole numbers such as 1,3,32,32, all above 0")
        batch, *rest = map(int, parts)
        return (torch.randn(max(batch, 2), *rest, generator=torch.Generator().manual_seed(0)),)
    from iterand.lab.data import load_data
    from iterand.lab.training import recipe_file

    if ticket.recipe is None or "data" not in ticket.recipe:
        raise ValueError("the ticket does not say which data its network takes; give --input-shape")
    name = recipe_file.from_dict(ticket.recipe).data.name
    try:
        data = load_data(name, torch.device("cpu"), data_dir)
    except IterandError as error:
        raise type(error)(f"{error}; or give --input-shape, which needs no data") from None
    return next(iter(data.test.batches(torch.arange(2), 2))).inputs


def _report(file: Path, target: Path, json: bool, note: str, **facts: float) -> None:
    written = target.stat().st_size
    if json:
        print_json({"path": str(file), "written": str(target), "bytes": written, **facts})
    else:
        say(f"{target}: {size(written)}; {note}")
