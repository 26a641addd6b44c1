"""The statistics of batch norms, of the network that was found.

While masks change, running averages mix the statistics of many networks; the last one is tested with those of others.
"""

from collections.abc import Iterable

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from iterand.data import Batch
from iterand.training.outputs import outputs_of
from iterand.training.session import Session


@torch.no_grad()
def recompute_norms_(session: Session, batches: Iterable[Batch]) -> None:
    """Replace running averages by plain ones over these batches, for the network as it is."""
    model = session.model
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # all batches count alike
    model.train()
    for batch in batches:
        outputs_of(model, batch.inputs, session.recipe)
    for norm, momentum in zip(norms, momenta):
        norm.momentum = momentum
