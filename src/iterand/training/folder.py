"""A run's folder: what it is (recipe), where it ran (environment), how it went (metrics), what came out (record)."""

import json
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iterand.errors import IterandError, RecipeError, extra
from iterand.files import atomic_write, remove_unfinished
from iterand.locking import locked
from iterand.training import checkpoint, recipe_file, record
from iterand.training.checkpoint import Checkpoint
from iterand.training.recipe import Recipe

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

RECIPE = "recipe.toml"
METRICS = "metrics.jsonl"
ENVIRONMENT = "environment.json"
RECORD = "record.json"
TICKET = "model.ticket"
TENSORBOARD = "tensorboard"
_LOCK = ".lock"
_WRITER = ThreadPoolExecutor(1, thread_name_prefix="iterand-checkpoint")
_OWN = (RECIPE, METRICS, ENVIRONMENT, RECORD, TICKET, checkpoint.NAME, checkpoint.PREVIOUS, checkpoint.NEW)


def default_path(recipe: Recipe, base: Path = Path("runs")) -> Path:
    """Where a run belongs: its name comes from its settings, so no run is done twice."""
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
        """Make the folder this run's own while it goes on; another recipe in it is refused with the difference.

        ``fresh`` replaces what is in it, though not before the run starts: until then it may still be refused. The
        folder of a complete run is only read, so it may be read-only.
        """
        if fresh or not (self.path / RECORD).exists():
            require_writers()
        self._fresh, self._record = fresh, None
        try:
            if not fresh and self._find_record(recipe):
                yield
                return
            self.path.mkdir(parents=True, exist_ok=True)
            with _locked(self.path):
                if not fresh:
                    self._check(recipe)
                    self._find_record(recipe)  # another process may have written it before the lock was free
                for name in _OWN:
                    remove_unfinished(self.path / name)
                try:
                    yield
                finally:
                    self._finish_saving()
        except OSError as error:
            if error.filename is not None and self.path not in (Path(error.filename), *Path(error.filename).parents):
                raise  # of something else that the run has to do with
            raise IterandError(f"cannot write to the run folder {self.path}: {error.strerror or error}") from error
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def start(self, recipe: Recipe, environment: dict[str, Any]) -> None:
        """Write what the run is and where it happens."""
        if self._fresh:
            self._clear()
            self._fresh = False
        atomic_write(self.path / RECIPE, recipe_file.to_toml(recipe).encode())
        atomic_write(self.path / ENVIRONMENT, _json(environment))

    def start_log(self, metrics: Iterable[dict[str, Any]]) -> None:
        """Begin the log with these epochs: what was logged after the checkpoint is done again."""
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

    def finish(self, record: dict[str, Any]) -> None:
        """Write the record of the whole run, one file that can be kept by itself; with it the run is complete."""
        self._finish_saving()
        atomic_write(self.path / RECORD, _json(record))

    def save(self, state: Checkpoint) -> None:
        """Write a checkpoint, in the background; it is on the disk before the next one is, or the folder is closed."""
        self._finish_saving()
        self._saving = _WRITER.submit(checkpoint.write, self.path, checkpoint.snapshot(state))

    def _finish_saving(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def saved(self) -> Checkpoint | None:
        """The last checkpoint, if there is one."""
        return None if self._fresh else checkpoint.read(self.path)

    def record(self) -> dict[str, Any] | None:
        """The record, if the run was complete when the folder was opened."""
        return self._record

    def recipe(self) -> Recipe:
        """What the run is."""
        if not (self.path / RECIPE).exists():
            raise RecipeError(f"{self.path} is not a run folder: it holds no {RECIPE}")
        return recipe_file.read(self.path / RECIPE)

    def _find_record(self, recipe: Recipe) -> bool:
        """Read the record, if there is one."""
        path = self.path / RECORD
        if not path.exists():
            return False
        try:
            found = record.check_complete(record.read(path))
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
    """The folder as every rank but the first has it: nothing is written, nothing is known."""

    @contextmanager
    def opened(self, recipe: Recipe, *, fresh: bool = False) -> Iterator[None]:
        """Nothing."""
        yield

    def start(self, recipe: Recipe, environment: dict[str, Any]) -> None:
        """Nothing."""

    def start_log(self, metrics: Iterable[dict[str, Any]]) -> None:
        """Nothing."""

    def log(self, metrics: dict[str, Any]) -> None:
        """Nothing."""

    def finish(self, record: dict[str, Any]) -> None:
        """Nothing."""

    def save(self, state: Checkpoint) -> None:
        """Nothing."""

    def saved(self) -> Checkpoint | None:
        """None."""
        return None

    def record(self) -> dict[str, Any] | None:
        """None."""
        return None


def require_writers() -> None:
    """Say before a run, not after its data is loaded, if what it writes cannot be written."""
    with extra("lab", "training by a recipe"):
        import tensorboard  # noqa: F401
        import tomli_w  # noqa: F401


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _locked(folder: Path) -> AbstractContextManager[None]:
    """Keep a second process out of the folder."""
    taken = IterandError(f"another process is training in {folder}; wait for it, or choose another --out")
    return locked(folder / _LOCK, taken)
