import math

import pytest

from iterand.lab.training.loop import learning_rate
from iterand.lab.training.recipe import LearningRateRecipe


def rates(epochs, **settings):
    return [learning_rate(LearningRateRecipe(**settings), epoch, epochs) for epoch in range(epochs)]


def test_constant():
    assert rates(3, initial=0.3, schedule="constant") == [0.3, 0.3, 0.3]


def test_cosine_goes_from_epoch_0_to_the_end():
    # half of (1 + cos) at 0, 45, 90 and 135 degrees
    expected = [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]
    assert rates(4, initial=1.0, schedule="cosine") == pytest.approx(expected)


def test_multi_step_of_openlth():
    found = rates(160, initial=0.1, schedule="multi_step", milestones=(80, 120), factor=0.1)
    assert found == pytest.approx([0.1] * 80 + [0.01] * 40 + [0.001] * 40)


def test_imagenet_schedule_of_appendix_b():
    found = rates(105, initial=0.1, schedule="warmup_cosine", warmup_epochs=5, final_epochs=5, final=1e-5)
    assert found[:5] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1])
    assert found[5] == pytest.approx(0.1)
    assert found[52] == pytest.approx(0.05 * (1 + math.cos(math.pi * 47 / 95)))
    assert found[99] == pytest.approx(0.05 * (1 + math.cos(math.pi * 94 / 95)))
    assert found[100:] == [1e-5] * 5
