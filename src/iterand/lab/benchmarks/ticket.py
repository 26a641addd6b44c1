"""Tickets: the time to save and to load one, and its size."""

import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from iterand.lab.benchmarks.table import Notify, Options, Row, Table, attempt
from iterand.lab.benchmarks.timing import Subject, burst, spread, subject
from iterand.lab.training.environment import compute_settings
from iterand.masking import prune_, scores
from iterand.randomization import randomize_
from iterand.ticket import load_ticket, read_ticket, save_ticket
from iterand.ticket.inspect import cost

_CPU = torch.device("cpu")


class _Search(NamedTuple):
    """How a network is searched before its ticket is written."""

    weights: str
    rounds: int
    rate: float
    move: float


# So many redraws that signs are cheaper to store than draws; and as many as in the paper's runs on CIFAR-10.
_SIGNS = _Search("signed_constant", 3, 0.9, 2.0)
_DRAWS = _Search("kaiming_uniform", 117, 0.1, 0.1)


def measure(options: Options, notify: Notify) -> Table:
    """Seconds and bytes of the tickets of networks."""
    notes = ["On one core. The networks are searched by moving their scores at random, not by training."]
    table = Table("ticket", notes)
    usual = [("conv6", _SIGNS)] if options.short else [("conv6", _SIGNS), ("conv6", _DRAWS), ("resnet18", _SIGNS)]
    usual += [] if options.short else [("resnet50", _SIGNS)]
    for name, search in [(name, _SIGNS) for name in options.networks] or usual:
        notify(f"ticket: {name}, {search.weights}")
        row: Row = {"network": name, "weight_distribution": search.weights, "rounds": search.rounds}
        table.rows.append(attempt(row, partial(_row, subject(name), search, options), _CPU))
    return table


def _row(chosen: Subject, search: _Search, options: Options) -> Row:
    network, sparsity = chosen.recipe.network, chosen.recipe.method.sparsity
    model = searched(chosen.network(), sparsity, *search)
    recipe = {"network": {"name": network.name, "width_factor": network.width_factor, "classes": chosen.classes}}
    repeats = options.count(gpu=7, cpu=5, short=3)
    with tempfile.TemporaryDirectory() as folder, compute_settings(threads=1):
        path = Path(folder) / "a.ticket"
        works = {"write": lambda: save_ticket(model, path, recipe=recipe), "load": lambda: load_ticket(path)}
        times = {what: [burst(work, 1, _CPU) for _ in range(1 + repeats)][1:] for what, work in works.items()}
        costs = cost(read_ticket(path))
    weights = sum(layer.weights for layer in costs.layers)
    return {
        "weights": weights,
        "sparsity": sparsity,
        **{f"{what}_seconds": spread(values).scaled(1e-3) for what, values in times.items()},
        "float32_bytes": costs.float32,
        "ticket_bytes": costs.file,
        "over_entropy_percent": 100 * (costs.file / costs.bound - 1),
        "bits_a_weight": 8 * costs.file / weights,
    }


def searched(
    network: nn.Module, sparsity: float, weights: str, rounds: int, rate: float, move: float | None
) -> nn.Module:  # fmt: skip
    """A network after some randomizations, each after its scores moved by ``move`` deviations (None: were redrawn)."""
    generator = torch.Generator().manual_seed(0)
    model = prune_(network, sparsity, weights=weights)
    deviations = [float(score.detach().std()) for score in scores(model)]
    for _ in range(rounds):
        with torch.no_grad():
            for score, deviation in zip(scores(model), deviations):
                noise = torch.randn(score.shape, generator=generator)
                score.copy_(noise if move is None else score + noise * deviation * move)
        randomize_(model, rate)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None and module.running_var is not None:
            module.running_mean.normal_(generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
    return model
