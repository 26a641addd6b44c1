"""Write docs/reference/cli.md from the command line, and docs/reference/recipe.md from the dataclasses of a recipe.

python tools/reference.py             # write both
python tools/reference.py --check     # exit with 1 if a page is not up to date
"""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo, ParameterInfo

from iterand.cli.main import app
from iterand.lab.training import recipe

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"

_CLI = """\
# Command line

<!-- Written by tools/reference.py from the commands themselves. -->

Results go to stdout and progress to stderr; `--json` prints one JSON object instead of text. The exit code is 0, 1
after an error, 2 for a command line that cannot be parsed, and 130 after Ctrl-C. `iterand --install-completion`
installs tab completion.
"""

_RECIPE = """\
# Recipe keys

<!-- Written by tools/reference.py from src/iterand/lab/training/recipe.py. -->

A recipe is a TOML file with the settings of a run. Every key has a default. `iterand recipes` lists the recipes of the
package, and `iterand recipes NAME` prints one with all its keys, except those for a teacher, your own images and your
own network, if it has none. Change a key on the command line with its name, or with its last part where that is unique.
`name` alone is the name of the run, not `method.name`:

```bash
iterand train conv6 --set method.rate=0.2 --set epochs=50
```

A recipe can extend another, of the package by name or in a file by its path:

```toml
extends = "resnet18"  # or "base.toml", relative to this file
name = "mine"

[method]
rate = 0.3
```
"""


def cli_page() -> str:
    """The commands with their arguments and options."""
    return "\n".join([_CLI, *_commands(app, "iterand", "##")])


def _commands(group: typer.Typer, path: str, level: str) -> Iterator[str]:
    for command in group.registered_commands:
        if command.callback is not None and not command.hidden:
            name = command.name or command.callback.__name__.replace("_", "-")
            yield from _command(command.callback, f"{path} {name}", level)
    for entry in group.registered_groups:
        if entry.typer_instance is not None:
            name = f"{path} {entry.name}"
            yield f"{level} {name}\n\n{entry.typer_instance.info.help}\n"
            yield from _commands(entry.typer_instance, name, level + "#")


def _command(function: Callable[..., Any], path: str, level: str) -> Iterator[str]:
    """One command, read from the annotations of its function."""
    hints = get_type_hints(function, include_extras=True)
    usage, rows = path, []
    for parameter in inspect.signature(function).parameters.values():
        kind, info = get_args(hints[parameter.name])
        default = None if parameter.default is parameter.empty else parameter.default
        if isinstance(info, ArgumentInfo):
            name = info.metavar or parameter.name.upper()
            usage += f" {name}" if parameter.default is parameter.empty else f" [{name}]"
            told = _code(name)
        elif not info.hidden:
            told = _flags(parameter.name, kind, info)
        else:
            continue
        value = "required" if parameter.default is parameter.empty else _default(default, info)
        rows.append(f"| {told} | {_cell(info.help or '')} | {value} |")
    yield f"{level} {path}\n\n{_paragraphs(inspect.getdoc(function) or '')}\n\n```text\n{usage} [OPTIONS]\n```\n"
    yield "\n".join(["| argument or option | meaning | default |", "|---|---|---|", *rows]) + "\n"


def _flags(name: str, kind: Any, info: OptionInfo) -> str:
    plain = name.replace("_", "-")
    switch = bool in (kind, *get_args(kind))
    given = [entry for entry in (info.default, *(info.param_decls or ())) if isinstance(entry, str)]
    given = given or ([f"--{plain}/--no-{plain}"] if switch else [f"--{plain}"])
    named = ", ".join(_code(flag) for entry in given for flag in entry.split("/"))
    return named if switch else f"{named} {_code(info.metavar or _metavar(kind))}"


def _metavar(kind: Any) -> str:
    """What to write for a value of this type."""
    (plain,) = (
        [entry for entry in get_args(kind) if entry is not type(None)] if get_origin(kind) is UnionType else [kind]
    )
    if get_origin(plain) is list:
        return f"{_metavar(get_args(plain)[0])} …"
    if get_origin(plain) is Literal:
        return "|".join(map(str, get_args(plain)))
    if issubclass(plain, Enum):
        return "|".join(str(member.value) for member in plain)
    return {int: "INTEGER", float: "NUMBER", str: "TEXT"}.get(plain, "PATH")


def _default(value: Any, info: ParameterInfo) -> str:
    if value is None or value is False or not info.show_default:
        return ""
    return "on" if value is True else _code(str(getattr(value, "value", value)))


def recipe_page() -> str:
    """The keys with their types, values and defaults."""
    parts = [_RECIPE, "## Top level\n", _table(recipe.Recipe, "")]
    for name, section in recipe.SECTIONS.items():
        parts += [f"## {name}\n\n{inspect.cleandoc(section.__doc__ or '')}\n", _table(section, f"{name}.")]
    return "\n".join(parts)


def _table(section: type, prefix: str) -> str:
    meaning = _meanings(section)
    rows = ["| key | type | values | default | meaning |", "|---|---|---|---|---|"]
    for entry in fields(section):
        if prefix or entry.name not in recipe.SECTIONS:
            key, default = f"`{prefix}{entry.name}`", _code(_toml(entry.default))
            rows.append(
                f"| {key} | {_type(entry.type)} | {_values(entry)} | {default} | {meaning.get(entry.name, '')} |"
            )
    return "\n".join(rows) + "\n"


def _type(annotation: Any) -> str:
    names = {int: "integer", float: "number", str: "text", bool: "true or false", recipe.Arguments: "table"}
    if annotation in names:
        return names[annotation]
    if get_origin(annotation) is tuple:
        return {int: "list of integers", str: "list of texts"}[get_args(annotation)[0]]
    return "text"  # a Literal


def _values(entry: Any) -> str:
    metadata = entry.metadata
    if "choices" in metadata:
        return ", ".join(f"`{choice}`" for choice in metadata["choices"])
    if "low" not in metadata:
        return ""
    low, high = metadata["low"], metadata["high"]
    largest = {(1 << 31) - 1, 1e30}
    return f"at least {low:g}" if high in largest else f"from {low:g} to {_number(high)}"


def _number(value: float) -> str:
    return "2⁶³ − 1" if value == (1 << 63) - 1 else f"{value:g}"


def _toml(value: Any) -> str:
    if value is MISSING:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return "[]" if value == () else f"{value:g}" if isinstance(value, float) else str(value)


def _meanings(section: type) -> dict[str, str]:
    """The strings below the fields of a dataclass."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, following in zip(body.body, body.body[1:]):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            found[field.target.id] = _cell(inspect.cleandoc(following.value.value))
    return found


def _paragraphs(text: str) -> str:
    """The paragraphs of a docstring, in lines of the page's width."""
    lines = (textwrap.fill(_cell(part), 120, break_on_hyphens=False) for part in text.split("\n\n"))
    return "\n\n".join(lines)


def _cell(text: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", " ".join(text.split())).replace("|", r"\|")


def _code(text: str) -> str:
    return f"`{text}`".replace("|", r"\|") if text else ""


PAGES = {"cli.md": cli_page, "recipe.md": recipe_page}


def stale() -> list[str]:
    """The pages that differ from what would be written."""
    paths = {name: REFERENCE / name for name in PAGES}
    there = {name: path.read_text(encoding="utf-8") for name, path in paths.items() if path.is_file()}
    return [name for name, page in PAGES.items() if there.get(name) != page()]


def main(arguments: list[str]) -> None:
    """Write the pages, or check them."""
    if "--check" in arguments:
        if changed := stale():
            sys.exit(f"run python tools/reference.py, which changes {', '.join(changed)}")
        return
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
