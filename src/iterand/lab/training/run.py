"""A run from beginning to end: recipe → data → network → masks → loop → ticket → record."""

import hashlib
import statistics
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from iterand.errors import CheckpointError
from iterand.lab.data import Dataset, Split, load_data
from iterand.lab.training import environment, recipe_file
from iterand.lab.training.distributed import ALONE, Ranks
from iterand.lab.training.environment import StopRequest, stop_request
from iterand.lab.training.folder import RECORD_FORMAT, TICKET, FollowerFolder, RunFolder, read_checkpoint
from iterand.lab.training.loop import Observer, Silent, check_norms, steps_per_epoch, train
from iterand.lab.training.methods import pruned_count
from iterand.lab.training.network import build_for_data, network_options
from iterand.lab.training.recipe import Recipe
from iterand.lab.training.session import Session, tested_epoch
from iterand.lab.training.steps import Execution, choose_step, evaluate
from iterand.memory import exhaustion_explained
from iterand.parametrization import masked_layers
from iterand.randomization import IterativeRandomization
from iterand.ticket import load_ticket, read_ticket, save_ticket

_TIMED_RANDOMIZATIONS = 3
_IN_TICKETS = ("test_accuracy", "test_loss", "validation_accuracy", "tested_epoch")  # the record has everything
_LESS_MEMORY = "lower training.batch_size or network.width_factor"


def run(
    recipe: Recipe,
    folder: RunFolder,
    *,
    device: torch.device,
    data_dir: Path | None = None,
    fresh: bool = False,
    observer: Observer | None = None,
    execution: Execution | None = None,
    ranks: Ranks = ALONE,
    request: StopRequest | None = None,
) -> dict[str, Any]:
    """Do a run, or resume it, and return its record; a complete run is only read.

    A ``request`` of the caller stops it; without one, Ctrl-C and SIGTERM do. Either way it saves itself first.
    """
    folder = folder if ranks.first else FollowerFolder(folder.path)
    with (
        environment.compute_settings(recipe.training.threads),
        nullcontext(request) if request else stop_request() as stop,
        folder.opened(recipe, fresh=fresh),
        exhaustion_explained(_LESS_MEMORY),
    ):
        record = ranks.from_first(folder.record())
        if record is not None:
            return record
        execution = execution or Execution()
        surroundings = environment.describe(device, ranks.count) | {"execution": asdict(execution)}
        data = _load(recipe, device, data_dir)
        session = _session(recipe, data, device, ranks)
        check_norms(session)
        saved = ranks.checkpoint_from_first(folder.saved())
        if saved is not None:
            session.restore(saved)
        step = choose_step(session, data, execution)
        folder.start(recipe, surroundings)
        folder.start_log(session.metrics)
        train(session, step, data, folder, observer or Silent(), stop)
        test = step.evaluate(data.test)
        if ranks.first:
            surroundings["execution"]["way"] = step.way
            record = {
                "format": RECORD_FORMAT,
                "recipe": recipe_file.as_dict(recipe),
                "result": _result(session, test, data, folder),
                "metrics": session.metrics,
                "seconds": session.seconds,
                "randomization_milliseconds": _randomization_milliseconds(session),
                "environment": surroundings,
            }
            folder.finish(record)
        return cast(dict[str, Any], ranks.from_first(record))


def evaluate_run(path: Path, *, device: torch.device, data_dir: Path | None = None) -> dict[str, Any]:
    """Test a run folder, as its last checkpoint left it (with its best epoch so far, if that counts), or a ticket."""
    if path.is_dir():
        folder = RunFolder(path)
        recipe = folder.recipe()
        saved = read_checkpoint(path)
        if saved is None:
            raise CheckpointError(f"{path} holds no checkpoint; train it first")
        data = _load(recipe, device, data_dir)
        session = _session(recipe, data, device)
        session.restore(saved)
        if session.best:
            session.set_network(session.best)
        model: nn.Module = session.model
    else:
        model = load_ticket(path).to(device)
        recipe = recipe_file.from_dict(read_ticket(path).recipe or {})
        data = _load(recipe, device, data_dir)
    with environment.compute_settings(recipe.training.threads):
        measured = evaluate(model, data.test, recipe, device)
    return {"path": str(path), "examples": len(data.test)} | {f"test_{name}": value for name, value in measured.items()}


def _load(recipe: Recipe, device: torch.device, data_dir: Path | None) -> Dataset[Split]:
    chosen = recipe.data
    return load_data(
        chosen.name,
        device,
        data_dir,
        augmentation=chosen.augmentation,
        normalization=chosen.normalization,
        limit=chosen.limit or None,
    )


def _session(recipe: Recipe, data: Dataset[Split], device: torch.device, ranks: Ranks = ALONE) -> Session:
    steps = steps_per_epoch(recipe, data)
    return Session(recipe, build_for_data(recipe, data, device, ranks.count), steps, device, ranks)


def _result(session: Session, test: dict[str, float], data: Dataset[Split], folder: RunFolder) -> dict[str, Any]:
    model, recipe = session.model, session.recipe
    tested = session.metrics[tested_epoch(session)]
    layers = masked_layers(model).values()
    weights = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim > 1)
    result: dict[str, Any] = {
        "test_accuracy": test["accuracy"],
        "test_loss": test["loss"],
        "validation_accuracy": tested["validation_accuracy"],
        "weights": sum(layer.weight.numel() for layer in layers) if layers else weights,
        "kept": sum(int(layer.mask.sum()) for layer in layers) if layers else weights - pruned_count(model),
        "model_sha256": _fingerprint(model),
    }
    if recipe.training.tested == "best":
        result["tested_epoch"] = tested["epoch"]
    if layers:
        path = folder.path / TICKET
        said = recipe_file.changed(recipe) | {"network": network_options(recipe, data)}
        save_ticket(
            model, path, recipe=said, metrics={name: round(result[name], 4) for name in _IN_TICKETS if name in result}
        )
        result["ticket_bytes"] = path.stat().st_size
    result["float32_bytes"] = 4 * result["weights"]
    return result


def _randomization_milliseconds(session: Session) -> float | None:
    """How long Randomize takes on the network of a finished run (Appendix C.2); the network is not used any more."""
    randomizers = [stepper for stepper in session.steppers if isinstance(stepper, IterativeRandomization)]
    if not randomizers:
        return None
    times = []
    for _ in range(_TIMED_RANDOMIZATIONS):
        _wait(session.device)
        started = time.perf_counter()
        randomizers[0].randomize()
        _wait(session.device)
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _fingerprint(model: nn.Module) -> str:
    """SHA-256 over everything the model holds: two runs are the same if theirs is."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
