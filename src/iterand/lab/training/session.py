"""The state of a run: model, optimizer, steppers, metrics, and the best epoch so far; save it and restore it."""

from typing import Any

import torch
from torch import nn

from iterand.errors import CheckpointError
from iterand.lab.training import recipe_file
from iterand.lab.training.checkpoint import Checkpoint
from iterand.lab.training.distributed import ALONE, Ranks
from iterand.lab.training.methods import prepare
from iterand.lab.training.recipe import Recipe
from iterand.surgery import masked_layers


class Session:
    """A run between two steps: network, optimizer, steppers, position in the epoch, sums over the epoch so far."""

    def __init__(
        self, recipe: Recipe, model: nn.Module, steps_per_epoch: int, device: torch.device, ranks: Ranks = ALONE
    ) -> None:
        self.recipe = recipe
        self.device = device
        self.ranks = ranks
        self.steps_per_epoch = steps_per_epoch
        model.to(device)
        if recipe.training.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        prepared = prepare(model, recipe, steps_per_epoch * recipe.training.epochs)
        self.model = model
        self.parallel = ranks.parallel(model, device)
        """The model as a training step calls it: it averages gradients over the ranks."""
        self.steppers = prepared.steppers
        self._begin_epoch = prepared.begin_epoch
        self.parameters = prepared.parameters
        self.optimizer = torch.optim.SGD(
            self.parameters,
            lr=recipe.learning_rate.initial,
            momentum=recipe.optimizer.momentum,
            weight_decay=recipe.optimizer.weight_decay,
            # One launch where weights are trained. Without it, scores are bit-equal to those of a CPU.
            fused=device.type == "cuda" and recipe.method.trains_weights,
        )
        self.optimizer.register_step_post_hook(lambda *_: prepared.constrain())
        self.learning_rate = recipe.learning_rate.initial
        self.epoch = 0
        self.step = 0
        self.seen = 0
        self.seconds = 0.0
        """Training time so far, over all resumes; on a GPU without the first step of each, which compiles."""
        self.metrics: list[dict[str, Any]] = []
        self.best: dict[str, torch.Tensor] = {}
        """The network state of the best epoch so far, if the recipe selects the best epoch."""
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.correct = torch.zeros((), dtype=torch.int64, device=device)
        torch.manual_seed(recipe.seed)  # for layers that use torch's generator, such as dropout

    def begin_epoch(self, epoch: int) -> None:
        """Go to the first step of an epoch."""
        self.epoch, self.step, self.seen = epoch, 0, 0
        self.loss_sum.zero_()
        self.correct.zero_()
        self._begin_epoch(epoch, self.optimizer)

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate η of the optimizer."""
        self.learning_rate = rate
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def count(self, loss: torch.Tensor, correct: torch.Tensor, examples: int) -> None:
        """Add loss and hits of a batch, or of this rank's part of it, to the sums of the epoch, on the device."""
        self.loss_sum += self.ranks.sum_(loss.detach().double() * examples)
        self.correct += self.ranks.sum_(correct)

    def advance(self, examples: int) -> None:
        """Finish a step: advance the steppers and go to the next step."""
        for stepper in self.steppers:
            stepper.step()
        self.seen += examples
        self.step += 1

    def network_state(self) -> dict[str, torch.Tensor]:
        """The state dict of the network without masked weights, which are a function of seed and draws."""
        derived = {layer.weight.data_ptr() for layer in masked_layers(self.model).values()}
        return {name: tensor for name, tensor in self.model.state_dict().items() if tensor.data_ptr() not in derived}

    def load_network_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restore the network from a ``network_state``; that of a network with other parameters is refused."""
        for name in sorted(tensors.keys() ^ self.network_state().keys()):
            raise CheckpointError(
                f"{name!r} is in only one of the checkpoint and the network, whose code has changed since; "
                "use another --out folder, or --fresh to start again"
            )
        self.model.load_state_dict(tensors, strict=False)
        with torch.no_grad():
            for layer in masked_layers(self.model).values():
                layer.weight.copy_(layer.parametrization.weight())

    def capture(self) -> Checkpoint:
        """The whole session as a checkpoint."""
        tensors = {f"model.{name}": tensor for name, tensor in self.network_state().items()}
        tensors |= {f"best.{name}": tensor for name, tensor in self.best.items()}
        for number, parameter in enumerate(self.parameters):
            momentum = self.optimizer.state[parameter].get("momentum_buffer")
            if momentum is not None:
                tensors[f"momentum.{number}"] = momentum
        tensors |= {"loss_sum": self.loss_sum, "correct": self.correct, "random.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state(self.device)
        state = {
            "recipe": recipe_file.as_dict(self.recipe),
            "epoch": self.epoch,
            "step": self.step,
            "seen": self.seen,
            "seconds": self.seconds,
            "metrics": self.metrics,
            "steppers": [stepper.state_dict() for stepper in self.steppers],
        }
        return Checkpoint(tensors, state)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Resume from a checkpoint; one of another recipe is refused with the difference."""
        tensors, state = checkpoint.tensors, checkpoint.state
        difference = recipe_file.difference(recipe_file.from_dict(state["recipe"]), self.recipe)
        if difference:
            raise CheckpointError(
                f"the checkpoint belongs to other settings: {'; '.join(difference)}; "
                "use another --out folder, or --fresh to start again"
            )
        try:
            self.load_network_state(_with_prefix("model.", tensors))
        except RuntimeError as error:
            if "size mismatch" not in str(error):
                raise
            raise CheckpointError(
                "the checkpoint is of a network for data with other classes or words; use the data of the run"
            ) from None
        self.best = {name: tensor.to(self.device) for name, tensor in _with_prefix("best.", tensors).items()}
        for number, parameter in enumerate(self.parameters):
            momentum = tensors.get(f"momentum.{number}")
            if momentum is not None:
                buffer = torch.empty_like(parameter.detach())  # in the layout of the parameter, for fused updates
                self.optimizer.state[parameter]["momentum_buffer"] = buffer.copy_(momentum)
        self.loss_sum.copy_(tensors["loss_sum"])
        self.correct.copy_(tensors["correct"])
        torch.set_rng_state(tensors["random.cpu"])
        if self.device.type == "cuda" and "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"], self.device)
        self.epoch, self.step, self.seen = state["epoch"], state["step"], state["seen"]
        self.seconds = state["seconds"]
        self.metrics = state["metrics"]
        for stepper, saved in zip(self.steppers, state["steppers"]):
            stepper.load_state_dict(saved)


def _with_prefix(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def selected_epoch(session: Session) -> int:
    """The index, among the epochs so far, of the one whose network is tested; the first of several equal ones."""
    losses = [metrics["validation_loss"] for metrics in session.metrics]
    if session.recipe.training.select_epoch == "last":
        return len(losses) - 1
    return min(range(len(losses)), key=losses.__getitem__)


def follow_best(session: Session, *, last: bool) -> None:
    """After an epoch: keep a copy of its network if it is the best so far; after the last one, restore the best."""
    if session.recipe.training.select_epoch == "last":
        return
    if selected_epoch(session) == len(session.metrics) - 1:
        session.best = {name: tensor.detach().clone() for name, tensor in session.network_state().items()}
    if last:
        session.load_network_state(session.best)
        session.best = {}
