"""CalculateMask for all layers: the exact cut beside sorting and other ways to find a threshold."""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from iterand.benchmarks.options import Options
from iterand.benchmarks.subjects import subject
from iterand.benchmarks.table import Notify, Row, Table, attempt
from iterand.benchmarks.timing import Spread, Work, one_by_one, spread
from iterand.selection import HAS_TRITON, cut_layers, kept_count

_SPARSITY = 0.6
_DRIFT = 1e-3  # of a deviation: how far each score moves by itself between two steps


def measure(options: Options, notify: Notify) -> Table:
    """Milliseconds and nanoseconds a weight of a cut, for the layers of networks and for single tensors."""
    table = Table(
        "select",
        [
            f"Time of the device for a cut of normal scores at p = {_SPARSITY}; each moves a little before every cut.",
            "'exact' is what training does; 'exact, far off' has to find a cut that jumped away since the last step.",
            "The others only find a threshold: with equal scores they keep a wrong number.",
        ],
    )
    default = ("conv6", "resnet18", "resnet50")
    networks = options.networks or (() if options.sizes else default[:1] if options.little else default)
    powers = range(6, 10) if options.on_gpu else range(5, 7) if options.short else range(6, 8)
    sizes = options.sizes or (() if options.networks else [10**power for power in powers])
    for name in networks:
        shapes = [parameter.shape for parameter in subject(name).network().parameters() if parameter.ndim > 1]
        for together in (False, True):
            table.rows += _rows(name, shapes, together, options, notify)
    for size in sizes:
        table.rows += _rows("one tensor", [torch.Size([size])], False, options, notify)
    return table


def _rows(
    name: str, shapes: Sequence[torch.Size], together: bool, options: Options, notify: Notify
) -> list[Row]:  # fmt: skip
    device, rows = options.device, []
    weights = sum(shape.numel() for shape in shapes)
    repeats = options.count(gpu=30, cpu=5, short=3 if device.type == "cpu" else 10)
    ranking = "global" if together else "layer"
    for way in _ways(device):
        notify(f"select: {name}, {weights:,} scores, {ranking}, {way}")
        head = {"subject": name, "weights": weights, "ranking": ranking, "way": way}

        def work(way: str = way) -> Row:
            times = _times(way, shapes, together, repeats, device)
            return {"milliseconds": times, "nanoseconds_a_weight": times.scaled(1e6 / weights)}

        rows.append(attempt(head, work, device))
    return rows


def _ways(device: torch.device) -> list[str]:
    return ["exact", "exact, far off", "sort", "topk"] if device.type == "cuda" else ["exact", "sort", "kthvalue"]


def _times(
    way: str, shapes: Sequence[torch.Size], together: bool, repeats: int, device: torch.device
) -> Spread:  # fmt: skip
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
    if scores[0].is_cuda and HAS_TRITON:
        from iterand.kernels.selection import Selection

        found = Selection(scores, kept, together=together)

        def find() -> list[Tensor]:
            found.find()
            return kept  # kernels read the counts by their addresses, so they must stay

        return find
    names = [f"layer {number}" for number in range(len(scores))]
    floors = [0] * len(scores)
    return lambda: cut_layers(scores, kept, names, together=together, floors=floors)


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
