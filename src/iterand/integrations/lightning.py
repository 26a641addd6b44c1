"""A Lightning callback that searches with IteRand."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from iterand.errors import extra
from iterand.integrations import MakeSteppers, Search
from iterand.surgery import masked_layers

with extra("lightning", "the Lightning callback"):
    try:
        from lightning.pytorch import Callback, LightningModule, Trainer
    except ModuleNotFoundError as missing:
        try:
            from pytorch_lightning import Callback, LightningModule, Trainer
        except ModuleNotFoundError:
            raise missing from None


_MAKE_EARLIER = (
    "make {what} in __init__, or leave out sparsity= and call prune_ where configure_model makes its layers, the first "
    "time that it is called"
)


class IteRand(Callback):
    """Prune the module before its optimizers are made, and randomize after optimizer steps.

    It works with the Trainer of ``lightning.pytorch`` and of ``pytorch_lightning``.

    The module's state dict has the iteration counts, so a fit resumed from the end of an epoch continues exactly. In
    the middle of one Lightning does not restore the place in the data. Steppers step at the end of each batch after
    which ``trainer.global_step`` has grown: once for all batches whose gradients are accumulated, and once if several
    optimizers have stepped in a batch.

    Args:
        sparsity: p, the share of weights pruned, as in ``prune_``. Without it the module must be masked already.
        steppers: Called with the module and the number of optimizer steps; gives the steppers. The default is
            ``IterativeRandomization(module)``, or ``recommended_steppers`` with ``preset="recommended"``; none for
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
        self._step = 0
        self._pruned: dict[str, nn.Parameter] = {}
        """The parameters of the module when it was pruned, until a fit begins."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prune before checkpoints are loaded and optimizers are made."""
        workers = type(trainer.strategy.launcher).__name__ == "_MultiProcessingLauncher"
        if workers and self.search.sparsity is not None:
            raise ValueError(
                "the strategy trains a copy of the module in worker processes, so pruning there would not reach the "
                "module itself; prune_ it before fit, and leave out sparsity="
            )
        if self.search.sparsity is not None and not masked_layers(pl_module):
            earlier = takewhile(lambda callback: callback is not self, trainer.callbacks)
            _refuse_copies(earlier, pl_module)
            _refuse_empty(pl_module)
            self.search.prune(pl_module)
            self._pruned = dict(pl_module.named_parameters())
        self.search.prune(pl_module)
        if stage == "fit" and getattr(trainer.strategy, "_layer_sync", None) is not None:
            _refuse_masked_norms(pl_module)
        if stage == "fit" and not _may_be_pruned_later(pl_module):
            self.search.require_masked(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the steppers."""
        _refuse_later(pl_module, self._pruned)
        self._pruned = {}
        self.search.begin(pl_module, lambda: trainer.estimated_stepping_batches)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the step at which training starts or resumes."""
        _require_scores(trainer.optimizers, pl_module)
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Step, if an optimizer has."""
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self.search.step()


def _refuse_copies(callbacks: Iterable[Callback], module: LightningModule) -> None:
    """Refuse callbacks that hold a copy of the module that is to be pruned, such as those that average weights."""
    for callback in callbacks:
        held = (value for value in vars(callback).values() if isinstance(value, nn.Module) and value is not module)
        if any(type(part) is type(module) for value in held for part in value.modules()):
            name = type(callback).__name__
            raise ValueError(
                f"{name} has copied the module before it is pruned; put IteRand before {name} in callbacks="
            )


def _refuse_empty(module: LightningModule) -> None:
    """Refuse a module that makes its layers in a hook that runs after ``setup`` of a callback."""
    if _may_be_pruned_later(module) and not any(True for _ in module.parameters()):
        raise ValueError(f"{type(module).__name__} has no layers yet; {_MAKE_EARLIER.format(what='them')}")


def _refuse_later(module: LightningModule, before: Mapping[str, nn.Parameter]) -> None:
    """Refuse layers that were made after the module was pruned: they have no mask. Others may have been renamed."""
    known = set(map(id, before.values()))
    for name, parameter in module.named_parameters():
        if before and parameter.requires_grad and name not in before and id(parameter) not in known:
            made = f"{name!r} was made after the module was pruned, so it has no mask"
            raise ValueError(f"{made}; {_MAKE_EARLIER.format(what='it')}")


def _refuse_masked_norms(module: LightningModule) -> None:
    """Refuse batch norms whose shift is masked: Lightning converts norms after this, and would need a parameter."""
    for name, layer in masked_layers(module).items():
        if any(isinstance(owner, _BatchNorm) for owner, _ in layer.owners):
            raise ValueError(
                f"sync_batchnorm=True cannot convert a norm once {name!r} is masked; leave it out, and call "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm on a new module before fit"
            )


def _require_scores(optimizers: Sequence[Optimizer], module: LightningModule) -> None:
    """Refuse optimizers that were made before the module was pruned: they train nothing."""
    trained = {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
    scores = [layer.score for layer in masked_layers(module).values() if layer.score.requires_grad]
    if optimizers and scores and trained.isdisjoint(map(id, scores)):
        raise ValueError(
            "no optimizer trains the scores of a mask; make optimizers in configure_optimizers, which is called after "
            "the module is pruned, over self.parameters()"
        )


def _may_be_pruned_later(module: LightningModule) -> bool:
    """Whether the module has hooks of its own that run after ``setup`` of a callback and before optimizers are made."""
    hooks = ("setup", "configure_model")
    return any(getattr(type(module), hook) is not getattr(LightningModule, hook, None) for hook in hooks)
