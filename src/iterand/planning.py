"""Which sparsity each layer is asked for, and what cannot be asked for."""

from collections.abc import Iterable, Mapping
from typing import cast

from iterand import selection, targets
from iterand.parametrization import GlobalRanking, Ranking, Settings, floor_count
from iterand.targets import Owner


def refuse_beside_mapping(ranking: str, allocation: str, floor: float) -> None:
    """Refuse what cannot be asked for together with a sparsity for each layer."""
    asked: list[tuple[str, object, object]] = [
        ("ranking", ranking, "layer"),
        ("allocation", allocation, "uniform"),
        ("floor", floor, 0.0),
    ]
    for name, value, usual in asked:
        if value != usual:
            raise ValueError(
                f"{name} is {value!r}, but a sparsity mapping gives every layer a sparsity and a ranking of its own; "
                f"leave {name} out, or give one sparsity, and overrides= for single layers"
            )


def own_sparsities(
    chosen: Mapping[str, list[Owner]], given: Mapping[str, float | str], argument: str
) -> dict[str, float]:
    """The sparsity of each layer that a pattern of this argument names."""
    own: dict[str, float] = {}
    for name, group in chosen.items():
        asked: dict[str, float] = {}
        for owner in group:
            for pattern, value in given.items():
                if owner.matches(pattern):
                    dense = isinstance(value, str) and value == "dense"
                    what = f"{argument}[{pattern!r}]"
                    asked[owner.name] = 0.0 if dense else selection.check_sparsity(cast(float, value), what)
        if len(set(asked.values())) > 1:
            (a, p), (b, q), *_ = asked.items()
            raise ValueError(f"{a!r} and {b!r} are one tied tensor, but ask for sparsity {p} and {q}; give one")
        if asked:
            own[name] = next(iter(asked.values()))
    return own


def mapped_sparsities(chosen: Mapping[str, list[Owner]], sparsity: Mapping[str, float]) -> dict[str, float]:
    """The sparsity of every layer from an explicit map."""
    own = own_sparsities(chosen, sparsity, "sparsity")
    for name in chosen:
        if name not in own:
            raise ValueError(f"the sparsity map says nothing of {name!r}; add it, or '*' for the rest, or exclude it")
    for pattern in sparsity:
        targets.matching(pattern, [owner for group in chosen.values() for owner in group], "sparsity")
    return own


def refuse_empty(plan: Iterable[tuple[list[Owner], Settings, Ranking]], together: GlobalRanking) -> None:
    """Refuse settings that leave a layer without weights, or promise more than there is; shifts may all go."""
    pooled = floors = 0
    sparsity = 0.0
    for group, settings, rank in plan:
        count = group[0].parameter.numel()
        if rank is together:
            pooled, floors = pooled + count, floors + floor_count(count, settings.floor)
            sparsity = settings.sparsity
        elif group[0].kind != "shift" and selection.kept_count(count, settings.sparsity) == 0:
            raise ValueError(
                f"sparsity {settings.sparsity:g} leaves none of the {count} weights of {settings.name!r}; "
                "lower it, rank over the whole network, or give the layer an own one with overrides="
            )
    kept = selection.kept_count(pooled, sparsity)
    if pooled and kept < max(floors, 1):
        asked = f"and floor= asks for {floors}; lower either" if floors else "so nothing to search; lower it"
        raise ValueError(f"sparsity {sparsity:g} leaves {kept} of {pooled} weights, {asked}")
