"""Imports point one way: each part of the package stands on what is below it, and only the command line talks."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import iterand

PACKAGE = Path(__file__).parents[1] / "src" / "iterand"
GROUND = {"errors", "checks", "files", "memory"}
CORE = "philox backend distributions mask_kinds selection settings stepping history parametrization parameter_kinds "
CORE += "maskable freezing surgery sparsity existing planning masking randomization summarizing"
BELOW = {part: GROUND | set(CORE.split()[:n]) for n, part in enumerate(CORE.split())}
BELOW |= dict.fromkeys(GROUND, GROUND)
LIBRARY = GROUND | set(CORE.split())
BELOW["engine"] = LIBRARY
BELOW["ticket"] = LIBRARY | {"lab.networks"}  # a ticket with a recipe is built without a model
BELOW["inference"] = LIBRARY | {"ticket"}
BELOW["integrations"] = LIBRARY | {"ticket"}
BELOW["__init__"] = LIBRARY | {"engine", "ticket", "inference"}
BELOW["lab"] = set[str]()
BELOW["lab.networks"] = BELOW["lab.data"] = GROUND | {"philox"}
BELOW["lab.theory"] = LIBRARY | {"__init__"}
BELOW["lab.training"] = LIBRARY | {"__init__", "engine", "ticket", "lab.networks", "lab.data"}
BELOW["lab.experiments"] = BELOW["lab.training"] | {"lab.training"}
BELOW["lab.report"] = BELOW["lab.experiments"] | {"lab.experiments"}
BELOW["lab.benchmarks"] = BELOW["lab.report"] | {"lab.report", "inference"}
BELOW["cli"] = set(BELOW)
BELOW["__main__"] = {"cli"}


def imports(path: Path) -> Iterator[str]:
    """The full names of what a file imports."""
    package = ("iterand", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield from (".".join(filter(None, (*base, node.module, alias.name))) for alias in node.names)


def part(name: str) -> str:
    """The part of the package that a full name lies in; a public name lies in ``__init__``."""
    _, *names = name.split(".")
    return next((".".join(names[:n]) for n in (2, 1) if ".".join(names[:n]) in BELOW), "__init__")


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    here = part(".".join(("iterand", *path.relative_to(PACKAGE).with_suffix("").parts)))
    assert here in BELOW, f"say in this test what {here} may stand on"
    ours = (name for name in imports(path) if name.split(".")[0] == "iterand" and name != "iterand.__version__")
    wanted = {part(name) for name in ours}
    assert wanted <= BELOW[here] | {here}
    if here != "cli":
        assert not {name.split(".")[0] for name in imports(path)} & {"typer", "click", "rich", "argparse"}


def run(program: str, *arguments: str) -> list[str]:
    """The words that a program prints in a process of its own."""
    command = [sys.executable, "-c", program, *arguments]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr[-2000:]
    return answer.stdout.split()


WITHOUT = """
import builtins, importlib, pkgutil, sys

missing, exempt = sys.argv[1].split(), tuple(sys.argv[2:])

def imported(name, importer=None, *rest, original=builtins.__import__):
    ours = importer is not None and importer.get("__name__", "").split(".")[0] == "iterand"
    if ours and name.split(".")[0] in missing:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return original(name, importer, *rest)

builtins.__import__ = imported
import iterand
for module in pkgutil.walk_packages(iterand.__path__, "iterand."):
    if not module.name.startswith(exempt):
        importlib.import_module(module.name)
        print(module.name)
"""
FUSED = ["iterand.engine", "iterand.lab.training.fused"]
POSIX = "fcntl grp posix pty pwd resource syslog termios tty"
TRAINERS = [f"iterand.integrations.{name}" for name in ("lightning", "transformers", "hub")]
LAB = "sklearn scipy PIL matplotlib jinja2 tensorboard pooch requests tomli_w"


def test_only_the_fused_step_needs_triton():
    """There is none for macOS and Windows."""
    assert "iterand.cli.main" in run(WITHOUT, "triton", "iterand.backend.triton", *FUSED, *TRAINERS, "iterand.__main__")


def test_nothing_needs_modules_that_windows_has_not():
    assert "iterand.lab.data.workers" in run(WITHOUT, POSIX, *TRAINERS, "iterand.__main__")


def test_only_figures_pages_and_theory_need_the_lab():
    exempt = ["iterand.lab.report.figures", "iterand.lab.report.plots"]
    others = "onnx onnxruntime onnxscript ray lightning pytorch_lightning transformers huggingface_hub accelerate timm"
    exempt += [*TRAINERS, "iterand.lab.theory", "iterand.__main__"]
    found = run(WITHOUT, f"{LAB} {others}", *exempt)
    assert {"iterand.lab.training.run", "iterand.integrations"} <= set(found)


LOADED = """
import sys
exec(sys.argv[1])
print(*sys.modules)
"""
HEAVY = {
    *LAB.split(),
    "triton",
    "typer",
    "click",
    "rich",
    "iterand.lab.networks",
    "iterand.lab.data",
    "iterand.lab.training",
}


def test_the_library_loads_nothing_that_only_experiments_need():
    loaded = run(LOADED, "from iterand import *; assert prune_ and load_ticket")
    assert {"torch", "iterand.masking", "iterand.ticket.load"} <= set(loaded)
    assert not HEAVY & set(loaded)


def test_the_package_by_itself_does_not_load_torch():
    loaded = run(LOADED, "import iterand; iterand.__version__, iterand.IterandError, dir(iterand)")
    assert not {"torch", "numpy"} & set(loaded)


def test_public_names_are_what_type_checkers_see():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    shown = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("iterand")
        for alias in node.names
    }
    assert set(shown) == set(iterand.__all__)
    for name, module in shown.items():
        assert getattr(iterand, name) is getattr(importlib.import_module(module), name)
    assert set(iterand.__all__) <= set(dir(iterand))
    with pytest.raises(AttributeError, match="module 'iterand' has no attribute 'prune'"):
        iterand.prune  # noqa: B018
