"""The summary against counts and entropies worked out by hand."""

import json
import math

import pytest
import torch
from torch import nn

import iterand


def pruned(**options: object) -> nn.Sequential:
    return iterand.prune_(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 5)), 0.75, seed=1, **options)


def test_counts():
    summary = iterand.summary(pruned())
    assert [(layer.name, layer.shape, layer.kept, layer.total) for layer in summary.layers] == [
        ("0.weight", (10, 10), 25, 100),
        ("1.weight", (5, 10), 12, 50),
    ]
    assert (summary.kept, summary.total, summary.rounds) == (37, 150, 0)


def test_redrawn_weights_are_kept_ones_with_a_later_draw():
    model = pruned()
    assert [layer.redrawn for layer in iterand.summary(model).layers] == [0, 0]
    iterand.randomize_(model, 1.0)
    assert [layer.redrawn for layer in iterand.summary(model).layers] == [0, 0]  # what was redrawn is pruned
    with torch.no_grad():
        for score in iterand.scores(model):
            score.neg_()
    summary = iterand.summary(model)
    assert [layer.redrawn for layer in summary.layers] == [25, 12]
    assert summary.rounds == 1


def test_the_mask_costs_its_entropy():
    binary_entropy = -(0.25 * math.log2(0.25) + 0.75 * math.log2(0.75))
    layer = iterand.summary(pruned(weights="kaiming_uniform")).layers[0]
    assert layer.bits == pytest.approx(100 * binary_entropy, rel=1e-6)


def test_it_reads_as_a_table_and_as_json():
    summary = iterand.summary(pruned())
    lines = str(summary).splitlines()
    assert lines[0].split("  ")[-1] == "bits per weight"
    assert "0.weight" in lines[1]
    assert "25 / 100" in lines[1]
    assert "25.0 %" in lines[1]
    assert "37 / 150" in lines[-2]
    assert lines[-1] == "0 rounds of randomization; masked weights: about 0.0 kB in a ticket, 0.6 kB as float32"
    assert json.loads(json.dumps(summary.to_dict()))["kept"] == 37


def test_what_is_not_masked_is_counted():
    model = nn.ModuleDict({"linear": nn.Linear(10, 10), "norm": nn.LayerNorm(10), "table": nn.ParameterList()})
    model["table"].append(nn.Parameter(torch.ones(5, 10)))
    model["head"] = nn.Linear(10, 5)
    with pytest.warns(iterand.UnmaskedWarning):
        iterand.prune_(model, 0.5, exclude="head")
    summary = iterand.summary(model)
    assert [(one.name, one.shape, one.frozen) for one in summary.unmasked] == [
        ("linear.bias", (10,), True),
        ("norm.weight", (10,), True),
        ("norm.bias", (10,), True),
        ("table.0", (5, 10), False),
        ("head.weight", (5, 10), False),
        ("head.bias", (5,), False),
    ]
    assert (summary.left_alone, summary.masked_share) == (105, 0.5)
    assert str(summary).splitlines()[-1] == (
        "neither masked nor frozen: 105 parameters in table.0 (5×10), head.weight (5×10), head.bias (5); "
        "50.0 % of the parameters in matrices are masked"
    )
    assert json.loads(json.dumps(summary.to_dict()))["left_alone"] == 105


def test_what_is_trained_again_is_not_frozen():
    model = iterand.prune_(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.BatchNorm1d(8)), 0.5)
    assert [one.name for one in iterand.summary(model).unmasked if one.frozen] == ["0.bias", "1.weight", "1.bias"]
    for parameter in model.parameters():
        parameter.requires_grad_()
    assert not any(one.frozen for one in iterand.summary(model).unmasked)
    assert str(iterand.summary(model)).splitlines()[-1].startswith("neither masked nor frozen: 24 parameters in 0.bias")


def test_layer_scales_are_named():
    model = nn.Sequential(nn.Linear(10, 10), nn.ParameterDict({"gamma": nn.Parameter(torch.full((10,), 1e-6))}))
    lines = str(iterand.summary(iterand.prune_(model, 0.5))).splitlines()
    assert lines[-1] == "layer scales, frozen at one: 10 parameters in 1.gamma (10)"


def test_global_ranking_is_summarized_as_it_is():
    model = pruned(ranking="global")
    summary = iterand.summary(model)
    assert [layer.kept for layer in summary.layers] == [
        int(layer.mask.sum()) for layer in iterand.masked_layers(model).values()
    ]
    assert summary.kept == 150 - round(0.75 * 150)


def test_a_model_that_is_not_pruned_has_no_summary():
    with pytest.raises(ValueError, match="no masked layer"):
        iterand.summary(nn.Linear(3, 3))


def test_a_model_without_weights_has_no_summary():
    with pytest.raises(ValueError, match="on the meta device, so there is nothing to count"):
        iterand.summary(iterand.prune_(nn.Linear(3, 3, device="meta"), 0.5))
