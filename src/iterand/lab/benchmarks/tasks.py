"""Switching between the tasks of a ``TaskSet``, beside a copy of the weights that they mask."""

import copy
import itertools
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from iterand.lab.benchmarks.loop import BERTS, find_model
from iterand.lab.benchmarks.table import Notify, Options, Row, Table, attempt
from iterand.lab.benchmarks.timing import burst, spread, take_turns
from iterand.lab.training.environment import compute_settings
from iterand.masking import prune_, scores
from iterand.ticket import TaskSet
from iterand.ticket.read import parse
from iterand.ticket.save import ticket_bytes

_CPU = torch.device("cpu")
_TASKS = 10
_SPARSITIES = (0.05, 0.2)
_BURST_SECONDS = 0.1


def measure(options: Options, notify: Notify) -> Table:
    """Milliseconds to switch to a task: the first time, again, and while its masked weights are cached."""
    notes = [
        f"On one core of a CPU, {_TASKS} tasks in turn; weights and masks are random, in transformers in the encoder.",
        "First: decodes the ticket. Again: one task is cached. Cached: all tasks are. Copy: the masked weights alone.",
    ]
    table = Table("tasks", notes)
    for name in options.networks or ("digits" if options.short else "minilm",):
        for sparsity in _SPARSITIES:
            notify(f"tasks: {name}, p = {sparsity}")
            row: Row = {"network": name, "sparsity": sparsity, "tasks": _TASKS}
            table.rows.append(attempt(row, partial(_row, name, sparsity, options), _CPU))
    return table


def _row(name: str, sparsity: float, options: Options) -> Row:
    torch.manual_seed(0)
    base = find_model(name, options).build().eval()
    include = "*.encoder.*" if name in BERTS else None
    tickets = [_ticket(base, sparsity, include, seed) for seed in range(_TASKS)]
    weights = [base.get_parameter(layer) for layer in parse(tickets[0]).layers]
    copies = [torch.empty_like(weight) for weight in weights]
    # Two models, since only one TaskSet at a time is active on a model.
    again, cached = TaskSet(base, cached=1), TaskSet(copy.deepcopy(base), cached=_TASKS)
    for tasks, (number, ticket) in itertools.product((again, cached), enumerate(tickets)):
        tasks.add(str(number), parse(ticket))
    with compute_settings(threads=1):
        first = [burst(partial(cached.activate, task), 1, _CPU) for task in cached]
        for task in again:
            again.activate(task)
        works = {
            "again": partial(_switch, again, itertools.cycle(again)),
            "cached": partial(_switch, cached, itertools.cycle(cached)),
            "copy": partial(_copy, weights, copies),
        }
        times = take_turns(works, options.count(gpu=15, cpu=15, short=3), _BURST_SECONDS, _CPU)
    return {
        "masked_weights": sum(weight.numel() for weight in weights),
        "ticket_bytes": len(tickets[0]),
        "first_milliseconds": spread(first),
        **{f"{what}_milliseconds": spread(values) for what, values in times.items()},
        "ratio_to_copy": spread([mine / other for mine, other in zip(times["again"], times["copy"])]),
    }


def _ticket(base: nn.Module, sparsity: float, include: str | None, seed: int) -> bytes:
    """A ticket with a mask at random; the scores are not trained."""
    model = prune_(copy.deepcopy(base), sparsity, weights="existing", include=include)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for score in scores(model):
            score.uniform_(generator=generator)
    return ticket_bytes(model)


def _switch(tasks: TaskSet, order: "itertools.cycle[str]") -> None:
    tasks.activate(next(order))


@torch.no_grad()
def _copy(weights: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    for weight, other in zip(weights, copies):
        other.copy_(weight)
