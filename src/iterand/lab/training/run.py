"""A run from start to end: recipe → data → network and masks → training loop → ticket → record."""

import hashlib
import statistics
import time
import warnings
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from iterand.checks import counted, shown
from iterand.errors import CheckpointError, DataError, RecipeError, UnmaskedWarning
from iterand.lab.data import IMAGE_FOLDER, Dataset, Split, load_data
from iterand.lab.data.image_folder import fingerprint
from iterand.lab.data.text import TextSplit
from iterand.lab.networks.external import UserCode
from iterand.lab.training import environment, recipe_file
from iterand.lab.training.checkpoint import read_checkpoint
from iterand.lab.training.checks import check_convolutions, check_ranks, check_session
from iterand.lab.training.distributed import ALONE, Ranks
from iterand.lab.training.environment import StopRequest, stop_request
from iterand.lab.training.folder import RECORD, RECORD_FORMAT, TICKET, FollowerFolder, RunFolder
from iterand.lab.training.loop import NullObserver, Observer, steps_per_epoch, train
from iterand.lab.training.methods import pruned_count
from iterand.lab.training.network import build_for_data, ticket_options
from iterand.lab.training.recipe import Recipe
from iterand.lab.training.session import Session, selected_epoch
from iterand.lab.training.steps import Execution, Teacher, choose_step, evaluate
from iterand.masking import fold_
from iterand.memory import exhaustion_explained
from iterand.parametrization import MaskedParametrization
from iterand.randomization import IterativeRandomization
from iterand.surgery import masked_layers
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
    code: UserCode | None = None,
) -> dict[str, Any]:
    """Train by a recipe and return the record of the run; a run that was interrupted resumes, a complete one is read.

    ``request`` lets the caller stop the run; without it, Ctrl-C and SIGTERM do. Either way a checkpoint is saved first.
    ``code`` is the user's code, if ``network.name`` names some.
    """
    execution = execution or Execution()
    folder = folder if ranks.first else FollowerFolder(folder.path)
    with (
        environment.compute_settings(recipe.training.threads),
        nullcontext(request) if request else stop_request() as stop,
        folder.opened(recipe, fresh=fresh),
        code.explained() if code else nullcontext(),
        exhaustion_explained(_LESS_MEMORY),
    ):
        check_ranks(ranks, recipe)
        record = ranks.from_first(folder.record())
        if record is not None:
            return record

        data = _load_data(recipe, device, data_dir)
        check_ranks(ranks, recipe, data)
        teacher = _load_teacher(recipe, data, device, folder.path)
        session = build_session(recipe, data, device, ranks, code)  # network, masks, optimizer, steppers
        check_session(session, teacher, data)
        check_convolutions(session)
        checkpoint = ranks.checkpoint_from_first(folder.last_checkpoint())
        if checkpoint is not None:
            session.restore(checkpoint)
        step = choose_step(session, data, execution, teacher)

        described = environment.describe(device, ranks.count) | {"execution": asdict(execution)}
        folder.start(recipe, described)
        folder.start_log(session.metrics)
        train(session, step, data, folder, observer or NullObserver(), stop)
        test = step.evaluate(data.test)

        if ranks.first:
            described["execution"]["way"] = step.way
            result = _result(session, test)
            if masked_layers(session.model):
                result["ticket_bytes"] = _save_ticket(session, data, result, folder.path / TICKET)
            result["float32_bytes"] = 4 * result["weights"]
            record = {
                "format": RECORD_FORMAT,
                "recipe": recipe_file.as_dict(recipe),
                "result": result,
                "metrics": session.metrics,
                "seconds": session.seconds,
                "randomization_milliseconds": _randomization_milliseconds(session),
                "environment": described,
            }
            folder.finish(record)
        return cast(dict[str, Any], ranks.from_first(record))


def check_run(recipe: Recipe, *, data_dir: Path | None = None, code: UserCode | None = None) -> None:
    """Load the data and build the network on the CPU, as a run does before its first step; raises what it raises."""
    cpu = torch.device("cpu")
    with code.explained() if code else nullcontext(), exhaustion_explained(_LESS_MEMORY):
        data = _load_data(recipe, cpu, data_dir)
        teacher = _load_teacher(recipe, data, cpu)
        check_session(build_session(recipe, data, cpu, code=code), teacher, data)


def evaluate_run(path: Path, *, device: torch.device, data_dir: Path | None = None) -> dict[str, Any]:
    """Test a ticket, or the last checkpoint of a run folder (its best epoch so far, if the recipe selects that).

    ``data_dir`` is where the data are, even if the run had its images elsewhere.
    """
    recipe = _recipe_of(path)
    if data_dir is not None:
        recipe = replace(recipe, data=replace(recipe.data, path=""))
    ticket = None if path.is_dir() else load_ticket(path)
    data = _load_data(recipe, device, data_dir)
    _check_data(recipe, data, data_dir)
    if recipe.training.precision == "bfloat16" and device.type == "cpu" and not environment.has_bfloat16():
        warnings.warn("this processor has no bfloat16, so the network is tested in float32", stacklevel=2)
        recipe = replace(recipe, training=replace(recipe.training, precision="float32"))
    model = _network_of(path, recipe, data, device) if ticket is None else ticket.to(device)
    with environment.compute_settings(recipe.training.threads):
        measured = evaluate(model, data.test, recipe, device)
    return {"path": str(path), "examples": len(data.test)} | {f"test_{name}": value for name, value in measured.items()}


def _check_data(recipe: Recipe, data: Dataset[Split], folder: Path | None) -> None:
    """Refuse data of more classes or words than the network knows, and warn of those that may not be of the run."""
    words = len(data.train.vocabulary) if isinstance(data.train, TextSplit) else 0
    known = recipe.network
    for what, there, here in (("classes", known.classes, data.classes), ("words", known.vocabulary_size, words)):
        if 0 < there < here:
            raise DataError(
                f"the data have {here:,} {what}, but the network is for {there:,}; give the folder of its own data "
                "with --data-dir"
            )
    changed = recipe.data.sha256 and recipe.data.sha256 != fingerprint(folder or Path(recipe.data.path))
    if (changed or recipe.data.name == "imagenet") and data.classes < known.classes:
        warnings.warn(
            f"the data have {counted(data.classes, 'class folder')}, but the network is for {known.classes:,} classes; "
            "labels are the places of the folders, so they are wrong unless the network was trained with the same ones",
            stacklevel=3,
        )
    elif changed:
        warnings.warn(
            "names or sizes of the images have changed since the network was trained; where iterand splits them "
            "itself, it now tests images that may have been trained with",
            stacklevel=3,
        )


def _load_teacher(
    recipe: Recipe, data: Dataset[Split], device: torch.device, folder: Path | None = None
) -> Teacher | None:
    """The teacher of a run, if it has one; in the folder of the run itself, it would be replaced."""
    if not recipe.training.teacher:
        return None
    path = Path(recipe.training.teacher)
    if folder is not None and path.resolve() in (folder.resolve(), folder.resolve() / TICKET):
        raise RecipeError(f"the teacher {path} would be replaced by the run in {folder}; choose another --out")
    own = _recipe_of(path)
    for key in ("name", "normalization", "image_size"):
        theirs, ours = getattr(own.data, key), getattr(recipe.data, key)
        if theirs != ours:
            raise RecipeError(
                f"the teacher {path} was trained with data.{key} = {shown(theirs)}, but the recipe has {shown(ours)}; "
                "choose a teacher that sees the same inputs"
            )
    if own.data.sha256 != recipe.data.sha256:
        warnings.warn(
            f"the teacher {path} was trained with other images; its outputs are the places of its class folders, so "
            "they are wrong unless the images of the recipe are in the same ones",
            stacklevel=3,
        )
    model = _network_of(path, own, data, device) if path.is_dir() else load_ticket(path).to(device)
    return Teacher(fold_(model) if masked_layers(model) else model, own)


def _recipe_of(path: Path) -> Recipe:
    """The recipe of a run folder or ticket."""
    return RunFolder(path).recipe() if path.is_dir() else recipe_file.from_dict(read_ticket(path).recipe or {})


def _network_of(path: Path, recipe: Recipe, data: Dataset[Split], device: torch.device) -> nn.Module:
    """The network of a run folder, as of its last checkpoint or best epoch."""
    checkpoint = read_checkpoint(path)
    if checkpoint is None:
        raise CheckpointError(f"{path} holds no checkpoint; train it first")
    session = build_session(recipe, data, device)
    try:
        session.restore(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if not (path / RECORD).exists():
        epochs = f"{session.epoch} of {counted(recipe.training.epochs, 'epoch')}"
        warnings.warn(f"the run {path} is not complete ({epochs}); its command resumes it", stacklevel=3)
    if session.best:
        session.load_network_state(session.best)
    return session.model


def build_session(
    recipe: Recipe, data: Dataset[Split], device: torch.device, ranks: Ranks = ALONE, code: UserCode | None = None
) -> Session:
    """A run before its first step: the network of the recipe, built for the data and prepared for the method."""
    network = build_for_data(recipe, data, device, ranks.count, code)
    return Session(recipe, network, steps_per_epoch(recipe, data, ranks.count), device, ranks)


def _load_data(recipe: Recipe, device: torch.device, data_dir: Path | None) -> Dataset[Split]:
    if recipe.data.name == IMAGE_FOLDER and not recipe.data.path and data_dir is None:
        raise DataError("a ticket does not say where the images are; give their folder with --data-dir")
    return load_data(
        recipe.data.name,
        device,
        Path(recipe.data.path) if recipe.data.path else data_dir,
        augmentation=recipe.data.augmentation,
        normalization=recipe.data.normalization,
        limit=recipe.data.limit or None,
        train_limit=recipe.data.train_limit or None,
        image_size=recipe.data.image_size,
    )


def _result(session: Session, test: dict[str, float]) -> dict[str, Any]:
    """The numbers of a finished run, as they appear in its record."""
    model = session.model
    epoch = session.metrics[selected_epoch(session)]
    layers = masked_layers(model).values()
    weights = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim > 1)
    result: dict[str, Any] = {
        "test_accuracy": test["accuracy"],
        "test_loss": test["loss"],
        "validation_accuracy": epoch["validation_accuracy"],
        "weights": sum(layer.weight.numel() for layer in layers) if layers else weights,
        "kept": sum(int(layer.mask.sum()) for layer in layers) if layers else weights - pruned_count(model),
        "model_sha256": _model_sha256(model),
    }
    if session.recipe.training.select_epoch == "best_validation":
        result["tested_epoch"] = epoch["epoch"]
    return result


def _save_ticket(session: Session, data: Dataset[Split], result: dict[str, Any], path: Path) -> int:
    """Save the network as a ticket; returns its size in bytes."""
    portable = recipe_file.without_places(session.recipe)
    settings = recipe_file.changed(portable) | {"network": ticket_options(portable, data)}
    metrics = {name: round(result[name], 4) for name in _IN_TICKETS if name in result}
    half: Literal[False, "exact"] = "exact" if portable.training.norm_statistics == "recomputed_half" else False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnmaskedWarning)  # said when the network was masked
        save_ticket(session.model, path, recipe=settings, metrics=metrics, half=half)
    return path.stat().st_size


def _randomization_milliseconds(session: Session) -> float | None:
    """How long Randomize takes on the network of a finished run (Appendix C.2); it changes the network."""
    randomizers = [stepper for stepper in session.steppers if isinstance(stepper, IterativeRandomization)]
    if not randomizers:
        return None
    times = []
    for _ in range(_TIMED_RANDOMIZATIONS):
        _synchronize(session.device)
        started = time.perf_counter()
        randomizers[0].randomize()
        _synchronize(session.device)
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _model_sha256(model: nn.Module) -> str:
    """SHA-256 of the state dict without iteration counts: equal if and only if two runs end with the same network."""
    digest = hashlib.sha256()
    state = model.state_dict()
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, MaskedParametrization):
            # Whatever integers hold the draws, and without the counts of steppers.
            state |= {f"{path}.draw": module.draw.int(), f"{path}._extra_state": module.description()}
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
