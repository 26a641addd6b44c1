"""A callback for Hugging Face's Trainer that searches with IteRand."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from iterand.errors import extra
from iterand.integrations import MakeSteppers, Search
from iterand.surgery import masked_layers

with extra("transformers", "the callback for Trainer"):
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class IteRandCallback(TrainerCallback):
    """Prune the model when the Trainer is made, and randomize after optimizer steps.

    Checkpoints of the Trainer hold the state dict of the model, and with it the iteration counts. So training resumed
    from one continues exactly.

    Args:
        sparsity: p, the share of weights pruned, as in ``prune_``. Without it the model must be masked already, as one
            that ``model_init`` makes.
        steppers: Called with the model and the number of optimizer steps; gives the steppers. The default is
            ``IterativeRandomization(model)``, or ``recommended_steppers`` with ``preset="recommended"``; none for
            existing weights.
        options: Further arguments of ``prune_``.
    """

    def __init__(
        self,
        sparsity: float | Mapping[str, float | str] | None = None,
        *,
        steppers: MakeSteppers | None = None,
        **options: Any,
    ) -> None:
        self.search = Search(sparsity, steppers, options)
        self._made_with_trainer = False

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: object | None = None,
        **others: Any,
    ) -> None:
        """Prune before the Trainer makes its optimizer."""
        self._made_with_trainer = True
        if self.search.sparsity is not None and optimizer is not None:
            raise ValueError(
                "the optimizer that Trainer was given holds parameters from before pruning; prune_ the model yourself "
                "and leave out sparsity=, or let Trainer make the optimizer"
            )
        self.search.prune(model)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **others: Any
    ) -> None:
        """Make the steppers."""
        if self.search.sparsity is not None and not self._made_with_trainer:
            raise ValueError(
                "the callback was added after the Trainer was made, so it did not prune the model; pass it in "
                "callbacks= of the Trainer"
            )
        if self.search.sparsity is not None and not masked_layers(model):
            raise ValueError(
                "Trainer has made a new model with model_init since the callback pruned the first one; call prune_ in "
                "model_init, and leave out sparsity="
            )
        self.search.begin(model, lambda: state.max_steps)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Step after the optimizer."""
        self.search.step()
