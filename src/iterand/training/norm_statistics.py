"""The statistics of batch norms, of the network that was found.

While masks change, running averages mix the statistics of many networks; the last one is tested with those of others.
"""

from collections.abc import Iterable

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from iterand.data import Batch
from iterand.training.outputs import outputs_of
from iterand.training.session import Session


def check_norms(session: Session) -> None:
    """Refuse to recompute statistics of a network that has none."""
    if session.recipe.training.norm_statistics == "recomputed" and not _norms(session):
        name = session.recipe.network.name
        raise ValueError(f"training.norm_statistics is 'recomputed', but {name} has no batch norm; leave it out")


@torch.no_grad()
def recompute_norms_(session: Session, batches: Iterable[Batch]) -> None:
    """Replace running averages by means over these batches, all examples alike, for the network as it is."""
    norms = _norms(session)
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
    session.model.train()
    seen = 0
    for batch in batches:
        examples = session.ranks.whole(len(batch.labels))
        seen += examples
        for norm in norms:
            norm.momentum = examples / seen
        outputs_of(session.model, batch.inputs, session.recipe)
    for norm, momentum in zip(norms, momenta):
        norm.momentum = momentum


def _norms(session: Session) -> list[_BatchNorm]:
    modules = session.model.modules()
    return [module for module in modules if isinstance(module, _BatchNorm) and module.track_running_stats]
