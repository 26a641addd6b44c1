"""Time of the operations of a search: finding the cuts, and redrawing."""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from iterand import memory, philox
from iterand.backend import find_cuts, triton_problem, uses_triton
from iterand.lab.benchmarks.table import Notify, Options, Row, Table, attempt
from iterand.lab.benchmarks.timing import Spread, Work, one_by_one, spread, subject
from iterand.masking import prune_
from iterand.randomization import find_cuts_on_device, randomize_, redraw_on_device_
from iterand.selection import kept_count
from iterand.surgery import MaskedLayer, masked_layers

CUT_KNOWN = "randomize, cut known"
"""The row of the redraw alone."""

_SPARSITY = 0.6
_RATE = 0.1
_DRIFT = 1e-3  # how far each score moves between two steps, in standard deviations


def measure_select(options: Options, notify: Notify) -> Table:
    """Milliseconds, and nanoseconds per weight, of finding cuts: for the layers of networks and for single tensors."""
    table = Table(
        "select",
        [
            f"Device time of a cut of normal scores at p = {_SPARSITY}; every score moves a little before each cut.",
            "'exact' is what training does; 'exact, far off' finds a cut that is far from the last one.",
            "The others only find a threshold: with equal scores they keep too many or too few.",
        ],
    )
    default = ("conv6", "resnet18", "resnet50")
    networks = options.networks or (() if options.sizes else default[:1] if options.little else default)
    powers = range(6, 10) if options.on_gpu else range(5, 7) if options.short else range(6, 8)
    sizes = options.sizes or (() if options.networks else [10**power for power in powers])
    for name in networks:
        shapes = [parameter.shape for parameter in subject(name).network().parameters() if parameter.ndim > 1]
        for together in (False, True):
            table.rows += _select_rows(name, shapes, together, options, notify)
    for size in sizes:
        table.rows += _select_rows("one tensor", [torch.Size([size])], False, options, notify)
    return table


def _select_rows(
    name: str, shapes: Sequence[torch.Size], together: bool, options: Options, notify: Notify
) -> list[Row]:  # fmt: skip
    device, rows = options.device, []
    weights = sum(shape.numel() for shape in shapes)
    repeats = options.count(gpu=30, cpu=5, short=3 if device.type == "cpu" else 10)
    ranking = "global" if together else "layer"
    for way in _select_ways(device):
        notify(f"select: {name}, {weights:,} scores, {ranking}, {way}")
        head = {"subject": name, "weights": weights, "ranking": ranking, "way": way}

        def work(way: str = way) -> Row:
            times = _times(way, shapes, together, repeats, device)
            return {"milliseconds": times, "nanoseconds_a_weight": times.scaled(1e6 / weights)}

        rows.append(attempt(head, work, device))
    return rows


def _select_ways(device: torch.device) -> list[str]:
    return ["exact", "exact, far off", "sort", "topk"] if device.type == "cuda" else ["exact", "sort", "kthvalue"]


def _times(
    way: str, shapes: Sequence[torch.Size], together: bool, repeats: int, device: torch.device
) -> Spread:  # fmt: skip
    scores_and_moves = 2 * 4 * sum(shape.numel() for shape in shapes)
    memory.require(scores_and_moves, "measuring so many scores", "choose fewer with --size", device)
    generator = torch.Generator(device).manual_seed(0)
    scores, moves = (
        [torch.randn(shape, device=device, generator=generator) for shape in shapes] for _ in range(2)
    )  # fmt: skip
    counts = [kept_count(score.numel(), _SPARSITY) for score in scores]
    directions = itertools.cycle((1, -1))

    def drift() -> None:
        for score, move in zip(scores, moves):
            score.add_(move.normal_(generator=generator), alpha=_DRIFT)

    def jump() -> None:
        direction = next(directions)
        for score in scores:
            score.add_(direction)

    before = jump if way == "exact, far off" else drift
    work = _exact(scores, counts, together) if way.startswith("exact") else _threshold(way, scores, counts, together)
    on_device, _ = one_by_one(work, repeats, device, before)
    return spread(on_device)


def _exact(scores: list[Tensor], counts: list[int], together: bool) -> Work:
    kept = [torch.tensor(count, device=scores[0].device) for count in counts]
    if uses_triton(scores):
        from iterand.backend.triton.cuts import FindCuts

        cuts = FindCuts(scores, kept, together=together)

        def find() -> list[Tensor]:
            cuts.run()
            return kept  # keeps them alive: kernels read the counts by address

        return find
    names = [f"layer {number}" for number in range(len(scores))]
    floors = [0] * len(scores)
    return lambda: find_cuts(scores, kept, names, together=together, floors=floors)


def _threshold(way: str, scores: list[Tensor], counts: list[int], together: bool) -> Work:
    find: dict[str, Callable[[Tensor, int], object]] = {
        "sort": lambda score, count: torch.sort(score, descending=True, stable=True),
        "topk": lambda score, count: torch.topk(score, count, sorted=False),
        "kthvalue": lambda score, count: torch.kthvalue(score, score.numel() - count + 1),
    }

    def work() -> None:
        flat = [score.reshape(-1) for score in scores]
        for score, count in [(torch.cat(flat), sum(counts))] if together else zip(flat, counts):
            find[way](score, count)

    return work


def measure_randomize(options: Options, notify: Notify) -> Table:
    """Milliseconds of a randomization, and of writing all weights once, for each network."""
    known = f"'{CUT_KNOWN}' is the redraw alone."
    table = Table(
        "randomize",
        [
            f"'randomize' is randomize_ at r = {_RATE}, which finds the cut first.",
            *([known] if _has_kernels(options.device) else []),
            "All tensors have the layout of the weights, as in training; host milliseconds are until the call returns.",
            "'regenerate' writes all weights from their draws, 'copy' from a stored copy.",
        ],
    )
    default = ("conv6",) if options.little else ("conv6", "resnet18", "resnet50")
    for name in options.networks or default:
        table.rows += _randomize_rows(name, options, notify)
    return table


def _randomize_rows(name: str, options: Options, notify: Notify) -> list[Row]:
    device = options.device
    notify(f"randomize: {name}, its network")
    chosen = subject(name)
    recipe, model = chosen.recipe, chosen.network().to(device)
    if recipe.training.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    prune_(model, recipe.method.sparsity, weights=recipe.method.weight_distribution)
    layers = list(masked_layers(model).values())
    for layer in layers:
        layer.parametrization.match_layout_(layer.weight)
    weights = sum(layer.weight.numel() for layer in layers)
    works: dict[str, Callable[[], Work]] = {
        "randomize": lambda: lambda: randomize_(model, _RATE),
        **({CUT_KNOWN: lambda: _redraw(layers)} if _has_kernels(device) else {}),
        "regenerate": lambda: _regenerate(layers),
        "copy": lambda: _copy(layers),
    }
    rows = []
    for what, make in works.items():
        notify(f"randomize: {name}, {what}")

        def work(make: Callable[[], Work] = make) -> Row:
            repeats = options.count(gpu=30, cpu=5, short=3)
            on_device, on_host = one_by_one(make(), repeats, device)
            found = spread(on_device)
            return {
                "milliseconds": found,
                "host_milliseconds": spread(on_host),
                "nanoseconds_a_weight": found.scaled(1e6 / weights),
            }

        rows.append(attempt({"network": name, "weights": weights, "what": what}, work, device))
    return rows


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and triton_problem(device) is None


def _redraw(layers: list[MaskedLayer]) -> Work:
    cuts = find_cuts_on_device(layers)
    return lambda: redraw_on_device_(layers, cuts, philox.coin_threshold(_RATE))


def _regenerate(layers: list[MaskedLayer]) -> Work:
    def write() -> None:
        for layer in layers:
            layer.weight.copy_(layer.parametrization.weight())

    return write


def _copy(layers: list[MaskedLayer]) -> Work:
    size = sum(layer.weight.numel() for layer in layers)
    stored = torch.zeros(size, device=layers[0].weight.device)
    target = torch.empty_like(stored)
    return lambda: target.copy_(stored)
