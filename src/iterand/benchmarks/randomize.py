"""Randomize, Eq. (3): a round on all layers; and what weights cost that are made from their draws instead of read."""

from collections.abc import Callable

import torch

from iterand import philox
from iterand.benchmarks.options import Options
from iterand.benchmarks.subjects import subject
from iterand.benchmarks.table import Notify, Row, Table, attempt
from iterand.benchmarks.timing import Work, one_by_one, spread
from iterand.distributions import normal_levels
from iterand.masking import MaskedLayer, masked_layers, prune_
from iterand.parametrization import selection_on_device
from iterand.randomization import randomize_, redraw_on_device_
from iterand.selection import HAS_TRITON

CUT_KNOWN = "randomize, cut known"
"""A round after a step of training, which has found the cut."""

_RATE = 0.1


def measure(options: Options, notify: Notify) -> Table:
    """Milliseconds of a round, and of writing all weights once, by network."""
    known = f"'{CUT_KNOWN}' is what a round adds to training, where a step ends with the cut that the next one needs."
    table = Table(
        "randomize",
        [
            f"'randomize' is a round at r = {_RATE} in a loop of one's own, which begins with finding the cut.",
            *([known] if _has_kernels(options.device) else []),
            "All lies in the order of the weights, as in training; host milliseconds are until the call returns.",
            "'regenerate' writes all weights as their draws say, 'copy' as a stored copy says.",
        ],
    )
    default = ("conv6",) if options.little else ("conv6", "resnet18", "resnet50")
    for name in options.networks or default:
        table.rows += _rows(name, options, notify)
    return table


def _rows(name: str, options: Options, notify: Notify) -> list[Row]:
    device = options.device
    notify(f"randomize: {name}, its network")
    recipe = subject(name).recipe
    model = subject(name).network().to(device)
    if recipe.training.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    prune_(model, recipe.method.sparsity, weights=recipe.method.weight_distribution)
    layers = list(masked_layers(model).values())
    for layer in layers:
        layer.parametrization.lie_as_(layer.weight)
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
    return device.type == "cuda" and HAS_TRITON


def _redraw(layers: list[MaskedLayer]) -> Work:
    found = selection_on_device([layer.parametrization for layer in layers])
    found.find()
    return lambda: redraw_on_device_(layers, found, philox.coin_threshold(_RATE))


def _regenerate(layers: list[MaskedLayer]) -> Work:
    masks, weights = [layer.parametrization for layer in layers], [layer.weight.detach() for layer in layers]
    if _has_kernels(weights[0].device):
        from iterand.kernels.randomization import Regeneration

        draws = [layer.draw for layer in layers]
        origins = [mask.origin for mask in masks]
        regeneration = Regeneration(weights, draws, origins, normal_levels(weights[0].device))
        return regeneration.run

    def write() -> None:
        for mask, weight in zip(masks, weights):
            weight.copy_(mask.weight())

    return write


def _copy(layers: list[MaskedLayer]) -> Work:
    size = sum(layer.weight.numel() for layer in layers)
    stored = torch.zeros(size, device=layers[0].weight.device)
    target = torch.empty_like(stored)
    return lambda: target.copy_(stored)
