"""Small trainings with Lightning and with Hugging Face's Trainer, to be killed and resumed.

python trainer_scripts.py FOLDER    with Lightning, on two devices
"""

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import iterand

PERIOD = 3
EVERY = 5  # steps between checkpoints
OPTIONS: dict[str, Any] = {"weights": "signed_constant", "ranking": "global", "seed": 4}


def steppers(model: nn.Module, steps: int) -> list[Any]:
    """Both kinds, so that both counts have to come back."""
    randomizer = iterand.IterativeRandomization(model, period=PERIOD, rate=0.5)
    return [randomizer, iterand.SparsitySchedule(model, "linear", steps=steps - 4)]


def steppers_now(model: nn.Module, steps: int) -> list[Any]:
    """The same, with a round after each step."""
    randomizer = iterand.IterativeRandomization(model, period=1, rate=0.5)
    return [randomizer, iterand.SparsitySchedule(model, "linear", steps=steps)]


def batches() -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(40, 6, generator=generator), torch.randint(3, (40,), generator=generator)
    return DataLoader(TensorDataset(images, labels), batch_size=8)


def fit_lightning(folder: Path, *, kill_after: int = 0, resume: bool = False, devices: int = 1) -> dict[str, Any]:
    """Four epochs of five steps, with a checkpoint after each."""
    import lightning.pytorch as L
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    from iterand.integrations.lightning import IteRand

    class Classifier(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> Tensor:
            inputs, labels = batch
            loss = F.cross_entropy(self.network(inputs), labels)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(iterand.scores(self), lr=0.3, momentum=0.9)

    class Kill(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
            if trainer.global_step == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)

    module = Classifier()
    trainer = L.Trainer(
        max_epochs=4,
        accelerator="cpu",
        devices=devices,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[
            IteRand(sparsity=0.6, steppers=steppers, **OPTIONS),
            Kill(),
            ModelCheckpoint(folder, filename="last", enable_version_counter=False, every_n_epochs=1),
        ],
    )
    trainer.fit(module, batches(), ckpt_path=folder / "last.ckpt" if resume else None)
    iterand.save_ticket(module, folder / f"{trainer.global_rank}.ticket")
    return {"losses": module.losses, "steps": trainer.global_step}


def fit_transformers(folder: Path, *, kill_after: int = 0, resume: bool = False) -> dict[str, Any]:
    """Twenty steps of a BERT with dropout, with a checkpoint every five."""
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

    from iterand.integrations.transformers import IteRandCallback

    class Kill(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)

    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=20,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=8,
        )
    )
    generator = torch.Generator().manual_seed(0)
    examples = [
        {"input_ids": torch.randint(20, (6,), generator=generator), "labels": torch.tensor(n % 2)} for n in range(40)
    ]
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(folder),
            max_steps=20,
            per_device_train_batch_size=8,
            learning_rate=0.05,
            save_steps=EVERY,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=examples,
        callbacks=[IteRandCallback(sparsity=0.6, steppers=steppers, **OPTIONS), Kill()],
    )
    trainer.train(resume_from_checkpoint=resume)
    iterand.save_ticket(model, folder / "0.ticket")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "steps": trainer.state.global_step}


def fit(trainer: str, folder: Path, **options: Any) -> dict[str, Any]:
    """One training, the same each time."""
    torch.manual_seed(1)
    return {"lightning": fit_lightning, "transformers": fit_transformers}[trainer](folder, **options)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    fit("lightning", Path(sys.argv[1]), devices=2)
