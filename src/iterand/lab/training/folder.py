"""A run folder: recipe, metrics, checkpoint, ticket and record; what is written when, and how records are checked."""

import json
import math
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iterand.checks import is_text, shown
from iterand.errors import IterandError, RecipeError, extra
from iterand.files import atomic_write, concerns, locked, new_folder, remove_unfinished
from iterand.lab.training import recipe_file
from iterand.lab.training.checkpoint import FILES, Checkpoint, read_checkpoint, snapshot, write_checkpoint
from iterand.lab.training.recipe import Recipe

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

RECIPE = "recipe.toml"
METRICS = "metrics.jsonl"
ENVIRONMENT = "environment.json"
RECORD = "record.json"
TICKET = "model.ticket"
TENSORBOARD = "tensorboard"
_LOCK = ".lock"
_OWN = (RECIPE, METRICS, ENVIRONMENT, RECORD, TICKET, *FILES)
_WRITER = ThreadPoolExecutor(1, thread_name_prefix="iterand-checkpoint")


def default_path(recipe: Recipe, base: Path = Path("runs")) -> Path:
    """The folder of a run, named by its settings, so that no run is done twice."""
    name = recipe.name
    if not name.strip() or not name.isprintable() or name[0] in "-." or "/" in name or "\\" in name:
        raise ValueError(f"name is {name!r}, by which no folder can be called; choose another, or give --out")
    return base / f"{name}-{recipe_file.digest(recipe)}"


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writer: SummaryWriter | None = None
        self._saving: Future[None] | None = None
        self._fresh = False
        self._record: dict[str, Any] | None = None

    @contextmanager
    def opened(self, recipe: Recipe, *, fresh: bool = False) -> Iterator[None]:
        """Lock the folder for this run; a run of another recipe in it is refused with the difference.

        ``fresh`` replaces its contents, but not before the run starts: until then the run may still be refused, and a
        new folder is then removed. The folder of a complete run is only read, so it may be read-only.
        """
        if fresh or not (self.path / RECORD).exists():
            require_writers()
            if not is_text(str(self.path)):  # TensorBoard could not write to it
                raise IterandError(f"the run folder {shown(str(self.path))} has no name in UTF-8; choose another --out")
        self._fresh, self._record = fresh, None
        try:
            if not fresh and self._find_record(recipe):
                yield
                return
            with new_folder(self.path), _locked(self.path), _reported_once():
                if not fresh:
                    self._check(recipe)
                    self._find_record(recipe)  # another process may have written it before the lock was free
                for name in _OWN:
                    remove_unfinished(self.path / name)
                try:
                    yield
                finally:
                    try:
                        self._finish_saving()
                    finally:
                        self._finish_log()
        except OSError as error:
            if not concerns(error, self.path) or isinstance(error, ConnectionError):
                raise  # an error of another file, such as one of the data, or of another process
            raise IterandError(f"cannot write to the run folder {self.path}: {error.strerror or error}") from error

    def start(self, recipe: Recipe, environment: dict[str, Any]) -> None:
        """Write the recipe of the run and the description of its environment."""
        if self._fresh:
            self._clear()
            self._fresh = False
        atomic_write(self.path / RECIPE, recipe_file.to_toml(recipe).encode())
        atomic_write(self.path / ENVIRONMENT, _json(environment))

    def start_log(self, metrics: Iterable[dict[str, Any]]) -> None:
        """Start the log with these epochs; those logged after the checkpoint are repeated, so they are removed."""
        from torch.utils.tensorboard import SummaryWriter

        metrics = list(metrics)
        atomic_write(self.path / METRICS, "".join(json.dumps(line) + "\n" for line in metrics).encode())
        self._writer = SummaryWriter(str(self.path / TENSORBOARD), purge_step=len(metrics) + 1)

    def log(self, metrics: dict[str, Any]) -> None:
        """Add an epoch to the log."""
        with (self.path / METRICS).open("a") as file:
            file.write(json.dumps(metrics) + "\n")
        if self._writer is not None:
            for name, value in metrics.items():
                if name != "epoch":
                    self._writer.add_scalar(name, value, metrics["epoch"])

    def _finish_log(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def finish(self, record: dict[str, Any]) -> None:
        """Write the record of the whole run into one file; with it the run is complete."""
        self._finish_saving()
        atomic_write(self.path / RECORD, _json(record))

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint in the background; the next one, and closing the folder, wait until it is on disk."""
        self._finish_saving()
        self._saving = _WRITER.submit(write_checkpoint, self.path, snapshot(checkpoint))

    def _finish_saving(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def last_checkpoint(self) -> Checkpoint | None:
        """The last checkpoint, if there is one."""
        return None if self._fresh else read_checkpoint(self.path)

    def record(self) -> dict[str, Any] | None:
        """The record, if the run was complete when the folder was opened."""
        return self._record

    def recipe(self) -> Recipe:
        """The recipe of the run."""
        if not (self.path / RECIPE).exists():
            raise RecipeError(f"{self.path} is not a run folder: it holds no {RECIPE}")
        return recipe_file.read(self.path / RECIPE)

    def _find_record(self, recipe: Recipe) -> bool:
        """Read the record, if there is one, and check that it is of this recipe."""
        path = self.path / RECORD
        if not path.exists():
            return False
        try:
            found = check_complete(read_record(path))
        except IterandError as error:
            raise IterandError(
                f"{path} is not a record that can be used: {error}; remove it, choose another --out, or use --fresh "
                "to replace the run"
            ) from None
        own = recipe_file.from_dict(found["recipe"])
        self._compare(own, recipe)
        self._record = found | {"recipe": recipe_file.as_dict(own)}
        return True

    def _check(self, recipe: Recipe) -> None:
        begun = (self.path / METRICS).exists() or (self.path / RECORD).exists()
        if begun and (self.path / RECIPE).exists():
            self._compare(self.recipe(), recipe)

    def _compare(self, there: Recipe, here: Recipe) -> None:
        difference = recipe_file.difference(there, here)
        if difference:
            raise IterandError(
                f"{self.path} holds a run of other settings: {'; '.join(difference)}; "
                "choose another --out, or --fresh to replace it"
            )

    def _clear(self) -> None:
        for name in _OWN:
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.path / TENSORBOARD, ignore_errors=True)


class FollowerFolder(RunFolder):
    """A run folder that neither writes nor reads, for all ranks but the first."""

    @contextmanager
    def opened(self, recipe: Recipe, *, fresh: bool = False) -> Iterator[None]:
        """Do nothing."""
        yield

    def start(self, recipe: Recipe, environment: dict[str, Any]) -> None:
        """Do nothing."""

    def start_log(self, metrics: Iterable[dict[str, Any]]) -> None:
        """Do nothing."""

    def log(self, metrics: dict[str, Any]) -> None:
        """Do nothing."""

    def finish(self, record: dict[str, Any]) -> None:
        """Do nothing."""

    def save(self, checkpoint: Checkpoint) -> None:
        """Do nothing."""

    def last_checkpoint(self) -> Checkpoint | None:
        """No checkpoint: it comes from the first rank."""
        return None

    def record(self) -> dict[str, Any] | None:
        """No record: it comes from the first rank."""
        return None


def require_writers() -> None:
    """Raise before a run, not after its data are loaded, if a package for writing its files is missing."""
    with extra("lab", "training by a recipe"):
        import tensorboard  # noqa: F401
        import tomli_w  # noqa: F401


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _locked(folder: Path) -> AbstractContextManager[None]:
    """Lock the folder against a second process."""
    taken = IterandError(f"another process is training in {folder}; wait for it, or choose another --out")
    return locked(folder / _LOCK, taken)


@contextmanager
def _reported_once() -> Iterator[None]:
    """Do not print errors of TensorBoard's thread when it cannot write: the next call raises them."""
    before = threading.excepthook

    def report(error: threading.ExceptHookArgs) -> None:
        of_tensorboard = type(error.thread).__module__.startswith("tensorboard.")
        if not (of_tensorboard and isinstance(error.exc_value, OSError)):
            before(error)

    threading.excepthook = report
    try:
        yield
    finally:
        threading.excepthook = before


# Records

RECORD_FORMAT = "iterand record 1"
RECORD_FAMILY = RECORD_FORMAT.rpartition(" ")[0]
"""The common prefix of the formats of all versions."""

PER_EPOCH = {"epoch": 1e9, "train_accuracy": 100.0, "validation_accuracy": 100.0}
"""Numbers of each epoch that are read, and the largest value of each."""

_RESULT = {"test_accuracy": 100.0}
_OPTIONAL = {
    "validation_accuracy": 100.0,
    "weights": 1e18,
    "kept": 1e18,
    "float32_bytes": 1e18,
    "ticket_bytes": 1e18,
    "tested_epoch": 1e9,
}
_SECONDS = 1e12
_DEEPEST = 20  # nested tables
_LONGEST = 1 << 26  # bytes of a file


def read_record(path: Path) -> Any:
    """The JSON value in a file; IterandError if it cannot be read."""
    try:
        if not path.is_file():
            raise IterandError("it is no file")
        if path.stat().st_size > _LONGEST:
            raise IterandError(f"it has more than {_LONGEST:,} bytes")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise IterandError(f"it cannot be read: {error}") from None


def check_record(value: Any) -> dict[str, Any]:
    """The value itself, if it is a record in the format of this version; IterandError otherwise."""
    kind = value.get("format") if isinstance(value, dict) else None
    if kind != RECORD_FORMAT:
        raise IterandError(f"its format is {shown(kind)}; this version reads {RECORD_FORMAT!r}")
    record: dict[str, Any] = value
    _check_plain(record)
    for key, wanted in (("recipe", dict), ("result", dict), ("metrics", list), ("environment", dict)):
        if not isinstance(record.get(key), wanted):
            raise IterandError(f"it has no {key}")
    if not record["metrics"] or not all(isinstance(epoch, dict) for epoch in record["metrics"]):
        raise IterandError("its metrics are not one table an epoch")
    for epoch in record["metrics"]:
        _check_numbers("metrics.", epoch, PER_EPOCH)
    result = record["result"]
    _check_numbers("result.", result, _RESULT | {key: most for key, most in _OPTIONAL.items() if key in result})
    _check_numbers("", record, {"seconds": _SECONDS})
    if record.get("randomization_milliseconds") is not None:
        _check_numbers("", record, {"randomization_milliseconds": 1000 * _SECONDS})
    recipe_file.from_dict(record["recipe"])
    return record


def check_complete(value: Any) -> dict[str, Any]:
    """The same for the record of a run folder, of which more entries are read."""
    record = check_record(value)
    needed = ("validation_accuracy", "weights", "kept", "float32_bytes")
    _check_numbers("result.", record["result"], {key: _OPTIONAL[key] for key in needed})
    loss = record["result"].get("test_loss")
    if isinstance(loss, bool) or not isinstance(loss, (int, float)) or not abs(loss) < math.inf:
        raise IterandError(f"its result.test_loss is {shown(loss)}; it must be a finite number")
    return record


def _check_numbers(prefix: str, table: Mapping[str, Any], largest: Mapping[str, float]) -> None:
    for key, most in largest.items():
        number = table.get(key)
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number <= most:
            raise IterandError(f"its {prefix}{key} is {shown(number)}; it must be a number from 0 to {most:g}")


def _check_plain(record: dict[str, Any]) -> None:
    """Refuse what cannot be displayed: tables nested too deeply, and text that is not valid UTF-8."""
    left: list[tuple[Any, int]] = [(record, 0)]
    while left:
        value, depth = left.pop()
        if depth > _DEEPEST:
            raise IterandError(f"its tables are nested more than {_DEEPEST} deep")
        if isinstance(value, dict):
            left += [(entry, depth + 1) for pair in value.items() for entry in pair]
        elif isinstance(value, list):
            left += [(entry, depth + 1) for entry in value]
        elif isinstance(value, str) and not is_text(value):
            raise IterandError(f"it holds {shown(value)}, which UTF-8 cannot hold")
