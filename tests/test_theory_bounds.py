"""The formulas of Section 4 and Appendix A: claimed, exact, repaired, and lower bounds."""

import itertools
import math

import pytest
import torch

from iterand.lab.theory import bounds, exact
from iterand.lab.theory.exact import Tolerance
from width_two import least_failure, side_failure


class TestClaims:
    """Values worked out by hand from the statements in the paper."""

    def test_lemma_a3_and_a4(self):
        assert bounds.scalar_width(0.1, 0.05) == 2 * 5903  # 1600 · log 40 = 5902.2
        assert bounds.scalar_width(0.1, 0.05, rounds=10) == 2 * 60  # 59.02
        assert bounds.scalar_rounds(0.1, 0.05) == 77  # 40 · sqrt(log 40) = 76.8

    def test_lemma_a5(self):
        assert bounds.vector_width(0.5, 0.1, outputs=4, rounds=2) == 2 * 281  # 256 · log 80 / 4 = 280.4
        assert bounds.vector_rounds(0.5, 0.1, outputs=4) == 34  # sqrt(256 · log 80) = 33.49

    def test_lemma_a6(self):
        assert bounds.matrix_width(0.5, 0.1, 3, 2, rounds=10) == 2 * 3 * 56  # 1152 · log 120 / 100 = 55.15
        assert bounds.matrix_rounds(0.5, 0.1, 3, 2) == 75  # sqrt(1152 · log 120) = 74.26

    def test_theorem_4_1(self):
        # 64·4·9·2/.04 · log 240 / 10⁴ = 63.14 and 64·4·4·1/.04 · log 80 / 10⁴ = 11.22
        assert bounds.network_widths(0.2, 0.1, [3, 2, 1], rounds=100) == [2 * 3 * 64, 2 * 2 * 12]
        # 8·2·3/.2 · sqrt(2 · log 240) = 794.6, and 334.9 for the second layer
        assert bounds.network_rounds(0.2, 0.1, [3, 2, 1]) == 795
        assert bounds.network_widths(0.2, 0.1, [3, 2, 1], rounds=795) == [6, 4]
        assert bounds.network_widths(0.2, 0.1, [3, 2, 1], rounds=794) == [12, 4]

    def test_claimed_failure(self):
        assert bounds.claimed_half_failure(0.1, 77) == pytest.approx(math.exp(5929 * math.log(1 - 0.000625)))
        assert bounds.claimed_half_failure(0.5, 2, copies=3) == pytest.approx((63 / 64) ** 12)

    def test_prior_work(self):
        assert bounds.malach_width_scale(0.5, 0.1, 2, 3) == pytest.approx(32 * 9 / 0.25 * math.log(60))
        assert bounds.pensia_width_scale(0.5, 0.1, 2, 3) == pytest.approx(2 * math.log(120))


def enumerate_half_failure(weights, tolerance, rounds, copies):
    """The failure of one half by going through every outcome of every draw: hit or miss."""
    one = [exact.hit_probability(1.0, tolerance.u)] + [exact.hit_probability(w, tolerance.v) for w in weights]
    chances = one * copies  # one entry a weight, u first in every neuron
    failure = 0.0
    for outcome in itertools.product([False, True], repeat=len(chances) * rounds):
        probability = 1.0
        for number, hit in enumerate(outcome):
            chance = chances[number // rounds]
            probability *= chance if hit else 1 - chance
        hits = [any(outcome[n * rounds : (n + 1) * rounds]) for n in range(len(chances))]
        neurons = [hits[n * len(one) : (n + 1) * len(one)] for n in range(copies)]
        served = all(any(neuron[0] and neuron[1 + k] for neuron in neurons) for k in range(len(weights)))
        failure += 0.0 if served else probability
    return failure


class TestExact:
    @pytest.mark.parametrize(
        ("center", "tolerance", "probability"),
        [(1.0, 0.05, 0.025), (-1.0, 0.05, 0.025), (0.0, 0.05, 0.05), (0.95, 0.05, 0.05), (0.97, 0.05, 0.04)],
    )
    def test_hit_probability(self, center, tolerance, probability):
        assert exact.hit_probability(center, tolerance) == pytest.approx(probability)

    @pytest.mark.parametrize(
        ("weights", "rounds", "copies"),
        [([1.0], 1, 1), ([1.0], 3, 1), ([0.2], 2, 2), ([0.2, -1.0], 2, 2), ([0.9, 0.1, -0.4], 1, 3)],
    )
    def test_half_failure_is_the_sum_over_all_outcomes(self, weights, rounds, copies):
        tolerance = Tolerance(0.6, 0.3)
        wanted = enumerate_half_failure(weights, tolerance, rounds, copies)
        assert exact.half_failure(weights, tolerance, rounds, copies) == pytest.approx(wanted, rel=1e-12)

    def test_network_failure_is_that_no_half_fails(self):
        target = [torch.tensor([[0.5, 0.25], [0.0, -0.5]]), torch.tensor([[0.5, -0.25]])]
        tolerances = [Tolerance(0.2, 0.1), Tolerance(0.3, 0.2)]
        success = 1.0
        for weights, tolerance, copies in (
            ([0.5, 0.0], tolerances[0], 2),
            ([0.25, -0.5], tolerances[0], 2),
            ([0.5], tolerances[1], 3),
            ([-0.25], tolerances[1], 3),
        ):
            success *= (1 - exact.half_failure(weights, tolerance, 15, copies)) ** 2
        assert exact.network_failure(target, tolerances, 15, [2, 3]) == pytest.approx(1 - success, rel=1e-12)

    def test_tiny_failures_do_not_drown(self):
        half = exact.half_failure([0.0], Tolerance(0.5, 0.5), 200)
        assert half == pytest.approx(0.75**200 + 0.5**200, rel=1e-9)
        failure = exact.network_failure([torch.zeros(1, 1)], [Tolerance(0.5, 0.5)], 200, [1])
        assert failure == pytest.approx(2 * half, rel=1e-9)


class TestTheStepThatFails:
    def test_the_named_point(self):
        """ε = .1, δ = .05 and the proposition's own R = 77: claimed at most .025, in truth .264."""
        rounds = bounds.scalar_rounds(0.1, 0.05)
        assert rounds == 77
        assert bounds.claimed_half_failure(0.1, rounds) == pytest.approx(0.0246, abs=5e-5)
        assert exact.half_failure([1.0], exact.scalar_tolerance(0.1), rounds) == pytest.approx(0.2644, abs=5e-5)

    @pytest.mark.parametrize("epsilon", [0.01, 0.1, 0.5, 0.9])
    @pytest.mark.parametrize("rounds", [2, 3, 10, 100, 1000])
    def test_for_w_1_it_is_false_from_the_first_redraw_on(self, epsilon, rounds):
        truth = exact.half_failure([1.0], exact.scalar_tolerance(epsilon), rounds)
        assert truth > bounds.claimed_half_failure(epsilon, rounds)

    @pytest.mark.parametrize("epsilon", [0.01, 0.1, 0.5, 0.9])
    @pytest.mark.parametrize("weight", [-1.0, -0.5, 0.0, 0.3, 0.97, 1.0])
    @pytest.mark.parametrize("copies", [1, 10, 1000])
    def test_without_redraws_it_is_right(self, epsilon, weight, copies):
        truth = exact.half_failure([weight], exact.scalar_tolerance(epsilon), 1, copies)
        assert truth <= bounds.claimed_half_failure(epsilon, 1, copies) * (1 + 1e-12)

    def test_the_proposition_itself_is_false(self):
        """At δ = 10⁻⁴ no draws and masks reach what the proposition promises for its own R, at width 2."""
        rounds = bounds.scalar_rounds(0.1, 1e-4)
        assert bounds.scalar_width(0.1, 1e-4, rounds) == 2
        assert least_failure(0.1, rounds) > 2e-4
        assert bounds.width_two_rounds(0.1, 1e-8) > bounds.scalar_rounds(0.1, 1e-8)

    def test_and_so_is_the_theorem(self):
        """Its constant is four times the proposition's, so δ must be tiny: l = d_0 = d_1 = 1, δ = 10⁻²⁵."""
        rounds = bounds.network_rounds(0.1, 1e-25, [1, 1])
        assert rounds == 611
        assert least_failure(0.1, rounds) > 7e-25

    @pytest.mark.parametrize(("rounds", "right"), [(1, True), (20, True), (27, True), (28, False), (77, False)])
    def test_inside_the_interval_it_holds_a_little_longer(self, rounds, right):
        truth = exact.half_failure([0.5], exact.scalar_tolerance(0.1), rounds)
        assert (truth <= bounds.claimed_half_failure(0.1, rounds)) == right


class TestRepaired:
    def test_by_hand(self):
        assert exact.repaired_rounds(0.1, 0.05, [1, 1]) == 174  # log 80 / −log .975 = 173.08
        # 1 − (1 − .975⁷⁷)² = .26444; log 40 / −log .26444 = 2.77
        assert exact.repaired_widths(0.1, 0.05, [1, 1], rounds=77) == [6]
        assert exact.repaired_widths(0.1, 0.05, [1, 1], rounds=174) == [2]
        first, second = exact.network_tolerances(0.2, [4, 2, 8])
        assert (first.u, first.v) == pytest.approx((0.1 / 4, 0.1 / 4 / math.sqrt(8)))  # ε/l = .1, radius 2
        assert (second.u, second.v) == pytest.approx((0.1 / 4.2, 0.1 / 4.2 / 4))  # radius 2.1

    @pytest.mark.parametrize("epsilon", [0.05, 0.3, 0.9])
    @pytest.mark.parametrize("delta", [1e-6, 0.05, 0.5])
    @pytest.mark.parametrize("rounds", [1, 7, 50, 400, 100_000])
    @pytest.mark.parametrize("weight", [-1.0, -0.4, 0.0, 0.98, 1.0])
    def test_never_violated_for_one_weight(self, epsilon, delta, rounds, weight):
        copies = exact.repaired_copies(epsilon, delta, [1, 1], rounds)
        tolerances = exact.network_tolerances(epsilon, [1, 1])
        assert tolerances == [exact.scalar_tolerance(epsilon)]
        assert exact.network_failure([torch.tensor([[weight]])], tolerances, rounds, copies) <= delta

    @pytest.mark.parametrize("widths", [[3, 2], [2, 3, 2], [5, 1, 4, 2]])
    @pytest.mark.parametrize("delta", [1e-3, 0.3])
    @pytest.mark.parametrize("rounds", [30, 300, 3000, None])
    def test_never_violated_for_networks(self, widths, delta, rounds):
        epsilon = 0.5
        if rounds is None:
            rounds = exact.repaired_rounds(epsilon, delta, widths)
            assert exact.repaired_widths(epsilon, delta, widths, rounds) == [2 * width for width in widths[:-1]]
        copies = exact.repaired_copies(epsilon, delta, widths, rounds)
        tolerances = exact.network_tolerances(epsilon, widths)
        ordinary = [torch.full((m, n), 1 / math.sqrt(m * n)) for n, m in itertools.pairwise(widths)]
        extreme = [
            torch.nn.functional.pad(torch.ones(1, 1), (0, n - 1, 0, m - 1)) for n, m in itertools.pairwise(widths)
        ]
        for target in (ordinary, extreme):
            assert exact.network_failure(target, tolerances, rounds, copies) <= delta

    @pytest.mark.parametrize("widths", [[1, 1], [3, 2], [64, 12, 10], [4, 4, 4, 4]])
    def test_the_tolerances_add_up_to_epsilon(self, widths):
        """The worst errors the event allows, layer by layer as in the proof, stay within ε."""
        epsilon, error = 0.3, 0.0
        for tolerance, (n, m) in zip(exact.network_tolerances(epsilon, widths), itertools.pairwise(widths)):
            error += (tolerance.v * math.sqrt(n * m) + tolerance.u) * (math.sqrt(widths[0]) + error)
        assert error == pytest.approx(epsilon)

    def test_the_gain_is_quadratic_up_to_a_constant_while_draws_are_few(self):
        for epsilon in (0.01, 0.1, 0.5):
            for rounds in range(1, math.floor(4 / epsilon) + 1, 3):
                needed = exact.repaired_copies(epsilon, 0.05, [1, 1], rounds)[0]
                assert needed <= math.ceil(2.503 * 16 / (epsilon * rounds) ** 2 * math.log(2 / 0.05))

    def test_a_tolerance_far_below_the_precision_of_a_float_beside_one(self):
        assert exact.hit_probability(1.0, 1e-30) == exact.hit_probability(-1.0, 1e-30) == 5e-31
        assert exact.hit_probability(0.5, 1e-30) == 1e-30
        (tolerance,) = exact.network_tolerances(1e-50, [10**9, 1])
        (copies,) = exact.repaired_copies(1e-50, 0.05, [10**9, 1])
        served = tolerance.u / 2 * (tolerance.v / 2)
        assert copies == pytest.approx(math.log(2 * 10**9 / 0.05) / served, rel=1e-9)


class TestLimits:
    @pytest.mark.parametrize("epsilon", [0.1, 0.5])
    def test_one_draw_in_closed_form(self, epsilon):
        success = (epsilon + (1 - epsilon) * math.log(1 - epsilon)) / 4  # ∫ (1 − (1 − ε)/u) / 4 du from 1 − ε to 1
        assert side_failure(epsilon, 1) == pytest.approx(1 - success, rel=1e-9)

    @pytest.mark.parametrize("rounds", [1, 5, 40, 77, 174])
    def test_no_more_than_the_exact_failure_of_the_event(self, rounds):
        half = exact.half_failure([1.0], exact.scalar_tolerance(0.1), rounds)
        assert 0 < least_failure(0.1, rounds) < 1 - (1 - half) ** 2

    def test_the_repaired_rounds_are_within_a_factor_of_what_is_needed(self):
        for epsilon, delta in itertools.product((0.01, 0.1, 0.5), (1e-9, 1e-3, 0.05)):
            needed = bounds.width_two_rounds(epsilon, delta)
            assert 2 * (1 - epsilon / 2) ** (2 * needed) <= delta < 2 * (1 - epsilon / 2) ** (2 * needed - 2)
            assert least_failure(epsilon, needed // 2) > delta
            assert needed < exact.repaired_rounds(epsilon, delta, [1, 1]) < 5 * needed
        assert bounds.width_two_rounds(0.1, 0.6) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bounds.scalar_width(0.0, 0.05), "epsilon is 0; it must lie between 0 and 1"),
        (lambda: bounds.scalar_width(math.nan, 0.05), "epsilon is nan; it must lie between 0 and 1"),
        (lambda: exact.repaired_rounds(2.0, 0.05, [1, 1]), "divide it and the target's outputs by one factor"),
        (lambda: bounds.network_widths(0.1, 1.0, [1, 1]), "delta is 1; it is a probability of failure"),
        (lambda: exact.repaired_widths(0.1, 0.05, [1, 1], rounds=0), "rounds has 0; .*1 means without re-sampling"),
        (lambda: bounds.vector_width(0.1, 0.05, outputs=0), "outputs has 0; it must be a whole number of at least 1"),
        (lambda: bounds.network_rounds(0.1, 0.05, [4]), r"widths are \[4\]; name at least two"),
        (lambda: exact.half_failure([1.5], Tolerance(0.1, 0.1), 3), "a weight is 1.5; .*so scale the target"),
        (lambda: exact.repaired_rounds(0.1, 1e-320, [1, 1]), "delta is 9.99989e-321; it must be at least 1e-100"),
        (lambda: exact.repaired_widths(0.1, 0.05, [10**11, 1]), r"widths has 100000000000; it must be at most 1e\+09"),
        (lambda: bounds.scalar_width(0.1, 0.05, rounds=10**200), r"rounds has 1000.*0; it must be at most 1e\+150"),
    ],
)
def test_bad_input_gets_a_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()
