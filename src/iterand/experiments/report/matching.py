"""Which records belong to which cell: those whose recipe is the cell's in everything but the seed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from iterand.experiments.report.records import Record
from iterand.training import recipe_file
from iterand.training.recipe import Recipe


def identity(recipe: Recipe) -> str:
    """What a recipe is apart from its seed, name and description: cells and records meet by it."""
    values = recipe_file.as_dict(replace(recipe, seed=0))
    return recipe_file.digest(recipe_file.from_dict(values))  # reading it turns a whole number into the float it is


@dataclass(frozen=True)
class SetAside:
    """A record that does not count, since a newer one has the same recipe and seed."""

    record: Record
    newer: Record


@dataclass(frozen=True)
class Groups:
    """Records by what their recipe is; in a group each seed stands once."""

    by_identity: Mapping[str, tuple[Record, ...]]
    set_aside: tuple[SetAside, ...]

    def of(self, recipe: Recipe) -> tuple[Record, ...]:
        """The records of a cell with this recipe, in the order of their seeds."""
        return self.by_identity.get(identity(recipe), ())


def group(records: Iterable[Record]) -> Groups:
    """Put together what belongs together; of two records with one recipe and seed the newest counts."""
    newest: dict[tuple[str, int], Record] = {}
    older: list[tuple[tuple[str, int], Record]] = []
    for record in sorted(records, key=lambda record: (-record.written, record.path)):
        key = identity(record.recipe), record.recipe.seed
        if key in newest:
            older.append((key, record))
        else:
            newest[key] = record
    groups: dict[str, list[Record]] = {}
    for (name, _), record in sorted(newest.items()):
        groups.setdefault(name, []).append(record)
    return Groups(
        {name: tuple(members) for name, members in groups.items()},
        tuple(SetAside(record, newest[key]) for key, record in older),
    )
