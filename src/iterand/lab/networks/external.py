"""Networks that are not of this package: from timm by name, and from a Python file or module of the user's."""

import contextlib
import difflib
import functools
import hashlib
import importlib
import importlib.util
import os
import random
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from iterand.checks import shown
from iterand.errors import IterandError, RecipeError
from iterand.memory import exhaustion_explained

TIMM = "timm:"
EXTERNAL_FORMS = "'timm:NAME', 'FILE.py:FUNCTION' or 'MODULE:FUNCTION'"
_FROM_DATA = ("num_classes", "in_chans")
_OF_FILES = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")


def is_external(name: str) -> bool:
    """Whether the name is of a network outside of this package."""
    return ":" in name


def names_code(name: str) -> bool:
    """Whether the name is of a function in a Python file or module, which runs when the network is built."""
    return is_external(name) and not name.startswith(TIMM)


def names_file(name: str) -> bool:
    """Whether the name is of a function in a Python file."""
    return names_code(name) and name.rpartition(":")[0].endswith(".py")


def build_timm(name: str, classes: int, channels: int, arguments: Mapping[str, Any], seed: int = 0) -> nn.Module:
    """The network ``timm:NAME`` with the weights that timm draws under ``seed``; nothing is read or downloaded."""
    for key in arguments:
        if key in _FROM_DATA:
            raise ValueError(f"network.arguments has {key!r}, which comes from the data; leave it out")
        if key in _OF_FILES:
            raise ValueError(f"network.arguments has {key!r}, but weights are random, never read; leave it out")
    timm, plain = _import_timm(name), name.removeprefix(TIMM)
    if not timm.is_model(plain):  # names with a scheme, such as hf-hub:NAME, would be downloaded
        close = difflib.get_close_matches(plain, timm.list_models(), n=1)
        hint = f"did you mean {TIMM + close[0]!r}?" if close else "timm.list_models() in Python lists the names"
        raise ValueError(f"network.name is {shown(name)}, but timm has no such model; {hint}")
    with _seeded(seed):
        try:
            with _enough_memory():
                network = timm.create_model(
                    plain, pretrained=False, num_classes=classes, in_chans=channels, **arguments
                )  # fmt: skip
        except IterandError:
            raise
        except Exception as error:
            raise ValueError(
                f"network.name is {name!r}, which timm cannot build with {_called(classes, arguments)}: "
                f"{_reason(error)}; change network.arguments"
            ) from None
    return _checked(name, network)


def build_timm_of_ticket(options: Mapping[str, Any]) -> nn.Module:
    """The network ``timm:NAME`` from the options in a ticket.

    What a ticket names comes from others, so timm gets the number of classes and channels only. A ticket with further
    arguments needs a model.
    """
    arguments = options.get("arguments")
    own = {"classes": options.get("classes"), **(arguments if isinstance(arguments, dict) else {})}
    if set(own) != {"classes", "in_chans"} or not all(type(number) is int and number > 0 for number in own.values()):
        raise ValueError(
            "it was built with network.arguments of its own; in Python, give the model, too: load_ticket(file, model)"
        )
    return build_timm(options["name"], own["classes"], own["in_chans"], {})


def _import_timm(name: str) -> Any:
    try:
        return importlib.import_module("timm")
    except ModuleNotFoundError as error:
        package = (error.name or "timm").partition(".")[0]
        raise IterandError(f"network.name is {name!r}, which needs {package}; pip install timm torchvision") from None
    except Exception as error:  # torchvision of another torch version raises a RuntimeError
        raise IterandError(
            f"network.name is {name!r}, but timm cannot be imported: {_reason(error)}; install the torchvision that "
            "belongs to the installed torch"
        ) from None


@dataclass(frozen=True)
class UserCode:
    """A function or class in a Python file or module that returns a network; it is imported when it is first called.

    Only what the user types may make one of these. A name in a ticket, checkpoint or record must not.
    """

    name: str

    def __post_init__(self) -> None:
        source, _, function = self.name.rpartition(":")
        importable = names_file(self.name) or all(part.isidentifier() for part in source.split("."))
        if not importable or not function.isidentifier():
            raise RecipeError(
                f"network.name is {shown(self.name)}; a network of another package or file is {EXTERNAL_FORMS}"
            )

    @property
    def source(self) -> str:
        """The file or module."""
        return self.name.rpartition(":")[0]

    @functools.cached_property
    def file(self) -> Path:
        """The file of the code."""
        if names_file(self.name):
            path = Path(self.source)
            if not path.is_file():
                raise RecipeError(f"network.name is {self.name!r}, but there is no file {path}")
            return path.absolute()
        with _importing_from(Path.cwd()), self._explained("cannot be imported"):
            try:
                found = importlib.util.find_spec(self.source)
            except ModuleNotFoundError:  # of a package that the module would be in
                found = None
        if found is not None and (not found.origin or not Path(found.origin).is_file()):
            raise RecipeError(
                f"network.name is {self.name!r}, but {self.source} is a part of Python or a folder, without a file; "
                "name the module or file of a function that returns a torch.nn.Module"
            )
        if found is None:
            raise RecipeError(
                f"network.name is {self.name!r}, but no module {self.source} can be imported; install it, run iterand "
                f"in the folder that has it, or name its file: 'FILE.py:{self.name.rpartition(':')[2]}'"
            )
        return Path(cast(str, found.origin)).absolute()

    @property
    def sha256(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(self._content).hexdigest()

    def build(self, classes: int, arguments: Mapping[str, Any], seed: int = 0) -> nn.Module:
        """Call the function with the number of classes and the arguments of the recipe, under ``seed``."""
        function = self._function
        problem = f"fails when it is called with {_called(classes, arguments)}"
        with _importing_from(self.file.parent), _seeded(seed), self._explained(problem), _enough_memory():
            network = function(classes, **arguments)
        return _checked(self.name, network)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn an error that the user's file raises in this block into one sentence with its line."""
        with self._explained("fails", only_inside=True):
            yield

    @functools.cached_property
    def _function(self) -> Callable[..., Any]:
        function = self.name.rpartition(":")[2]
        with self._explained("cannot be imported"):
            if names_file(self.name):
                module = self._load_file()
            else:
                with _importing_from(Path.cwd()):
                    module = importlib.import_module(self.source)
        found = getattr(module, function, None)
        if found is None:
            close = difflib.get_close_matches(function, [key for key in vars(module) if key[0] != "_"], n=1)
            hint = f"did you mean {close[0]!r}?" if close else "define it there"
            raise RecipeError(f"network.name is {self.name!r}, but {self.file} has no {function}; {hint}")
        if not callable(found) or isinstance(found, nn.Module):
            raise RecipeError(
                f"network.name is {self.name!r}, which is {_kind(found)}; it must be a function (or class) that takes "
                "the number of classes and returns a torch.nn.Module"
            )
        function_found: Callable[..., Any] = found
        return function_found

    @functools.cached_property
    def _content(self) -> bytes:
        try:
            return self.file.read_bytes()
        except OSError as error:
            raise RecipeError(f"cannot read {self.file}: {error.strerror or error}") from None

    def _load_file(self) -> Any:
        """The file as a module: exactly the bytes of the digest, not a cached compilation of other ones."""
        module = types.ModuleType(f"_iterand_network_{self.sha256[:10]}")
        module.__file__ = str(self.file)
        sys.modules[module.__name__] = module
        try:
            with _importing_from(self.file.parent):
                exec(compile(self._content, self.file, "exec", dont_inherit=True), vars(module))
        except BaseException:
            del sys.modules[module.__name__]
            raise
        return module

    @contextlib.contextmanager
    def _explained(self, problem: str, *, only_inside: bool = False) -> Iterator[None]:
        try:
            yield
        except IterandError:
            raise
        except (Exception, SystemExit) as error:
            where = self.where(error)
            if only_inside and not where:
                raise
            raise RecipeError(f"network.name is {self.name!r}, which {problem}: {_reason(error)}{where}") from error

    def where(self, error: BaseException) -> str:
        """The file and line of the user's code that raised the error, in brackets; empty if it did not."""
        line = self._line(error)
        return "" if line is None else f" ({self.file}, line {line})"

    def _line(self, error: BaseException) -> int | None:
        """The line of the user's file that raised the error, or that called what raised it."""
        file = vars(self).get("file")
        if file is None:  # it was not found yet
            return None
        if isinstance(error, SyntaxError) and error.filename == str(file):
            return error.lineno
        frames = traceback.walk_tb(error.__traceback__)
        lines = [line for frame, line in frames if frame.f_code.co_filename == str(file)]
        return lines[-1] if lines else None


def _checked(name: str, network: Any) -> nn.Module:
    if not isinstance(network, nn.Module):
        raise RecipeError(f"network.name is {name!r}, which returns {_kind(network)}; it must be a torch.nn.Module")
    return network


def _kind(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _called(classes: int, arguments: Mapping[str, Any]) -> str:
    return ", ".join([f"{classes} classes", *(f"{key}={shown(value)}" for key, value in arguments.items())])


def _reason(error: BaseException) -> str:
    """Type and message of an error, in one line."""
    message = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        message = error.msg
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _enough_memory() -> contextlib.AbstractContextManager[None]:
    return exhaustion_explained("make the network smaller")


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw weights under a seed; the global generators of torch, NumPy and Python are not changed."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextlib.contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Find modules in this folder first, as a script there does."""
    path = os.fspath(folder)
    sys.path.insert(0, path)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(path)
