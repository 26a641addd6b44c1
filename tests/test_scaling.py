"""The cost model of docs/explanation/scaling.md, against numbers worked out by hand."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from iterand.lab.experiments.library import find_recipe

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def scaling():
    specification = importlib.util.spec_from_file_location("scaling", ROOT / "tools" / "scaling.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules["scaling"] = module
    specification.loader.exec_module(module)
    yield module
    del sys.modules["scaling"]


def test_what_a_rank_sends(scaling):
    # Two ranks: each sends half its gradient and then half the sum, 4 bytes a weight.
    assert scaling.gradient_bytes(1000, 2) == 4000
    # 3 norms of 10 channels: 20 + 3 numbers to the other rank, then 20 sums around the ring.
    assert scaling.norm_bytes(3, 30, 2) == 4 * (2 * 30 + 3) + 4 * 2 * 30
    assert scaling.gradient_bytes(1000, 1) == scaling.norm_bytes(3, 30, 1) == 0


def test_the_runs_of_the_paper(scaling):
    recipe = find_recipe("imagenet-resnet50")
    assert scaling.steps(recipe) == 9_909 * 105
    network = scaling.Network.of(recipe)
    assert (network.weights, network.norms, network.channels) == (25_502_912, 53, 26_560)
    link = scaling.Link(bytes_per_second=1e9, latency=1e-3)
    low, high = scaling.run_seconds(recipe, network, 2, 0.1, link)
    assert low == pytest.approx(9_909 * 105 * 0.1)
    sent = 4 * 25_502_912 + 4 * (2 * 26_560 + 53) + 8 * 26_560
    assert high - low == pytest.approx(9_909 * 105 * (sent / 1e9 + 110 * 1e-3))


def test_the_table_says_what_is_not_measured(scaling):
    inputs = json.loads(scaling.INPUTS.read_text())
    for steps in inputs["step_milliseconds"].values():
        steps.update(dict.fromkeys(steps))
    inputs["step_milliseconds"]["imagenet-resnet50"]["128"] = 100.0
    rows = [line for line in scaling.table(inputs).splitlines() if "resnet50 |" in line]
    assert rows[0].split(" | ")[-2:] == ["100.0 ms", "28.9 h |"]
    assert [row.split(" | ")[-2] for row in rows[1:]] == ["≥ 12.5 ms", "≥ 1.6 ms"]
    others = [line for line in scaling.table(inputs).splitlines() if "resnet34 |" in line]
    assert [row.split(" | ")[-1] for row in others] == ["not measured |"] * 3


def test_what_a_weight_costs(scaling):
    measured = scaling.measure(2048**2)
    assert measured["held_bytes_a_weight"] == pytest.approx(sum(scaling.HELD.values()), rel=1e-3)
    assert measured["checkpoint_bytes_a_weight"] == pytest.approx(sum(scaling.SAVED.values()), rel=1e-2)
