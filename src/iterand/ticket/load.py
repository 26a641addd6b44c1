"""From a ticket to an ordinary module (``load_ticket``)."""

import os
from typing import Any, TypeVar, cast, overload

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from iterand.errors import TicketError
from iterand.masking import masked_layers, unwrap
from iterand.ticket.read import Ticket, read_ticket

Model = TypeVar("Model", bound=nn.Module)


@overload
def load_ticket(path: str | os.PathLike[str], model: Model) -> Model: ...


@overload
def load_ticket(path: str | os.PathLike[str], model: None = None) -> nn.Module: ...


def load_ticket(path: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """The network of a ticket as an ordinary module: its weights are those of the masked model, bit for bit.

    So are its outputs where torch computes them in the same way: for GRU and attention under ``no_grad`` on a CPU it
    chooses by ``requires_grad``, so freeze the parameters there to have the same bits.

    Args:
        path: A file that ``save_ticket`` wrote.
        model: A module as it was before ``prune_``; its tensors are overwritten, and it is returned. Without one, the
            network is built from the recipe inside, and returned in ``eval()``.
    """
    ticket = read_ticket(path)
    try:
        return load(ticket, model)
    except TicketError as error:
        raise TicketError(f"ticket {str(path)!r}: {error}") from None


def load(ticket: Ticket, model: nn.Module | None = None) -> nn.Module:
    """The network of a ticket that was opened; see ``load_ticket``."""
    if model is None:
        network = _built(ticket)
        network.load_state_dict(ticket.state_dict(), assign=True)
        return network.eval()
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {model!r}; it must be a torch.nn.Module as it was before prune_")
    root = unwrap(model)
    if masked_layers(root):
        raise ValueError("the model is masked; load_ticket fills ordinary ones (to go on searching: Ticket.resume_)")
    _check_fits(ticket, root)
    hollow = any(tensor.is_meta for tensor in root.state_dict().values() if isinstance(tensor, Tensor))
    root.load_state_dict(ticket.state_dict(), assign=hollow)
    return model


def _check_fits(ticket: Ticket, model: nn.Module) -> None:
    """Refuse a model whose tensors have other names, shapes or types than the ticket's."""
    expected = ticket.shapes()
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    kind = type(model).__name__
    for name, value in state.items():
        if is_lazy(value):
            raise TicketError(f"{name!r} of {kind} has no shape yet; run one forward pass before loading")
    for name, (dtype, shape) in expected.items():
        if name not in state:
            raise TicketError(f"it holds {name!r}, which {kind} does not have; is it a ticket of another model?")
        if tuple(state[name].shape) != shape:
            raise TicketError(f"{name!r} has shape {list(shape)} in it and {list(state[name].shape)} in {kind}")
        if state[name].dtype != dtype:
            raise TicketError(f"{name!r} is {dtype} in it and {state[name].dtype} in {kind}; convert the model first")
    for name in state:
        if name not in expected:
            raise TicketError(f"{kind} has {name!r}, which it does not hold; is it a ticket of another model?")


def _built(ticket: Ticket) -> nn.Module:
    """The network of the recipe, laid out without memory."""
    from iterand.networks import network_outline  # only tickets without a model of one's own need it

    options = (ticket.recipe or {}).get("network")
    if not isinstance(options, dict) or not isinstance(options.get("name"), str):
        raise TicketError("it has no recipe of a network inside; give load_ticket the model")
    try:
        network = network_outline(**cast(Any, options))
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise TicketError(f"the network of its recipe cannot be built: {reason}") from None
    _check_fits(ticket, network)
    return network
