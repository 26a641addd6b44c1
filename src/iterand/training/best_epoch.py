"""Which epoch's network a run ends with: the last, or the one that did best on the validation examples."""

import math

from iterand.training.session import Session


def tested_epoch(session: Session) -> int:
    """The place among the epochs so far of the one that would be tested now; of equal ones the first."""
    losses = [metrics["validation_loss"] for metrics in session.metrics]
    if session.recipe.training.tested == "last":
        return len(losses) - 1
    return min(range(len(losses)), key=lambda place: (math.isnan(losses[place]), losses[place]))


def follow_best(session: Session, *, last: bool) -> None:
    """After an epoch: remember its network if it is the best so far; after the last one, go back to the best."""
    if session.recipe.training.tested == "last":
        return
    if tested_epoch(session) == len(session.metrics) - 1:
        session.best = {name: tensor.detach().clone() for name, tensor in session.network().items()}
    if last:
        session.set_network(session.best)
        session.best = {}
