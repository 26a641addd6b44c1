"""Train neural networks by pruning random weights, never training one (IteRand)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from iterand.errors import IterandError, TicketError, UnmaskedWarning

if TYPE_CHECKING:
    from iterand.distributions import Distribution, distribution_names, register_distribution
    from iterand.engine.step import make_step
    from iterand.inference.compiled import CompiledNetwork, compile_ticket
    from iterand.masking import fold_, prune_, scores
    from iterand.randomization import IterativeRandomization, randomize_, recommended_steppers
    from iterand.selection import calculate_mask
    from iterand.sparsity import ScoreFreezing, SparsitySchedule, set_sparsity_
    from iterand.summarizing import Summary, summary
    from iterand.surgery import MaskedLayer, masked_layers
    from iterand.ticket import MaskOverlap, TaskSet, Ticket, load_ticket, read_ticket, save_ticket

__version__ = "0.2.0"
__all__ = [
    "CompiledNetwork",
    "Distribution",
    "IterandError",
    "IterativeRandomization",
    "MaskOverlap",
    "MaskedLayer",
    "ScoreFreezing",
    "SparsitySchedule",
    "Summary",
    "TaskSet",
    "Ticket",
    "TicketError",
    "UnmaskedWarning",
    "calculate_mask",
    "compile_ticket",
    "distribution_names",
    "fold_",
    "load_ticket",
    "make_step",
    "masked_layers",
    "prune_",
    "randomize_",
    "read_ticket",
    "recommended_steppers",
    "register_distribution",
    "save_ticket",
    "scores",
    "set_sparsity_",
    "summary",
]

_MODULES = (
    "distributions",
    "selection",
    "surgery",
    "sparsity",
    "masking",
    "randomization",
    "summarizing",
    "engine.step",
    "ticket",
    "inference.compiled",
)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line need not wait for torch to answer."""
    for module in _MODULES if name in __all__ else ():
        found = vars(import_module(f"iterand.{module}"))
        if name in found:
            globals()[name] = found[name]
            return found[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
