"""Load a ticket as an unmasked model (``load_ticket``); check that a ticket and a model belong together."""

import os
from typing import Any, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from iterand.checks import shown
from iterand.errors import IterandError, TicketError, first_line
from iterand.surgery import masked_layers, unwrap
from iterand.ticket.read import Ticket, read_ticket

Model = TypeVar("Model", bound=nn.Module)


@overload
def load_ticket(path: str | os.PathLike[str], model: Model) -> Model: ...


@overload
def load_ticket(path: str | os.PathLike[str], model: None = None) -> nn.Module: ...


def load_ticket(path: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """Load a ticket as an unmasked model: an ordinary module with weights bit-equal to those of the masked model.

    Outputs are bit-equal too wherever torch uses the same kernels. For GRU and attention under ``no_grad`` on a CPU,
    torch chooses the kernel by ``requires_grad``: freeze the parameters there to get the same bits.

    Args:
        path: A file that ``save_ticket`` wrote; see ``read_ticket`` for what it raises.
        model: A module as it was before ``prune_``. Its tensors are overwritten, and it is returned in the mode that it
            has: call ``eval()`` for inference. A ticket on existing weights refuses a model that has others. Without a
            model, the network is built from the recipe in the ticket and returned in ``eval()`` mode. A file never runs
            code: a network that was made by a function of the user's needs a model.
    """
    ticket = read_ticket(path)
    try:
        return load(ticket, model)
    except TicketError as error:
        raise TicketError(f"ticket {str(path)!r}: {error}") from None


def load(ticket: Ticket, model: nn.Module | None = None) -> nn.Module:
    """Load an opened ticket; see ``load_ticket``."""
    if model is None:
        network = _build_network(ticket)
        network.load_state_dict(ticket.state_dict(), assign=True)
        return network.eval()
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {shown(model)}; it must be a torch.nn.Module as it was before prune_")
    root = unwrap(model)
    if masked_layers(root):
        raise ValueError("the model is masked; load_ticket fills ordinary ones (to resume a search: Ticket.resume_)")
    check_fits(ticket, root)
    state = {name: value for name, value in root.state_dict().items() if isinstance(value, Tensor)}
    on_meta = any(tensor.is_meta for tensor in state.values())
    held = ticket.state_dict(None if ticket.base is None else state)
    ties = [(first, name) for first, *others in _ties(root) for name in others]
    for first, name in ties:
        if not torch.equal(held[first], held[name]):
            raise TicketError(f"{first!r} and {name!r} are one tensor in {type(root).__name__}, but two in it")
    root.load_state_dict(held, assign=on_meta)
    for first, name in ties if on_meta else ():  # each has become a parameter of its own
        path, _, attribute = name.rpartition(".")
        root.get_submodule(path)._parameters[attribute] = root.get_parameter(first)
    return model


def _ties(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def check_fits(ticket: Ticket, model: nn.Module) -> None:
    """Refuse a model whose tensors differ from the ticket's in name, shape or dtype."""
    expected = ticket.shapes()
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    kind = type(model).__name__
    for name, value in state.items():
        if is_lazy(value):
            raise TicketError(f"{name!r} of {kind} has no shape yet; run one forward pass before loading")
    for name, (dtype, shape) in expected.items():
        if name not in state:
            advice = "is it a ticket of another model?"
            if "_orig_mod." in name:
                advice = "torch.compile(part) renamed the tensors of its part: compile the same part before loading"
            elif any("_orig_mod." in own for own in state):
                advice = "torch.compile(part) renames the tensors of a part: load before it, or use part.compile()"
            raise TicketError(f"it holds {name!r}, which {kind} does not have; {advice}")
        if tuple(state[name].shape) != shape:
            raise TicketError(f"{name!r} has shape {list(shape)} in it and {list(state[name].shape)} in {kind}")
        if state[name].dtype != dtype:
            raise TicketError(f"{name!r} is {dtype} in it and {state[name].dtype} in {kind}; convert the model first")
    for name in state:
        if name not in expected:
            raise TicketError(f"{kind} has {name!r}, which it does not hold; is it a ticket of another model?")


def check_loaded(ticket: Ticket, model: nn.Module) -> str:
    """Refuse a network whose masked tensors are not those of the ticket; of a base, whose masks are not.

    The network may be a part of the model, which a wrapper is. Returns what the names of its tensors begin with there.
    """
    root = unwrap(model)
    if masked_layers(root):
        raise ValueError("the model is masked; inference takes an ordinary one, from load_ticket or fold_")
    state = {name: tensor for name, tensor in root.state_dict().items() if isinstance(tensor, Tensor)}
    first = next(iter(ticket.layers))
    for start in (name.removesuffix(first) for name in state if f".{name}".endswith(f".{first}")):
        if _difference(ticket, state, start) is None:
            return start
    different = _difference(ticket, state, "")
    raise IterandError(f"the network's {different!r} is not as in the ticket; load the ticket with load_ticket")


def _difference(ticket: Ticket, state: dict[str, Tensor], start: str) -> str | None:
    """The first masked tensor of the ticket that a state dict does not have under its name after ``start``."""
    for name, layer in ticket.layers.items():
        held = state.get(start + name)
        if held is None or held.shape != layer.header.shape:
            return name
        if not torch.equal(held.cpu(), layer.weight(base=held).to(held.dtype)):
            return name
    return None


def _build_network(ticket: Ticket) -> nn.Module:
    """Build the network of the recipe, on the meta device if it is of this package; the user's code is not run."""
    from iterand.lab.networks import network_outline  # imported late: needed only without a model
    from iterand.lab.networks.external import build_timm_of_ticket, is_external, names_code

    if ticket.base is not None:
        ticket.check_base(None)
    options = (ticket.recipe or {}).get("network")
    if not isinstance(options, dict) or not isinstance(options.get("name"), str):
        raise TicketError(
            "it has no recipe of a network inside; in Python, give the model, too: load_ticket(file, model)"
        )
    name = options["name"]
    if names_code(name):
        raise TicketError(
            f"its network is made by code, {shown(name)}, and a file never runs code; in Python, build the model and "
            "give it to load_ticket"
        )
    try:
        if is_external(name):
            with torch.device("meta"):
                check_fits(ticket, build_timm_of_ticket(options))  # before memory is taken
            return build_timm_of_ticket(options)
        network = network_outline(**cast(Any, options))
    except TicketError:
        raise
    except Exception as error:
        raise TicketError(f"the network of its recipe cannot be built: {first_line(error)}") from None
    check_fits(ticket, network)
    return network
