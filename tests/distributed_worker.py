"""What tests/test_distributed.py lets two ranks do, in one start of torchrun since a start takes seconds.

python distributed_worker.py FOLDER                  each rank writes what it saw to FOLDER/rank-N.json
python distributed_worker.py ENDS train DIGITS ...    the command, which ends after its second epoch

ENDS says how, for the first start and each restart: ``0`` or ``1`` for the rank that is killed, ``stop`` for torchrun
that is asked to stop.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from iterand.cli import main as command_line
from iterand.errors import IterandError
from iterand.lab.data import cifar10
from iterand.lab.training import distributed, loop, recipe_file
from iterand.lab.training.distributed import Ranks, digests, joined
from iterand.lab.training.folder import RunFolder
from iterand.lab.training.loop import NullObserver
from iterand.lab.training.recipe import Recipe
from iterand.lab.training.run import run
from iterand.lab.training.sync_batch_norm import share_batch_norms_
from iterand.surgery import masked_layers

CPU = torch.device("cpu")
RECORDS = 200  # images in a file of CIFAR-10

BASE = ["epochs=2", "width_factor=0.25", "batch_size=300", "period=2", "rate=0.5", "learning_rate.initial=0.1"]
STILL = ["learning_rate.initial=0", "weight_decay=0", "epochs=3"]
"""Scores that never move: then nothing in a run depends on a sum."""

RECIPES = {
    "iterand": [],
    "uneven parts": ["batch_size=301", "drop_last=false", "select_epoch=best_validation"],
    "still": STILL,
    "global, scheduled": ["ranking=global", "floor=0.01", "sparsity_schedule=cubic", "sparsity=0.9"],
    "sgd": ["method.name=sgd", "learning_rate.initial=0.02"],
    "imp": ["method.name=imp", "rounds=1", "sparsity=0.9", "learning_rate.initial=0.02"],
    "batch norm": [
        *("data.name=cifar10", "data.augmentation=crop", "data.limit=60"),
        *("network.name=resnet20", "batch_size=21", "period=1", "drop_last=false"),
        "norm_statistics=recomputed",
    ],
}


def recipe(name: str) -> Recipe:
    return recipe_file.override(Recipe(name=name), [*BASE, *RECIPES[name]])


def small_data():
    """Let CIFAR-10 have files of few images."""
    return patch.object(cifar10, "RECORDS", RECORDS)


class Watch(NullObserver):
    """An observer that remembers the session, and does something at one step."""

    def __init__(self, at=0, action=lambda session: None):
        self.left, self.action = at, action
        self.session = None

    def step(self, session):
        self.session = session
        self.left -= 1
        if self.left == 0:
            self.action(session)


def crash(session):
    raise RuntimeError("crash")


def finished(name: str, folder: Path, ranks: Ranks, data_dir: Path) -> list[int]:
    """Do a run; the digests of what this rank holds when the last epoch is done."""
    seen = []
    watch = Watch()
    watch.epoch = lambda session, metrics: seen.append(digests(session.model)[1].tolist())
    with small_data():
        run(recipe(name), RunFolder(folder), device=CPU, data_dir=data_dir, observer=watch, ranks=ranks)
    return seen[-1]


def broken(name: str, folder: Path, ranks: Ranks) -> None:
    """Let a run crash in its second epoch, on all ranks after the same step."""
    loop.CHECKPOINT_SECONDS, before = 0.0, loop.CHECKPOINT_SECONDS
    with pytest.raises(RuntimeError, match="crash"):
        run(recipe(name), RunFolder(folder), device=CPU, observer=Watch(5, crash), ranks=ranks)
    loop.CHECKPOINT_SECONDS = before


def poisoned(what: str, folder: Path, ranks: Ranks) -> str:
    """Change one number of one layer on rank 1 in the second epoch; what this rank says of it."""

    def poison(session):
        if ranks.number == 1:
            layer = masked_layers(session.model)["classifier.weight"]
            tensor = {"scores": layer.score, "draws": layer.draw, "weights": layer.weight}[what]
            tensor.data.view(-1)[3] += 1

    # At the last step of an epoch, so that the difference has not spread to other layers.
    try:
        run(recipe("still"), RunFolder(folder), device=CPU, observer=Watch(6, poison), ranks=ranks)
    except IterandError as error:
        return str(error)
    return ""


def mismatched(setting: str, folder: Path, ranks: Ranks) -> str:
    """Change a setting on rank 1; what this rank says of it."""
    changed = recipe_file.override(recipe("still"), [setting] if ranks.number == 1 else [])
    try:
        run(changed, RunFolder(folder), device=CPU, ranks=ranks)
    except IterandError as error:
        return str(error)
    return ""


class Partly(nn.Module):
    """A network with a layer that takes no part."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, inputs):
        return self.used(inputs)


def with_unused_layer(ranks: Ranks) -> str:
    """What is said of such a network after a step."""
    model = Partly()
    ranks.parallel(model, CPU)(torch.ones(1, 2)).sum().backward()
    try:
        ranks.require_gradients(model)
    except IterandError as error:
        return str(error)
    return ""


def batch_norm(ranks: Ranks) -> dict[str, float]:
    """How far batch norm over two ranks with 3 and 5 examples is from the one over all 8."""
    far = {}
    for affine in (False, True):
        images = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(0)) * 3 + 10
        target = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(1))
        results = []
        for part in (slice(None), slice(0, 3) if ranks.first else slice(3, 8)):
            norm = nn.BatchNorm2d(4, affine=affine)
            if part != slice(None):
                share_batch_norms_(norm, CPU)
            inputs = images[part].clone().requires_grad_()
            outputs = norm(inputs)
            (outputs * target[part]).square().sum().backward()
            parameters = [ranks.sum_(p.grad.clone()) if part != slice(None) else p.grad for p in norm.parameters()]
            found = [outputs, inputs.grad, norm.running_mean, norm.running_var, norm.eval()(images), *parameters]
            results.append((part, found))
        (_, whole), (part, mine) = results
        for number, (a, b) in enumerate(zip(whole, mine)):
            far[f"affine={affine} {number}"] = float(((a[part] if number < 2 else a) - b).abs().max() / a.abs().max())
    return far


def end_after_an_epoch(end: str) -> None:
    """Let the ranks end in this way when both have done the second epoch, of which there is no checkpoint yet."""
    distributed.TIMEOUT = timedelta(days=1)  # nobody waits for a rank that has ended
    compare = Ranks.compare

    def compare_and_end(ranks: Ranks, model: nn.Module, when: str) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        compare(ranks, model, when)  # ranks wait for each other in it
        if when != "after epoch 2":
            return
        if end == str(ranks.number):
            os.kill(os.getpid(), signal.SIGKILL)
        if end == "stop":
            if ranks.first:
                os.kill(os.getppid(), signal.SIGTERM)
            while signal.getsignal(signal.SIGTERM) == handler:  # the signal of torchrun changes it
                time.sleep(0.01)

    Ranks.compare = compare_and_end


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with joined() as ranks:
        seen = {"ranks": [ranks.number, ranks.count, ranks.first]}
        seen["digests"] = {name: finished(name, folder / name, ranks, folder / "data") for name in RECIPES}
        broken("iterand", folder / "two, one", ranks)
        broken("iterand", folder / "two, two", ranks)
        finished("iterand", folder / "two, two", ranks, folder)
        finished("iterand", folder / "one, two", ranks, folder)
        seen["mismatched"] = mismatched("batch_size=32", folder / "mismatched", ranks)
        seen["unused"] = with_unused_layer(ranks)
        seen["poisoned"] = {
            what: poisoned(what, folder / "poisoned" / what, ranks) for what in ("scores", "weights", "draws")
        }
        seen["batch norm"] = batch_norm(ranks)
    names = (path.read_text() for path in Path("/proc/self/task").glob("*/comm"))
    seen["threads"] = [name.strip() for name in names if "gloo" in name]
    (folder / f"rank-{seen['ranks'][0]}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    first, *arguments = sys.argv[1:]
    if arguments:
        end_after_an_epoch(first.split(",")[int(os.environ["TORCHELASTIC_RESTART_COUNT"])])
        sys.argv[1:] = arguments
        command_line.main()
    else:
        main(Path(first))
