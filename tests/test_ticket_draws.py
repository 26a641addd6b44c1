import numpy as np
import pytest
import torch

import reference
from iterand import philox, summarizing
from iterand.ticket import draws
from iterand.ticket.draws import History

SEED, NAME = 5, "layer.weight"
TENTH, THIRD, TWENTIETH = map(philox.coin_threshold, (0.1, 0.3, 0.05))
RUNS = {
    "one rate": History(((TENTH, 40),)),
    "several": History(((THIRD, 5), (0, 3), (draws.ALWAYS, 2), (0, 1), (TWENTIETH, 30), (0, 4))),
    "always": History(((draws.ALWAYS, 6),)),
}


def falls(index: int, history: History) -> list[int]:
    """The rounds in which a weight's coin falls, one by one."""
    thresholds = [threshold for threshold, count in history.runs for _ in range(count)]
    return [
        number
        for number, threshold in enumerate(thresholds, start=1)
        if reference.words(index, number, SEED, NAME)[1] < threshold
    ]


@pytest.mark.parametrize("latest", [False, True])
@pytest.mark.parametrize("history", RUNS.values(), ids=RUNS)
def test_places_and_draws_are_those_of_a_plain_loop(history, latest):
    indices = [*range(0, 60, 7), (1 << 33) + 5]
    order = {index: falls(index, history)[:: -1 if latest else 1] for index in indices}
    rows = [(index, ordinal, draw) for index in indices for ordinal, draw in enumerate(order[index], start=1)]
    index, ordinal, draw = (torch.tensor(column) for column in zip(*rows))
    key = philox.key(SEED, NAME)
    assert draws.ordinals(index, draw, key, history, latest=latest).tolist() == ordinal.tolist()
    assert draws.draws(index, ordinal, key, history, latest=latest).tolist() == draw.tolist()


@pytest.mark.parametrize("latest", [False, True])
def test_a_coin_that_did_not_fall_has_no_place_and_a_place_too_far_no_draw(latest):
    history = RUNS["one rate"]
    fell = falls(3, history)
    end = fell[-1] if latest else fell[0]
    up = next(number for number in range(1, 41) if number not in fell)
    key = philox.key(SEED, NAME)
    assert draws.ordinals(torch.tensor([3, 3]), torch.tensor([up, end]), key, history, latest=latest).tolist() == [0, 1]
    beyond = torch.tensor([len(fell) + 1, 1])
    assert draws.draws(torch.tensor([3, 3]), beyond, key, history, latest=latest).tolist() == [0, end]


def test_chunks_do_not_matter(monkeypatch):
    history = RUNS["several"]
    key = philox.key(SEED, NAME)
    index = torch.arange(300)
    ordinal = torch.ones_like(index) * 2
    whole = draws.draws(index, ordinal, key, history, latest=False)
    monkeypatch.setattr(philox, "CHUNK", 7)
    assert draws.draws(index, ordinal, key, history, latest=False).equal(whole)
    assert draws.ordinals(index, whole, key, history, latest=False).equal(ordinal)


def test_no_weight_asks_for_no_round(monkeypatch):
    """The work is bounded by the coins, not by the rounds a file claims."""
    monkeypatch.setattr(philox, "philox", lambda *_: pytest.fail("a coin was tossed"))
    none = torch.empty(0, dtype=torch.int64)
    key, history = philox.key(SEED, NAME), History(((TENTH, draws.MAX_ROUNDS),))
    assert draws.draws(none, none, key, history, latest=True).tolist() == []


LONG_RUNS = {
    "one rate": History(((TENTH, 60),)),
    "several": History(((THIRD, 20), (0, 10), (draws.ALWAYS, 5), (TWENTIETH, 30))),
}


def real_bits(draw: torch.Tensor, history: History, latest: bool) -> float:
    """The entropy of the places themselves, every coin tossed."""
    redrawn = draw.nonzero().squeeze(1)
    ordinal = torch.zeros_like(draw)
    ordinal[redrawn] = draws.ordinals(redrawn, draw[redrawn], philox.key(0, "layer"), history, latest=latest)
    assert (ordinal[redrawn] > 0).all()
    return summarizing.entropy(ordinal.bincount().tolist())


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("history", LONG_RUNS.values(), ids=LONG_RUNS)
@pytest.mark.parametrize("most_rounds", [2048, 0])
def test_the_estimate_is_near_and_chooses_the_cheaper_way(monkeypatch, history, settled, most_rounds):
    monkeypatch.setattr(draws, "_MAX_EXACT_ROUNDS", most_rounds)
    rounds = history.rounds
    chance = torch.rand(rounds + 1, 8000, generator=torch.Generator().manual_seed(1))
    fell = torch.from_numpy(history.thresholds())[:, None] > torch.stack(
        [philox.philox(torch.arange(8000), number, philox.key(0, "layer"))[1] for number in range(1, rounds + 1)]
    )
    pruned = chance[1:] < (0.8 if not settled else 0.8 * 0.8 ** torch.arange(rounds)[:, None])
    draw = (torch.arange(1, rounds + 1)[:, None] * (fell & pruned)).amax(0)
    bits = draws.ordinal_bits(np.bincount(draw.numpy()), history)
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
    assert draws.ordinal_bits(np.array([50]), History(())) == {"first": 0.0, "latest": 0.0}
