"""One step of training, and a look at how well the network does: with plain torch, on any device."""

from typing import Protocol

import torch
from torch import Tensor, nn

from iterand.data import Batch, Split
from iterand.data.sequences import arranged
from iterand.training.distributed import ALONE, Ranks
from iterand.training.outputs import correct_of, loss_of, outputs_of, training_loss_of
from iterand.training.recipe import Recipe
from iterand.training.session import Session

EVALUATION_BATCH = 250  # long reviews and large images must fit too


class Step(Protocol):
    """How batches are worked through; what changes is the session's."""

    @property
    def way(self) -> str:
        """How it is executed, as ``iterand bench step`` calls it."""
        ...

    def train(self, batch: Batch) -> None:
        """Forward, backward, update; count loss and hits."""
        ...

    def evaluate(self, split: Split) -> dict[str, float]:
        """Mean loss and accuracy in percent of one part of the data."""
        ...


class EagerStep:
    """Each operation by itself."""

    way = "eager"

    def __init__(self, session: Session) -> None:
        self._session = session

    def train(self, batch: Batch) -> None:
        """Forward, backward, update; count loss and hits."""
        session, ranks = self._session, self._session.ranks
        ranks.seed(session.recipe.seed, session.epoch * session.steps_per_epoch + session.step)
        session.model.train()
        session.optimizer.zero_grad()
        outputs = outputs_of(session.parallel, batch.inputs, session.recipe)
        loss = training_loss_of(outputs, batch.labels, session.recipe.training)
        ranks.weighted(loss, len(batch.labels)).backward()  # type: ignore[no-untyped-call]
        session.optimizer.step()
        session.constrain()
        session.count(loss, correct_of(outputs.detach(), batch.labels), len(batch.labels))

    def evaluate(self, split: Split) -> dict[str, float]:
        """Mean loss and accuracy in percent of one part of the data."""
        session = self._session
        return evaluate(session.model, split, session.recipe, session.device, session.ranks)


def evaluate(
    model: nn.Module, split: Split, recipe: Recipe, device: torch.device, ranks: Ranks = ALONE
) -> dict[str, float]:
    """Mean loss and accuracy in percent of any model; each rank takes its share of the examples."""
    model.eval()
    sums = Sums(device)
    mine = arranged(split, ranks.share_of(len(split)), EVALUATION_BATCH)
    with torch.no_grad():
        for batch in split.batches(mine, EVALUATION_BATCH) if len(mine) else ():
            sums.add(outputs_of(model, batch.inputs, recipe), batch.labels)
    ranks.sum_(sums.loss)
    ranks.sum_(sums.correct)
    return sums.means(len(split))


class Sums:
    """Loss and hits added up on the device."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.correct = torch.zeros((), dtype=torch.int64, device=device)

    def reset(self) -> None:
        """Start again."""
        self.loss.zero_()
        self.correct.zero_()

    def add(self, outputs: Tensor, labels: Tensor) -> None:
        """Add a batch."""
        self.loss += loss_of(outputs, labels, reduction="sum")
        self.correct += correct_of(outputs, labels)

    def means(self, count: int) -> dict[str, float]:
        """Mean loss and accuracy in percent."""
        return {"loss": float(self.loss) / count, "accuracy": 100 * int(self.correct) / count}
