"""Train neural networks by pruning random weights, never training one (IteRand)."""

from iterand.distributions import Distribution, distribution_names, register_distribution
from iterand.errors import IterandError
from iterand.masking import MaskedLayer, fold_, masked_layers, prune_, scores
from iterand.randomization import IterativeRandomization, randomize_
from iterand.scheduling import SparsitySchedule
from iterand.selection import calculate_mask
from iterand.summary import Summary, summary
from iterand.ticket import load_ticket, read_ticket, save_ticket
from iterand.version import VERSION

__version__ = VERSION
__all__ = [
    "Distribution",
    "IterandError",
    "IterativeRandomization",
    "MaskedLayer",
    "SparsitySchedule",
    "Summary",
    "calculate_mask",
    "distribution_names",
    "fold_",
    "load_ticket",
    "masked_layers",
    "prune_",
    "randomize_",
    "read_ticket",
    "register_distribution",
    "save_ticket",
    "scores",
    "summary",
]
