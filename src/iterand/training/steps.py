"""One step of training, and a look at how well the network does: with plain torch, on any device."""

from typing import Protocol

import torch
from torch import Tensor, nn

from iterand.data import Batch, Split
from iterand.training.outputs import correct_of, loss_of, outputs_of
from iterand.training.recipe import Recipe
from iterand.training.session import Session

EVALUATION_BATCH = 250  # long reviews and large images must fit too


class Step(Protocol):
    """How batches are worked through; what changes is the session's."""

    def train(self, batch: Batch) -> None:
        """Forward, backward, update; count loss and hits."""
        ...

    def evaluate(self, split: Split) -> dict[str, float]:
        """Mean loss and accuracy in percent over one part of the data."""
        ...


class EagerStep:
    """Each operation by itself."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def train(self, batch: Batch) -> None:
        """Forward, backward, update; count loss and hits."""
        session = self._session
        session.model.train()
        session.optimizer.zero_grad()
        outputs = outputs_of(session.model, batch.inputs, session.recipe)
        loss = loss_of(outputs, batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        session.optimizer.step()
        session.constrain()
        session.count(loss, correct_of(outputs.detach(), batch.labels), len(batch.labels))

    def evaluate(self, split: Split) -> dict[str, float]:
        """Mean loss and accuracy in percent over one part of the data."""
        return evaluate(self._session.model, split, self._session.recipe, self._session.device)


def evaluate(model: nn.Module, split: Split, recipe: Recipe, device: torch.device) -> dict[str, float]:
    """Mean loss and accuracy in percent of any model."""
    model.eval()
    sums = Sums(device)
    with torch.no_grad():
        for batch in split.batches(torch.arange(len(split)), EVALUATION_BATCH):
            sums.add(outputs_of(model, batch.inputs, recipe), batch.labels)
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
