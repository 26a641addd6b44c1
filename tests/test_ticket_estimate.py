import numpy as np
import pytest
import torch

from iterand import philox
from iterand.ticket import coding, draws, estimate

KEY = philox.key(0, "layer")
RUNS = {
    "one rate": ((philox.coin_threshold(0.1), 60),),
    "several": ((philox.coin_threshold(0.3), 20), (0, 10), (draws.ALWAYS, 5), (philox.coin_threshold(0.05), 30)),
}


def real_bits(draw: torch.Tensor, history: tuple[tuple[int, int], ...], latest: bool) -> float:
    """The entropy of the places themselves, every coin tossed."""
    redrawn = draw.nonzero().squeeze(1)
    place = torch.zeros_like(draw)
    place[redrawn] = draws.places(redrawn, draw[redrawn], KEY, history, latest=latest)
    assert (place[redrawn] > 0).all()
    return coding.entropy(place.bincount().tolist())


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("history", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("most_rounds", [2048, 0])
def test_the_estimate_is_near_and_chooses_the_cheaper_way(monkeypatch, history, settled, most_rounds):
    monkeypatch.setattr(estimate, "_MOST_ROUNDS", most_rounds)
    rounds = draws.round_count(history)
    chance = torch.rand(rounds + 1, 8000, generator=torch.Generator().manual_seed(1))
    fell = draws.thresholds(history)[:, None] > torch.stack(
        [philox.philox(torch.arange(8000), number, KEY)[1] for number in range(1, rounds + 1)]
    )
    pruned = chance[1:] < (0.8 if not settled else 0.8 * 0.8 ** torch.arange(rounds)[:, None])
    draw = (torch.arange(1, rounds + 1)[:, None] * (fell & pruned)).amax(0)
    bits = estimate.place_bits(np.bincount(draw.numpy()), history)
    real = {"first": real_bits(draw, history, False), "latest": real_bits(draw, history, True)}
    assert real["first"] < real["latest"] if settled else real["latest"] < real["first"]
    if (
        most_rounds
    ):  # settled masks are told exactly; restless ones have fewer falls after their draw than the rates say
        assert bits["first"] == pytest.approx(real["first"], rel=0.03)
        assert real["latest"] < (1.03 if settled else 1.0) * bits["latest"]
        assert min(bits, key=bits.get) == min(real, key=real.get)
    else:
        assert all(0.4 * real[way] < bits[way] < 2.5 * real[way] for way in bits)


def test_no_rounds_cost_nothing():
    assert estimate.place_bits(np.array([50]), ()) == {"first": 0.0, "latest": 0.0}
