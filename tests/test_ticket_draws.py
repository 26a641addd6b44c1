import pytest
import torch

import reference
from iterand import philox
from iterand.ticket import draws

SEED, NAME = 5, "layer.weight"
RUNS = {
    "one rate": [(philox.coin_threshold(0.1), 40)],
    "several": [(philox.coin_threshold(0.3), 5), (0, 3), (draws.ALWAYS, 2), (philox.coin_threshold(0.05), 30)],
    "always": [(draws.ALWAYS, 6)],
}


def falls(index: int, history: list[tuple[int, int]]) -> list[int]:
    """The rounds in which a weight's coin falls, one by one."""
    thresholds = [threshold for threshold, count in history for _ in range(count)]
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
    rows = [(index, place, draw) for index in indices for place, draw in enumerate(order[index], start=1)]
    index, place, draw = (torch.tensor(column) for column in zip(*rows))
    key = philox.key(SEED, NAME)
    assert draws.places(index, draw, key, history, latest=latest).tolist() == place.tolist()
    assert draws.draws(index, place, key, history, latest=latest).tolist() == draw.tolist()


@pytest.mark.parametrize("latest", [False, True])
def test_a_coin_that_did_not_fall_has_no_place_and_a_place_too_far_no_draw(latest):
    history = RUNS["one rate"]
    fell = falls(3, history)
    end = fell[-1] if latest else fell[0]
    up = next(number for number in range(1, 41) if number not in fell)
    key = philox.key(SEED, NAME)
    assert draws.places(torch.tensor([3, 3]), torch.tensor([up, end]), key, history, latest=latest).tolist() == [0, 1]
    beyond = torch.tensor([len(fell) + 1, 1])
    assert draws.draws(torch.tensor([3, 3]), beyond, key, history, latest=latest).tolist() == [0, end]


def test_chunks_do_not_matter(monkeypatch):
    history = RUNS["several"]
    key = philox.key(SEED, NAME)
    index = torch.arange(300)
    place = torch.ones_like(index) * 2
    whole = draws.draws(index, place, key, history, latest=False)
    monkeypatch.setattr(philox, "CHUNK", 7)
    assert draws.draws(index, place, key, history, latest=False).equal(whole)
    assert draws.places(index, whole, key, history, latest=False).equal(place)
