import math

import pytest
import torch

import iterand
from iterand.lab.networks import build_network
from iterand.ticket import inspect
from ticket_models import mixed, searched


def entropy(*counts: int) -> float:
    return -sum(count * math.log2(count / sum(counts)) for count in counts if count)


def test_a_cost_adds_up(tmp_path):
    model = mixed()
    iterand.save_ticket(model, tmp_path / "a.ticket")
    ticket = iterand.read_ticket(tmp_path / "a.ticket")
    costs = inspect.cost(ticket)
    assert costs.file == (tmp_path / "a.ticket").stat().st_size
    assert costs.file == costs.stream + costs.other_tensors + costs.header
    # free.weight, free.bias, running_mean, running_var in float32; three int16; three truth values: no more than that
    assert 0 < costs.other_tensors < 4 * (16 + 4 + 4 + 4) + 2 * 3 + 3
    # and beside them: convolution, embedding, two biases, batch norm's weight, bias and counter; the decoder is tied
    assert costs.float32 == 4 * (28 + 6 + 36 + 24 + 4 + 6 + 4 + 4 + 1)
    layer = costs.layers[0]
    draws = iterand.masked_layers(model)["convolution.weight"].draw[ticket.layers["convolution.weight"].mask]
    assert (layer.name, layer.shape, layer.kept, layer.rounds) == ("convolution.weight", (4, 3, 3), 18, 6)
    assert layer.stored in ("first", "latest")
    assert layer.redrawn == (draws > 0).sum()
    counts = [count for _, count in ticket.layers["convolution.weight"].header.counts]
    assert layer.bits == pytest.approx(entropy(18, 18) + entropy(*counts))


def test_what_is_stored_in_full_is_listed(tmp_path):
    iterand.save_ticket(mixed(), tmp_path / "a.ticket")
    stored, share = inspect.unmasked(iterand.read_ticket(tmp_path / "a.ticket"))
    assert stored == {"free.weight": (4, 4), "free.bias": (4,)}  # no statistics, whole numbers or constants
    assert share == (36 + 24) / (36 + 24 + 16)
    iterand.save_ticket(searched(torch.nn.Linear(6, 6)), tmp_path / "b.ticket")
    assert inspect.unmasked(iterand.read_ticket(tmp_path / "b.ticket")) == ({}, 1.0)


def test_signs_do_not_tell_what_was_redrawn(tmp_path):
    iterand.save_ticket(searched(torch.nn.Linear(60, 60), weights="signed_constant"), tmp_path / "a.ticket")
    (layer,) = inspect.cost(iterand.read_ticket(tmp_path / "a.ticket")).layers
    assert (layer.stored, layer.redrawn) == ("level", None)


def test_a_ticket_of_signs_is_within_one_percent_of_mask_and_sign_bits(tmp_path):
    model = searched(build_network("conv6"), 2, 0.9, weights="signed_constant")
    iterand.save_ticket(model, tmp_path / "a.ticket")
    layers = iterand.masked_layers(model).values()
    kept = sum(int(layer.mask.sum()) for layer in layers)
    bits = sum(entropy(int(layer.mask.sum()), int((~layer.mask).sum())) for layer in layers) + kept
    assert 8 * (tmp_path / "a.ticket").stat().st_size < 1.01 * bits


def test_a_ticket_of_draws_is_within_two_percent_of_their_entropy(tmp_path):
    model = searched(torch.nn.Linear(400, 400, bias=False), 30, 0.1, sparsity=0.6)
    iterand.save_ticket(model, tmp_path / "a.ticket")
    ticket = iterand.read_ticket(tmp_path / "a.ticket")
    costs = inspect.cost(ticket)
    assert ticket.layers["weight"].header.redrawn > 10_000
    assert costs.file < 1.02 * costs.bound
