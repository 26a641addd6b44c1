"""The user's model as exporters need it: copied, in eval mode, run, traced. What fails is said in one sentence."""

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from iterand.errors import IterandError, first_line
from iterand.surgery import masked_layers, unwrap

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def export(model: nn.Module, shape: tuple[int, ...]) -> "ExportedProgram":
    """The program of a module for a batch of this shape, in float32 and eval mode; the model itself is not changed."""
    import torch.export  # imported late: only tracing needs it

    model = unwrap(model)
    if masked_layers(model):
        raise ValueError("the model is masked; inference takes an ordinary one, from load_ticket or fold_")
    for name, tensor in model.named_parameters():
        if is_lazy(tensor) or tensor.is_meta:
            raise IterandError(f"{name!r} of the network has no values yet; load a ticket into it first")
        if tensor.dtype != torch.float32:
            raise IterandError(f"{name!r} of the network is {tensor.dtype}; inference takes float32: model.float()")
    kind, batch = type(model).__name__, torch.zeros(shape, dtype=torch.float32, device="cpu")
    with torch.no_grad(), torch.autocast("cpu", enabled=False), _quiet():
        model = copied(model).to("cpu").eval()
        output = forward(model, batch)
        if not isinstance(output, Tensor):
            given = type(output).__name__
            raise IterandError(f"{kind} gives a {given}; inference takes a network that gives one tensor")
        try:
            return torch.export.export(model, (torch.zeros_like(batch),), strict=False)
        except Exception as error:
            raise IterandError(f"torch.export cannot trace {kind}: {first_line(error)}") from error


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Put a model in eval mode, and back in the mode of each of its modules."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield model.eval()
    finally:
        for module, mode in modes:
            module.training = mode


def copied(model: nn.Module) -> nn.Module:
    """A copy of a model, or one sentence why there is none."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise IterandError(f"{type(model).__name__} cannot be copied: {first_line(error)}") from error


def forward(model: nn.Module, *inputs: Tensor) -> Any:
    """The output for a batch. Inputs that do not fit the model are refused in one sentence."""
    try:
        return model(*inputs)
    except Exception as error:
        shapes = [str(tuple(batch.shape[1:])) for batch in inputs]
        what = f"one input of shape {shapes[0]}" if len(shapes) == 1 else f"inputs of shapes {', '.join(shapes)}"
        raise IterandError(f"{type(model).__name__} does not run on {what}: {first_line(error)}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of torch.export, and what it prints before it raises."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
