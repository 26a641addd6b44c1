"""A small model with everything a ticket must hold, searched for a while by arithmetic alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import iterand
from iterand.ticket import format, save


class Mixed(nn.Module):
    """Convolution, batch norm, tied embedding, an own parameter, whole numbers, truth values, and state left out."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(3, 4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.embedding = nn.Embedding(6, 4)
        self.decoder = nn.Linear(4, 6)
        self.decoder.weight = self.embedding.weight
        self.free = nn.Linear(4, 4)
        self.register_buffer("steps", torch.tensor([3, 1, 2], dtype=torch.int16))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("cache", torch.ones(2), persistent=False)

    def forward(self, sequences: Tensor, words: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.convolution(sequences))).mean(2) + self.embedding(words)
        return self.decoder(F.relu(self.free(hidden)))


SEQUENCES = (torch.arange(5 * 3 * 7).view(5, 3, 7) * 37 % 41).float() / 20 - 1
WORDS = torch.tensor([0, 3, 5, 1, 2])


def searched(
    model: nn.Module, rounds: int = 6, rate: float = 0.4, redraw_from: str = "fresh", **options: object
) -> nn.Module:
    """Prune a model and randomize it some rounds, with scores that move by plain arithmetic in between."""
    options = {"sparsity": 0.5, **options}
    iterand.prune_(model, **options)
    for number in range(rounds):
        stir_(model, number)
        iterand.randomize_(model, rate, redraw_from=redraw_from)
    return model


@torch.no_grad()
def drawn_in_rounds(draws: int) -> nn.Module:
    """A layer, nothing pruned, whose weights come from this many different draws."""
    model = iterand.prune_(nn.Linear(256, 257), 0.0, weights="kaiming_uniform")
    (layer,) = iterand.masked_layers(model).values()
    state = layer.parametrization
    state.set_history_([(1 << 32, draws - 1)])
    state.draw = (torch.arange(layer.score.numel(), dtype=torch.int32) % draws).view(layer.score.shape)
    layer.weight.copy_(state.weight())
    return model


@torch.no_grad()
def stir_(model: nn.Module, number: int) -> None:
    """Move all scores as far as they are apart."""
    for score in iterand.scores(model):
        place = torch.arange(score.numel()).view(score.shape)
        score += ((place * 7919 + number * 104729) % 1009 / 1009 - 0.5) * score.abs().max()


def mixed(**options: object) -> nn.Module:
    """The mixed model after a search, its free layer and its statistics away from where they started."""
    model = searched(Mixed(), **{"exclude": "free", **options})
    with torch.no_grad():
        model.free.weight.copy_(torch.arange(16.0).view(4, 4) / 8 - 1)
        model.free.bias.copy_(torch.tensor([0.5, -0.5, 0.25, 1.0]))
        model.norm.running_mean.copy_(torch.tensor([0.125, -0.5, 0.0625, 0.75]))
        model.norm.running_var.copy_(torch.tensor([1.5, 0.5, 2.0, 1.0]))
        model.norm.num_batches_tracked.fill_(17)
    return model.eval()


GOLDEN = {
    "places": {"weights": "kaiming_uniform", "seed": 7, "rounds": 20},
    "levels": {"weights": "signed_constant", "seed": 7, "ranking": "global"},
    "normal": {"weights": "kaiming_normal", "seed": 2**63 - 1, "rate": 1.0},
    "sparse": {"weights": "signed_constant", "seed": 3, "sparsity": 0.9, "overrides": {"embedding": "dense"}},
    "lanes": {"weights": "kaiming_uniform", "seed": 1, "sparsity": 0.4, "rounds": 40},
    "coats": {"weights": "signed_constant", "seed": 5, "mask": "multicoat", "coats": 3},
    "gain": {"weights": "kaiming_uniform", "seed": 5, "gain": 1.78, "rounds": 20},
    "recycled": {"weights": "kaiming_uniform", "seed": 5, "mask": "signed", "redraw_from": "kept", "rate": 0.9},
}
RECIPE = {"network": {"name": "mixed"}, "note": "größer als 1"}
METRICS = {"accuracy": 0.5}
FOLDER = Path(__file__).parent / "golden"


def golden_model(name: str) -> tuple[nn.Module, nn.Module, tuple[Tensor, ...]]:
    """The masked model of a golden ticket, a plain one that it can be loaded into, and inputs."""
    if name == "lanes":  # so many weights that the coder uses several lanes
        return searched(nn.Linear(96, 80), **GOLDEN[name]), nn.Linear(96, 80), (torch.eye(96),)
    return mixed(**GOLDEN[name]), Mixed().eval(), (SEQUENCES, WORDS)


def golden(name: str) -> bytes:
    """The bytes of one golden ticket as they are written today, but for the version of the package."""
    with mock.patch.object(save, "__version__", "golden"):
        return save.ticket_bytes(golden_model(name)[0], recipe=RECIPE, metrics=METRICS, half=name == "levels")


if __name__ == "__main__":  # only a new version of the format is a reason to write them anew
    for name in GOLDEN:
        (FOLDER / f"{name}.ticket").write_bytes(golden(name))


def edited(data: bytes, edit: Callable[[dict[str, Any]], None]) -> bytes:
    """The ticket with its header edited and its checksum right."""
    header, body = format.unpack(data)
    edit(header)
    return format.pack(header, body)
