"""Imports point one way: each part of the package stands on what is below it, and only the command line talks."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "iterand"
GROUND = {"errors", "checks", "files", "memory", "version"}
CORE = (
    "kernels philox distributions selection sparsity parametrization targets planning freezing attachment masking "
    "randomization scheduling summary"
)
BELOW = {part: GROUND | set(CORE.split()[:n]) for n, part in enumerate(CORE.split())}
BELOW |= dict.fromkeys(GROUND, GROUND) | {"networks": GROUND, "data": GROUND}
BELOW["ticket"] = GROUND | set(CORE.split()) | {"networks"}
BELOW["__init__"] = BELOW["ticket"] | {"ticket"}
BELOW["training"] = BELOW["theory"] = set(BELOW)
BELOW["experiments"] = BELOW["cli"] = set(BELOW)
BELOW["benchmarks"] = BELOW["cli"] = set(BELOW)
BELOW["cli"] = BELOW["__main__"] = set(BELOW)


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
    first = (*name.split("."), "")[1]
    return first if first in BELOW else "__init__"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert here in BELOW, f"say in this test what {here} may stand on"
    wanted = {part(name) for name in imports(path) if name.split(".")[0] == "iterand"}
    assert wanted <= BELOW[here] | {here}
    if here != "cli":
        assert not {name.split(".")[0] for name in imports(path)} & {"typer", "click", "rich", "argparse"}


WITHOUT_TRITON = """
import importlib, pkgutil, sys
sys.modules["triton"] = None  # as if it were not installed
import iterand
for module in pkgutil.walk_packages(iterand.__path__, "iterand."):
    if not module.name.startswith(tuple(sys.argv[1:])):
        importlib.import_module(module.name)
"""


def test_only_the_fused_step_needs_triton():
    """There is none for macOS and Windows."""
    fused = [f"iterand.training.{name}" for name in ("fused", "fusion", "trainable")]
    others = ["iterand.kernels", *fused, "iterand.__main__"]
    command = [sys.executable, "-c", WITHOUT_TRITON, *others]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr[-2000:]
