"""Read and write recipes as TOML and dicts; override settings; digests and differences of recipes."""

import difflib
import functools
import hashlib
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

from iterand.checks import is_text, shown
from iterand.errors import RecipeError, extra
from iterand.lab.networks.external import names_file
from iterand.lab.training import recipe as schema
from iterand.lab.training.recipe import Arguments, Recipe

_LABELS = ("name", "description")  # without influence on the result


def from_dict(values: Mapping[str, Any]) -> Recipe:
    """A recipe from nested tables; unknown keys, wrong types and numbers out of range are errors."""
    flat = _flatten(_with_current_keys(values))
    sections: dict[str, dict[str, Any]] = {}
    known = schema.recipe_keys()
    for key, value in flat.items():
        if key not in known:
            raise RecipeError(_unknown(key))
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = _checked(key, known[key], value)
    top = sections.pop("", {})
    return Recipe(**top, **{name: schema.SECTIONS[name](**part) for name, part in sections.items()})


def from_toml(text: str, where: str, find: Callable[[str], Recipe] | None = None) -> Recipe:
    """A recipe from TOML; ``where`` names the source in errors, ``find`` looks up the recipe that it extends."""
    try:
        values = tomllib.loads(text)
        if find is not None and "extends" in values:
            base = values.pop("extends")
            if not isinstance(base, str):
                raise RecipeError(f"extends is {base!r}; it must be the name of a recipe or the path of a .toml file")
            values = _merged(as_dict(find(base)), _with_current_keys(values))
        return from_dict(values)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None
    except (ValueError, RecursionError) as error:  # ValueError: also for integers that are too long for Python
        raise RecipeError(f"{where} is not valid TOML: {error}") from None


def read(path: Path, find: Callable[[str], Recipe] | None = None) -> Recipe:
    """The recipe in a file."""
    try:
        if path.is_char_device() or path.is_block_device():  # which may have no end
            raise RecipeError(f"cannot read the recipe {path}: this is a device, not a file")
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte-order mark
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RecipeError(f"cannot read the recipe {path}: {reason}") from None
    return from_toml(text, str(path), find)


def as_dict(recipe: Recipe) -> dict[str, Any]:
    """The whole recipe as nested tables, defaults included, without the keys that it cannot have."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(recipe)))  # lists, as in a file, not tuples
    for name, section in (("data", recipe.data), ("network", recipe.network), ("training", recipe.training)):
        for key in section.unused:
            del values[name][key]
    return values


def to_toml(recipe: Recipe) -> str:
    """The same as TOML."""
    with extra("lab", "writing a recipe as TOML"):
        import tomli_w
    return tomli_w.dumps(as_dict(recipe))


def override(recipe: Recipe, settings: Iterable[str]) -> Recipe:
    """The recipe with ``key=value`` settings applied; a key without its table is enough where it is unique."""
    values = asdict(recipe)
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise RecipeError(f"--set {setting!r} has no '='; write key=value, for instance method.rate=0.1")
        key = _full_key(key.strip())
        if key == "scale":
            raise RecipeError("scale only marks dry runs; to make one, use 'iterand reproduce EXPERIMENT --scale tiny'")
        section, _, name = key.rpartition(".")
        (values[section] if section else values)[name] = _value(text.strip())
    return from_dict(values)


def refuse_without_effect(recipe: Recipe, settings: Iterable[str]) -> None:
    """Refuse overrides that this recipe, of which they are a part, does not read."""
    values, defaults, known = _flatten(as_dict(recipe)), _defaults(), schema.recipe_keys()
    for key in (_full_key(setting.partition("=")[0].strip()) for setting in settings):
        decides, readers = known[key].metadata.get("only_for", (None, ()))
        if decides and values[decides] not in readers and values[key] != defaults[key]:
            raise RecipeError(
                f"{key} is for {decides} = {' or '.join(map(repr, readers))}, but it is {values[decides]!r}; leave it "
                f"out, or set {decides}"
            )


def digest(recipe: Recipe) -> str:
    """Ten characters that identify the settings of a recipe, without its name and description.

    Only settings that differ from the defaults are hashed, so a new key does not change the digests of older runs.
    """
    chosen = {key: value for key, value in _changed(without_places(recipe)).items() if key not in _LABELS}
    if chosen.pop("training.select_epoch", None):
        chosen["training.tested"] = "best"  # its old name and value: recorded runs keep their digests
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:10]


def without_places(recipe: Recipe) -> Recipe:
    """The recipe without the folders of the user's images, network and teacher, which say nothing about the result.

    These are identified by ``data.sha256``, ``network.sha256`` and ``training.teacher_sha256``.
    """
    data, network, training = recipe.data, recipe.network, recipe.training
    if data.path:
        data = replace(data, path="")
    if names_file(network.name):
        source, _, function = network.name.rpartition(":")
        network = replace(network, name=f"{Path(source).name}:{function}")
    if training.teacher:
        training = replace(training, teacher=Path(training.teacher).name)
    return replace(recipe, data=data, network=network, training=training)


def changed(recipe: Recipe) -> dict[str, Any]:
    """The settings that differ from the defaults, as nested tables without the description, for ``from_dict``."""
    tables: dict[str, Any] = {}
    for key, value in _changed(recipe).items():
        section, _, name = key.rpartition(".")
        if key != "description":
            (tables.setdefault(section, {}) if section else tables)[name] = value
    return tables


def _changed(recipe: Recipe) -> dict[str, Any]:
    settings = _flatten(as_dict(from_dict(as_dict(recipe))))
    defaults = _defaults()
    return {key: value for key, value in settings.items() if value != defaults[key]}


@functools.cache
def _defaults() -> dict[str, Any]:
    return _flatten(json.loads(json.dumps(asdict(Recipe()))))


def difference(old: Recipe, new: Recipe) -> list[str]:
    """A sentence for each setting that differs."""
    return [f"{key} is {after} here and {before} there" for key, (before, after) in changes(old, new).items()]


def changes(old: Recipe, new: Recipe) -> dict[str, tuple[str, str]]:
    """The settings that differ, as JSON: before and after."""
    before, after = (_flatten(asdict(without_places(each))) for each in (old, new))
    text = functools.partial(json.dumps, ensure_ascii=False)
    return {
        key: (text(before[key]), text(after[key])) for key in after if after[key] != before[key] and key not in _LABELS
    }


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.") if prefix + key in schema.SECTIONS else {prefix + key: value}
        else:
            flat[prefix + key] = value
    return flat


def _with_current_keys(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same tables with ``training.tested``, a key of older records and run folders, under its current name."""
    training = values.get("training")
    if not isinstance(training, Mapping) or "tested" not in training or "select_epoch" in training:
        return values
    others = {key: value for key, value in training.items() if key != "tested"}
    selected = "best_validation" if training["tested"] == "best" else training["tested"]
    return {**values, "training": {**others, "select_epoch": selected}}


def _merged(base: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The base with these values in it; tables are merged."""
    return base | {
        key: base[key] | value if key in schema.SECTIONS and isinstance(value, dict) else value
        for key, value in values.items()
    }


def _full_key(key: str) -> str:
    known = schema.recipe_keys()
    if key in known:
        return key
    full = [name for name in known if name.rpartition(".")[2] == key]
    if len(full) > 1:
        raise RecipeError(f"recipe key {key!r} could be {' or '.join(full)}; write the one you mean")
    if not full:
        raise RecipeError(_unknown(key))
    return full[0]


def _unknown(key: str) -> str:
    known = [*schema.recipe_keys(), *schema.SECTIONS]
    if key in schema.SECTIONS:
        return f"recipe key {key!r} is a table; its keys are {', '.join(n for n in known if n.startswith(f'{key}.'))}"
    names = {name.rpartition(".")[2]: name for name in known} | {name: name for name in known}
    names |= dict.fromkeys(("tested", "training.tested"), "training.select_epoch")  # its old name
    close = difflib.get_close_matches(key, names, n=1) or difflib.get_close_matches(key.rpartition(".")[2], names, n=1)
    hint = f"did you mean {names[close[0]]!r}?" if close else f"its tables are {', '.join(schema.SECTIONS)}"
    return f"recipe has no key {key!r}; {hint}"


def _checked(key: str, entry: Any, value: Any) -> Any:
    kind, given = entry.type, value
    choices, low, high = (entry.metadata.get(name) for name in ("choices", "low", "high"))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 1 << 53 else math.inf if value > 0 else -math.inf
    if kind == tuple[int, ...]:
        if not isinstance(value, (list, tuple)) or not all(type(item) is get_args(kind)[0] for item in value):
            raise RecipeError(f"{key} is {shown(value)}; it must be a list of whole numbers")
        if not all(low <= item <= high for item in value):
            raise RecipeError(f"{key} is {shown(value)}; each must be at least {low} and at most {high}")
        return tuple(value)
    if kind == tuple[str, ...]:
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) and is_text(item) for item in value):
            raise RecipeError(f"{key} is {shown(value)}; it must be a text, such as *.weight, or a list of texts")
        return tuple(value)
    if kind is Arguments:
        return _checked_arguments(key, value)
    if type(value) is not kind:
        words = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
        raise RecipeError(f"{key} is {shown(value)}; it must be {words[kind]}")
    if kind is str and not is_text(value):
        raise RecipeError(f"{key} is {shown(value)}; it must be text that UTF-8 can hold")
    if choices and value not in choices:
        close = difflib.get_close_matches(value, choices, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise RecipeError(f"{key} is {shown(value)}; it must be one of {', '.join(choices)}{hint}")
    if low is not None and not low <= value <= high:
        least, most = (bound if kind is int else f"{bound:g}" for bound in (low, high))
        text = shown(given if kind is float and math.isinf(value) else value)
        raise RecipeError(f"{key} is {text}; it must be at least {least} and at most {most}")
    return value


def _checked_arguments(key: str, value: Any) -> Arguments:
    """A table of texts, numbers, true or false, and lists of these."""
    if not isinstance(value, Mapping):
        raise RecipeError(f"{key} is {shown(value)}; it must be a table, such as {{width = 16}}")
    for name, argument in value.items():
        items = argument if isinstance(argument, (list, tuple)) else [argument]
        if not isinstance(name, str) or not name.isidentifier():
            raise RecipeError(f"{key} has the key {shown(name)}; keys are names of arguments in Python")
        if not all(map(_plain, items)):
            raise RecipeError(
                f"{key}.{name} is {shown(argument)}; it must be a text, a number, true or false, or a list of these"
            )
    return Arguments({name: list(each) if isinstance(each, tuple) else each for name, each in value.items()})


def _plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if type(value) is int:
        return abs(value) < 1 << 63
    return isinstance(value, bool) or (isinstance(value, str) and is_text(value))


_BARE_POINT = re.compile(r"[+-]?(\d+\.|\.\d+)([eE][+-]?\d+)?")  # .5 and 1. are no numbers in TOML


def _value(text: str) -> Any:
    """A TOML value, or the text itself where it is not valid TOML, so that names need no quotes."""
    try:
        (value,) = tomllib.loads(f"value = {text}").values()  # further lines would set further keys
        return value
    except (ValueError, RecursionError):
        return float(text) if _BARE_POINT.fullmatch(text) else text
