"""``iterand export``: write the network of a ticket for other programs."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iterand import memory
from iterand.cli.console import err, print_json, say
from iterand.cli.options import Json, named
from iterand.cli.ticket import File, decoded, read
from iterand.errors import IterandError, RecipeError, TicketError
from iterand.files import atomic_write, concerns
from iterand.lab.report.formatting import size

if TYPE_CHECKING:
    from torch import Tensor, nn

    from iterand.ticket import Ticket

_SAMPLE = 512  # inputs from which the ranges of values are chosen
_EXAMPLES = 2  # inputs for which outputs are compared, where no ranges are chosen


class Format(StrEnum):
    """The file formats that a network can be exported to."""

    c = "c"
    onnx = "onnx"
    safetensors = "safetensors"


class Activations(StrEnum):
    """What the values between layers are."""

    float32 = "float32"
    int8 = "int8"


class Weights(StrEnum):
    """What the constant data of an exported C program has of the weights."""

    offsets = "offsets"
    ticket = "ticket"


class Integers(StrEnum):
    """What the weights of an ONNX model are."""

    int4 = "int4"
    int8 = "int8"


_FORMATS = {  # of options that not all formats have
    "--input-shape": (Format.onnx, Format.c),
    "--data-dir": (Format.onnx, Format.c),
    "--integers": (Format.onnx,),
    "--activations": (Format.c,),
    "--sample": (Format.c,),
    "--weights": (Format.c,),
}


def export(
    file: File,
    to: Annotated[Format, typer.Option("--format", help="File format.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            callback=named,
            help="File to write; for C, a folder (default: FILE with the suffix of the format).",
        ),
    ] = None,
    input_shape: Annotated[
        str | None,
        typer.Option(
            metavar="1,3,32,32", help="For ONNX and C: shape of an input (default: that of the recipe's data)."
        ),
    ] = None,
    integers: Annotated[
        Integers | None,
        typer.Option(help="For ONNX: int4, or int8 for runtimes without 4-bit integers (default: int4)."),
    ] = None,
    activations: Annotated[
        Activations | None,
        typer.Option(help="For C: float32, or int8 for small machines and for speed (default: float32)."),
    ] = None,
    sample: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npy",
            help="For --activations int8: a batch of inputs (default: validation images of the recipe).",
        ),
    ] = None,
    weights: Annotated[
        Weights | None,
        typer.Option(
            help="For C: offsets, a byte for each kept weight; or ticket, masks and signs coded as in the ticket "
            "(default: offsets)."
        ),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="For ONNX and C: folder of the data sets.")] = None,
    json: Json = False,
) -> None:
    """Write the network of a ticket for other programs.

    safetensors: a state dict of dense tensors. onnx: a model with integer weights, checked with onnxruntime. c: a
    folder with a C program that skips pruned weights, checked if there is a C compiler.
    """
    given = {"--integers": integers, "--activations": activations, "--sample": sample, "--weights": weights}
    _check_format(to, {"--input-shape": input_shape, "--data-dir": data_dir, **given})
    shape = _check_inputs(input_shape, sample, activations)
    ticket, target = read(file), output or file.with_suffix(f".{to}")
    if target.exists() and target.samefile(file):
        raise ValueError(f"-o {target} is the ticket itself; choose another name")
    if to is Format.safetensors:
        _write_state_dict(file, ticket, target)
        _report(file, target, json, "its tensors are dense: as many bytes as any state dict")
        return
    network = _network(file, ticket, to)
    calibrates = activations is Activations.int8
    example = (_sample(sample),) if sample else _example(ticket, shape, data_dir, calibrates=calibrates)
    if shape is not None:
        _check_shape(shape, network, example)
    if to is Format.c:
        coded, folder = ticket if weights is Weights.ticket else None, output or file.with_suffix("")
        _export_c(file, network, example[0], activations or Activations.float32, coded, folder, json)
        return
    from iterand.inference.onnx import export_onnx

    integers = integers or Integers.int4
    with err.status("exporting"), _writing(target):
        done = export_onnx(ticket, network, example, target, integers=integers)
    note = (
        f"{len(done.whole_numbers)} of {len(ticket.layers)} layers in {integers}; onnxruntime agrees with torch to "
        f"{done.difference:.0e} of the largest output; dense kernels run no faster for the zeros"
    )
    _report(file, target, json, note, difference=done.difference)


def _check_format(to: Format, options: Mapping[str, object]) -> None:
    """Refuse options that the format does not have."""
    for option, value in options.items():
        if value is not None and to not in _FORMATS[option]:
            raise ValueError(f"{option} is for --format {' or '.join(_FORMATS[option])}, not for {to}; leave it out")


def _check_inputs(shape: str | None, sample: Path | None, activations: Activations | None) -> list[int] | None:
    """The shape of an input, if given; refuses options for inputs that do not go together."""
    if sample and activations is not Activations.int8:
        raise ValueError("--sample is for --activations int8; leave it out")
    if shape is None:
        return None
    if activations is Activations.int8:
        raise ValueError("--activations int8 needs inputs, not only their shape; give --sample, not --input-shape")
    parts = shape.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"--input-shape is {shape!r}; it must be whole numbers such as 1,3,32,32, all above 0")
    if len(parts) == 1:
        raise ValueError(f"--input-shape is {shape!r}; the first number is the batch, so write 1,{shape.strip()}")
    return [int(part) for part in parts]


def _check_shape(shape: list[int], network: "nn.Module", example: "tuple[Tensor, ...]") -> None:
    """Refuse a shape for which the network does not run; a batch is easily forgotten."""
    import torch

    from iterand.inference.models import evaluating, forward

    try:
        with torch.no_grad(), evaluating(network):
            forward(network, *example)
    except IterandError as error:
        given = ",".join(map(str, shape))
        raise ValueError(f"--input-shape is {given}, of which the first number is the batch, but {error}") from None


def _export_c(
    file: Path,
    network: "nn.Module",
    example: "Tensor",
    activations: Activations,
    coded: "Ticket | None",
    folder: Path,
    json: bool,
) -> None:
    from iterand.inference.c.export import export_c

    with err.status("exporting"), _writing(folder):
        done = export_c(network, example, folder, activations=activations.value, ticket=coded)
    if json:
        print_json({"path": str(file), "written": str(folder), **asdict(done)})
        return
    checked = "no C compiler is found, so its outputs are not checked"
    if done.difference is not None:
        checked = f"its outputs agree with torch to {done.difference:.0e} of the largest"
    decoded = f" and {size(done.weights)} for decoded weights" if done.weights else ""
    say(f"{folder}: {size(done.bytes)} of constant data, {size(done.arena)} of memory{decoded}; {checked}")


def _write_state_dict(file: Path, ticket: "Ticket", target: Path) -> None:
    from safetensors.torch import save

    state = decoded(file, ticket)
    with _writing(target):
        # safetensors refuses tensors that share memory, as tied ones do.
        atomic_write(target, save({name: tensor.clone() for name, tensor in state.items()}))


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Name the target in errors of the operating system."""
    try:
        yield
    except OSError as error:
        if error.strerror is None or not concerns(error, target.parent):  # a sentence of iterand; of other files
            raise
        raise IterandError(f"cannot write {target}: {error.strerror}") from None


def _sample(path: Path) -> "Tensor":
    """A batch of inputs from a file."""
    import numpy as np
    import torch

    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        reason = getattr(error, "strerror", None) or "it is not an array that numpy.save wrote"
        raise IterandError(f"{path} cannot be read: {reason}") from None
    if not isinstance(found, np.ndarray) or found.dtype.kind != "f" or found.ndim < 2 or not len(found):
        kind = f"{found.dtype} of shape {found.shape}" if isinstance(found, np.ndarray) else "several arrays"
        raise IterandError(
            f"{path} has {kind}; a sample is one batch of floating-point inputs, prepared as in training"
        )
    return torch.from_numpy(np.ascontiguousarray(found, np.float32))


def _network(file: Path, ticket: "Ticket", to: Format) -> "nn.Module":
    """The network of a ticket, which the command builds from the recipe inside."""
    from iterand.checks import shown
    from iterand.lab.networks.external import names_code
    from iterand.ticket import load_ticket

    options = (ticket.recipe or {}).get("network")
    name = options.get("name") if isinstance(options, dict) else None
    reason = None
    if ticket.base is not None:
        reason = f"it is a mask on the weights of {shown(ticket.base)}, which it does not hold"
    elif not isinstance(name, str):
        reason = "it has no recipe of a network inside"
    elif names_code(name):
        reason = f"its network is made by code, {shown(name)}, and a file never runs code"
    if reason is not None:
        exporter = "iterand.inference.c.export.export_c" if to is Format.c else "iterand.inference.onnx.export_onnx"
        raise TicketError(
            f"ticket {str(file)!r}: {reason}; in Python, load it into your model with load_ticket, and give the model "
            f"to {exporter}"
        )
    if name in ("lstm", "bilstm"):
        raise TicketError(
            f"ticket {str(file)!r}: its network {name} reads texts of different lengths, which cannot be exported to "
            f"{to}; in Python, load_ticket gives the network"
        )
    return load_ticket(file)


def _example(
    ticket: "Ticket", shape: list[int] | None, data_dir: Path | None, *, calibrates: bool
) -> tuple["Tensor", ...]:
    """Inputs of the data of a ticket; random ones if only their shape is given.

    Where it ``calibrates``, ranges are chosen from them, so they are many, and must be real ones.
    """
    import torch

    if shape is not None:
        sizes = [max(shape[0], _EXAMPLES), *shape[1:]]
        memory.require(4 * math.prod(sizes), "an input of this shape", "give a smaller --input-shape")
        return (torch.randn(sizes, generator=torch.Generator().manual_seed(0)),)
    from iterand.lab.data import IMAGE_FOLDER, load_data
    from iterand.lab.training import recipe_file

    try:
        chosen = recipe_file.from_dict(ticket.recipe or {}).data  # a recipe leaves out what is as by default
    except RecipeError as error:
        other = "--sample" if calibrates else "--input-shape"
        raise ValueError(f"the ticket does not say which data its network takes ({error}); give {other}") from None
    if chosen.name == IMAGE_FOLDER:
        if calibrates:
            raise ValueError("the ticket does not say where its images are; give --sample")
        sizes = [_EXAMPLES, 3, chosen.image_size, chosen.image_size]
        return (torch.randn(sizes, generator=torch.Generator().manual_seed(0)),)
    try:
        data = load_data(chosen.name, torch.device("cpu"), data_dir, normalization=chosen.normalization)
    except IterandError as error:
        other = "--sample" if calibrates else "--input-shape, which needs no data"
        raise type(error)(f"{error}; or give {other}") from None
    count = min(_SAMPLE if calibrates else _EXAMPLES, len(data.validation))
    return next(iter(data.validation.batches(torch.arange(count), count))).inputs


def _report(file: Path, target: Path, json: bool, note: str, **facts: float) -> None:
    written = target.stat().st_size
    if json:
        print_json({"path": str(file), "written": str(target), "bytes": written, **facts})
    else:
        say(f"{target}: {size(written)}; {note}")
