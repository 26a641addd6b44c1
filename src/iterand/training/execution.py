"""How a run is executed: what makes it faster, and changes nothing but sums inside the network."""

import logging
from dataclasses import dataclass

from iterand.data import Dataset, Split
from iterand.data.sequences import TextSplit
from iterand.selection import HAS_TRITON
from iterand.training.recipe import Recipe
from iterand.training.session import Session
from iterand.training.steps import EagerStep, Step

logger = logging.getLogger("iterand")

_MANY_STEPS = 30_000  # of 2 ms each that are saved


@dataclass(frozen=True)
class Execution:
    """On a GPU: whether to record a whole step as a CUDA graph, and to compile the network."""

    compile: bool | None = None
    """None: where it pays."""
    graph: bool = True


def compiling_pays(recipe: Recipe, steps: int) -> bool:
    """Whether a run of so many steps is done sooner with its network compiled, which takes a minute.

    A network of large images is a tenth faster then; of small ones our own kernels are (docs/engine.md).
    """
    return recipe.data.name == "imagenet" and steps >= _MANY_STEPS


def _kernels_work(session: Session) -> bool:
    from iterand.kernels import cuts

    return cuts.working(session.device)


def choose_step(session: Session, data: Dataset[Split], execution: Execution) -> Step:
    """The fastest way of doing a step that works here; on a GPU, what is slower than it could be is said."""
    # A fused step updates scores as their gradients come; over several ranks these are averaged first.
    if session.device.type != "cuda" or session.ranks.count > 1:
        return EagerStep(session)
    reason = None
    if isinstance(data.train, TextSplit):
        reason = "texts differ in length"
    elif not HAS_TRITON:
        reason = "Triton is not installed; pip install triton"
    elif not _kernels_work(session):
        reason = "Triton does not work here"
    else:
        from iterand.training.fused import CannotFuse, FusedStep

        compile = execution.compile
        if compile is None:
            compile = compiling_pays(session.recipe, session.steps_per_epoch * session.recipe.training.epochs)
        try:
            return FusedStep(session, compile=compile, graph=execution.graph)
        except CannotFuse as error:
            reason = str(error)
    logger.warning("without fused steps, so slower than it could be: %s", reason)
    return EagerStep(session)
