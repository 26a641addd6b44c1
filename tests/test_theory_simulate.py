"""Simulation against exact values, and the best of all masks against the construction."""

import itertools
import math

import pytest
import torch

from iterand import memory, philox
from iterand.errors import NotEnoughMemoryError
from iterand.lab.theory import best_choice, bounds, exact, tables
from iterand.lab.theory.exact import Tolerance
from iterand.lab.theory.simulate import HalfDraws, estimate, half_draws, search, simulated_width, uniform, width_draws
from width_two import least_failure

KEY = philox.key(3, "test")
SURE = 1 - 1e-5  # of an interval: over all the cells below, about one seed in a thousand would miss one


class TestSearch:
    def test_stops_at_the_first_draw_within_the_tolerance_else_at_the_nearest(self):
        count, rounds = 40, 25
        centers = torch.linspace(-1, 1, count).double()
        found = search(torch.arange(count), centers, torch.full((count,), 0.03), rounds, KEY)
        for i in range(count):
            values = [float(uniform(torch.tensor([i]), torch.tensor([r]), KEY)) for r in range(rounds)]
            distances = [abs(value - float(centers[i])) for value in values]
            near = [r for r in range(rounds) if distances[r] <= 0.03]
            wanted = near[0] if near else distances.index(min(distances))
            assert int(found.draw[i]) == wanted
            assert float(found.value[i]) == values[wanted]
            assert bool(found.hit[i]) == bool(near)
        assert 0 < int(found.hit.sum()) < count

    def test_does_not_depend_on_how_it_is_cut_into_pieces(self, monkeypatch):
        arguments = (torch.arange(300), torch.full((300,), 0.5), torch.full((300,), 0.01), 64, KEY)
        whole = search(*arguments)
        monkeypatch.setattr(philox, "CHUNK", 100)
        pieces = search(*arguments)
        assert all(torch.equal(a, b) for a, b in zip(whole, pieces))


class TestEstimate:
    def test_clopper_pearson(self):
        """Values from the tables of the binomial: 1 − (δ/2)^(1/n) at zero counts."""
        none = estimate(0, 10, 0.95)
        assert (none.value, none.low) == (0, 0)
        assert none.high == pytest.approx(1 - 0.025**0.1)
        half = estimate(5, 10, 0.95)
        assert (half.low, half.high) == pytest.approx((0.18709, 0.81291), abs=1e-5)
        assert (half.count, half.trials) == (5, 10)


class TestHalves:
    @pytest.mark.parametrize("epsilon", [0.1, 0.4])
    @pytest.mark.parametrize("weight", [1.0, 0.5, -0.97])
    def test_exact_probability_inside_the_interval(self, epsilon, weight):
        """Over a grid of δ too: its R are the paper's and the repaired one."""
        tolerance = exact.scalar_tolerance(epsilon)
        grid = sorted({r for delta in (0.3, 0.05) for r in tables.rounds_over(epsilon, delta)})
        halves = HalfDraws([weight], tolerance, grid[-1], trials=4000, seed=1)
        for rounds in grid:
            truth = exact.half_failure([weight], tolerance, rounds)
            failed = halves.failed(rounds)
            one = estimate(int(failed.sum()), failed.numel(), SURE)
            assert one.low <= truth <= one.high
            both = estimate(int(failed.any(dim=1).sum()), len(failed), SURE)
            assert both.low <= 1 - (1 - truth) ** 2 <= both.high

    @pytest.mark.parametrize("copies", [1, 3])
    def test_outputs_that_share_their_u(self, copies):
        """The exact value of Lemma A.5 takes the dependence into account; taking outputs as independent is far off."""
        weights, tolerance = [0.3, -0.9, 1.0, 0.0], Tolerance(0.1, 0.2)
        halves = HalfDraws(weights, tolerance, 20, copies=copies, trials=4000, seed=2)
        failed = halves.failed(20)
        seen = estimate(int(failed.sum()), failed.numel(), SURE)
        assert seen.low <= exact.half_failure(weights, tolerance, 20, copies) <= seen.high
        alone = [exact.half_failure([weight], tolerance, 20, copies) for weight in weights]
        assert seen.high < 1 - math.prod(1 - failure for failure in alone)

    def test_fewer_draws_are_a_beginning_of_more(self):
        short = HalfDraws([0.5], Tolerance(0.2, 0.2), 5, trials=200)
        long = HalfDraws([0.5], Tolerance(0.2, 0.2), 50, trials=200)
        assert torch.equal(short.failed(5), long.failed(5))
        with pytest.raises(ValueError, match="simulated for 1 to 5"):
            short.failed(6)

    def test_the_claim_at_the_named_point_is_outside(self):
        halves = HalfDraws([1.0], exact.scalar_tolerance(0.1), 174, trials=5000)
        assert bounds.claimed_half_failure(0.1, 77) < 0.025 < 0.2 < halves.half_failure(77).low
        assert halves.half_failure(174).high < 0.05  # the repaired R: at most δ/2 in truth
        assert halves.failure(174).low < 0.05


class TestWidth:
    @pytest.mark.parametrize("rounds", [4, 20, 60])
    def test_near_the_exact_quantile(self, rounds):
        failure = exact.half_failure([1.0], exact.scalar_tolerance(0.2), rounds)
        copies = next(n for n in itertools.count(1) if (1 - failure**n) ** 2 >= 1 - 0.1)
        assert simulated_width(0.2, 0.1, rounds, trials=2000) == pytest.approx(2 * copies, rel=0.15, abs=2)

    def test_not_what_the_paper_claims_and_not_more_than_the_repaired(self):
        row = tables.width_row(0.1, 0.05, (1, 1), 77, trials=1000)
        assert (row.paper, row.repaired, row.simulated) == ([2], [6], 6)
        assert tables.width_row(0.1, 0.05, (2, 3, 2), 77, trials=1).simulated is None


def plain_best_error(u, v, weight):
    """Every subset of neurons, every draw of each, by loops."""
    smallest = math.inf
    width, rounds = u.shape
    options = [None, *itertools.product(range(rounds), repeat=2)]
    for choice in itertools.product(options, repeat=width):
        positive = negative = 0.0
        for neuron, pair in enumerate(choice):
            if pair is not None:
                a, b = float(u[neuron, pair[0]]), float(v[neuron, pair[1]])
                positive, negative = (positive + a * b, negative) if a > 0 else (positive, negative + a * b)
        smallest = min(smallest, max(abs(weight - positive), abs(weight - negative)))
    return smallest


class TestBest:
    @pytest.mark.parametrize(("width", "rounds"), [(1, 3), (2, 3), (3, 2), (4, 1)])
    def test_exhaustive_is_what_loops_find(self, width, rounds):
        u, v = best_choice.draws(width, rounds, 5)
        found = best_choice.best_error(u, v, 0.6)
        for trial in range(5):
            assert float(found[trial]) == pytest.approx(plain_best_error(u[trial], v[trial], 0.6), abs=1e-12)

    def test_the_slopes_are_the_network(self):
        """The error by slopes is the error of g on a fine grid."""
        u, v = best_choice.draws(2, 1, 50, seed=4)
        x = torch.linspace(-1, 1, 201).double()
        for mask in itertools.product([0.0, 1.0], repeat=2):
            kept = v[:, :, 0].double() * torch.tensor(mask).double()
            outputs = (kept[:, :, None] * (u.double() * x).relu()).sum(dim=1)
            grid = (0.7 * x - outputs).abs().amax(dim=1)
            assert (best_choice.best_error(u, v, 0.7) <= grid + 1e-12).all()

    @pytest.mark.parametrize("weight", [1.0, 0.4, -0.7, 0.0])
    def test_fast_equals_exhaustive_at_width_two(self, weight):
        u, v = best_choice.draws(2, 4, 200)
        torch.testing.assert_close(best_choice.best_error_width_two(u, v, weight), best_choice.best_error(u, v, weight))

    @pytest.mark.parametrize("weight", [1.0, -0.3])
    @pytest.mark.parametrize(("width", "rounds"), [(2, 1), (2, 5), (4, 3)])
    def test_the_construction_is_never_better(self, width, rounds, weight):
        u, v = best_choice.draws(width, rounds, 100)
        assert (best_choice.construction_error(u, v, weight) >= best_choice.best_error(u, v, weight) - 1e-12).all()

    def test_construction_within_tolerance_means_within_epsilon(self):
        """|w − v·u| ≤ ε, not ε/2, for one half; and no more than that for both, since one is active at a time."""
        epsilon = 0.2
        u, v = best_choice.draws(2, 40, 500)
        near_u = torch.stack([(u[:, 0] - 1).abs().amin(1), (u[:, 1] + 1).abs().amin(1)])
        near_v = torch.stack([(v[:, 0] - 0.9).abs().amin(1), (v[:, 1] + 0.9).abs().amin(1)])
        held = ((near_u <= epsilon / 2) & (near_v <= epsilon / 2)).all(dim=0)
        errors = best_choice.construction_error(u, v, 0.9)[held]
        assert len(errors) > 100
        assert epsilon / 2 < float(errors.max()) <= epsilon

    def test_no_masks_save_the_proposition(self):
        """ε = .1, δ = .001 and the proposition's R = 111: failure above δ whatever draws and masks are taken."""
        rounds = bounds.scalar_rounds(0.1, 0.001)
        (failure,) = best_choice.best_failures(0.1, [rounds], trials=20_000)
        assert failure.low > 0.001
        assert failure.high > least_failure(0.1, rounds)

    def test_too_many_choices_are_refused(self):
        with pytest.raises(ValueError, match="width 4 with 9 draws a weight has 45212176 choices"):
            best_choice.best_error(*best_choice.draws(4, 9, 1), 1.0)


def test_failure_rows_line_up():
    rows = tables.failure_rows(0.4, [1, 8, 40], trials=2000)
    assert [row.rounds for row in rows] == [1, 8, 40]
    for row in rows:
        assert row.simulated_half.trials == 4000
        assert row.exact == pytest.approx(1 - (1 - row.exact_half) ** 2)
        assert row.best.low <= row.simulated.high  # the best choice fails at most as often
    assert rows[0].exact_half == pytest.approx(rows[0].paper_half)
    assert rows[2].exact_half > rows[2].paper_half


def test_best_rows():
    for row in tables.best_rows(1.0, cases=[(2, 1), (2, 3)], trials=50):
        assert 0 < row.best <= row.construction <= 1


class TestCost:
    @pytest.mark.parametrize(("epsilon", "rounds", "trials"), [(0.3, 1, 500), (0.1, 20, 300), (0.5, 60, 2000)])
    def test_of_a_simulated_width(self, epsilon, rounds, trials):
        made = []
        simulated_width(epsilon, 0.05, rounds, trials=trials, progress=made.append)
        expected = width_draws(epsilon, rounds, trials=trials)
        assert sum(made) == pytest.approx(expected, rel=0.3)  # neurons are looked at in blocks

    def test_of_halves_and_of_the_best(self):
        made = []
        HalfDraws([0.5], Tolerance(0.05, 0.05), 300, trials=2000, progress=made.append)
        assert sum(made) == pytest.approx(half_draws([0.5], Tolerance(0.05, 0.05), 300, trials=2000), rel=0.05)
        made.clear()
        best_choice.best_failures(0.1, [1, 8, 20], trials=50, progress=made.append)
        assert sum(made) == best_choice.best_draws([1, 8, 20], trials=50) == 4 * 50 * (20 + 29)

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (
                lambda: simulated_width(1e-5, 0.05, 1),
                r"epsilon 1e-05 and 1 round takes about 3e\+14 draws, and at most",
            ),
            (lambda: HalfDraws([1.0], Tolerance(1e-9, 1e-9), 10**9), r"simulating halves takes about .* draws"),
            (
                lambda: best_choice.best_failures(1e-6, [10**9]),
                r"finding the best of 1,000,000,000 rounds takes about 2e\+13 draws",
            ),
            (
                lambda: tables.failure_rows(1e-6, [10**8]),
                r"simulating epsilon 1e-06 takes about .* raise epsilon, or lower the",
            ),
        ],
    )
    def test_what_would_take_for_ever_is_refused_at_once(self, call, message):
        with pytest.raises(ValueError, match=message):
            call()

    @pytest.mark.parametrize(
        "call",
        [
            lambda: simulated_width(0.9, 0.05, 50, trials=10**9),
            lambda: HalfDraws([1.0], Tolerance(0.9, 0.9), 50, trials=10**9),
            lambda: best_choice.best_failures(0.1, [10**8], trials=1),
        ],
    )
    def test_what_would_take_more_memory_than_there_is_is_refused(self, monkeypatch, call):
        monkeypatch.setattr(memory, "available", lambda device=None: 1_000_000_000)
        with pytest.raises(NotEnoughMemoryError, match="but 1 GB are free"):
            call()
