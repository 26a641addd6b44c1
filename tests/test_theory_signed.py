"""Signed constants: exact probabilities against enumeration, widths, digits, and subnetworks found in ±c networks."""

import itertools
import math

import pytest
import torch
from torch import nn

import iterand
from iterand.lab.theory import signed, signed_construct, signed_depth, signed_simulate, signed_tables
from iterand.lab.theory.signed_depth import Pool
from iterand.lab.theory.simulate import estimate
from iterand.lab.theory.target import certify, matrices
from test_theory_construct import network, plain_network

SURE = 1 - 1e-5


class TestUnits:
    @pytest.mark.parametrize(
        ("weight", "step", "count"), [(1.0, 0.2, 5), (0.5, 0.25, 2), (-0.6, 0.25, 2), (0.1, 0.25, 0), (0.375, 0.25, 1)]
    )
    def test_nearest_multiple(self, weight, step, count):
        assert signed.units(weight, step) == count
        assert abs(abs(weight) - count * step) <= step / 2 * (1 + 1e-12)

    def test_of_a_whole_interval(self):
        """⌈(1 − ε) / (2ε)⌉."""
        assert [signed.scalar_units(epsilon) for epsilon in (0.9, 0.25, 0.2, 0.1, 0.01)] == [1, 2, 2, 5, 50]


def reachable_slopes(neurons):
    """All (slope along x > 0, slope along −x > 0) over draws and masks; a neuron is (signs of u, signs of v)."""
    slopes = {(0, 0)}
    for of_u, of_v in neurons:
        own = {(v, 0) if u > 0 else (0, v) for u in of_u for v in of_v} | {(0, 0)}
        slopes = {(a + c, b + d) for a, b in slopes for c, d in own}
    return slopes


class TestTwoLayers:
    @pytest.mark.parametrize(("width", "count", "rounds"), [(3, 1, 1), (5, 2, 1), (2, 1, 2), (3, 1, 2), (2, 1, 3)])
    def test_failure_is_the_sum_over_all_outcomes(self, width, count, rounds):
        outcomes = list(itertools.product([-1, 1], repeat=2 * width * rounds))
        failed = 0
        for outcome in outcomes:
            draws = [outcome[n * rounds : (n + 1) * rounds] for n in range(2 * width)]
            failed += (count, -count) not in reachable_slopes(zip(draws[::2], draws[1::2]))
        assert signed.best_failure(width, count, rounds) == pytest.approx(failed / len(outcomes), rel=1e-12)

    def test_every_mask_of_a_drawn_network(self):
        """All 2⁸ masks of four neurons, by forward passes: a grid, and no error below the formula's."""
        model = iterand.prune_(plain_network(1, 4, 1), sparsity=0.0, weights="signed_constant", seed=4)
        u, v = (module.weight.detach() for module in model if isinstance(module, nn.Linear))
        step = math.sqrt(2) * math.sqrt(2 / 4)
        slopes = set()
        for mask in itertools.product([0.0, 1.0], repeat=8):
            keep_u, keep_v = torch.tensor(mask[:4]).view(4, 1), torch.tensor(mask[4:]).view(1, 4)
            right, left = (torch.tensor([[1.0], [-1.0]]) @ (u * keep_u).T).relu() @ (v * keep_v).T
            slopes.add((round(float(right) / step, 4), round(float(left) / step, 4)))
        kinds = [(int(a.sign()), int(b.sign())) for a, b in zip(u.view(-1), v.view(-1))]
        assert len(set(kinds)) > 2
        right_steps = range(-kinds.count((1, -1)), kinds.count((1, 1)) + 1)
        left_steps = range(-kinds.count((-1, -1)), kinds.count((-1, 1)) + 1)
        assert slopes == set(itertools.product(right_steps, left_steps))

    @pytest.mark.parametrize("rounds", [1, 2, 4, 60, 10**12])
    @pytest.mark.parametrize("delta", [0.3, 0.01, 1e-9])
    def test_width_is_the_first_that_is_enough(self, rounds, delta):
        width = signed.best_width(7, delta, rounds)
        assert signed.best_failure(width, 7, rounds) <= delta
        assert width == 14 or signed.best_failure(width - 1, 7, rounds) > delta

    def test_few_missing_signs_do_not_drown(self):
        """At the least width all of 2m neurons must serve, and no more than m one side only: about 2m·2q² + …"""
        q = 2.0**-60
        assert signed.best_failure(10, 5, 60) == pytest.approx(10 * 2 * q * q, rel=1e-9)

    @pytest.mark.parametrize(("rounds", "factor"), [(1, 4.0), (2, 16 / 7), (3, 64 / 31), (30, 2.0)])
    def test_what_redraws_buy(self, rounds, factor):
        """Width / m tends to 2 / (1 − 2·4^−R): redraws save a factor of two, and the first one most of it."""
        assert signed.best_width(8000, 0.05, rounds) / 8000 == pytest.approx(factor, rel=0.02)

    def test_simulated(self):
        rounds = [1, 2, 3, 5]
        for width in (10, 22):
            for r, seen in zip(rounds, signed_simulate.best_failures(width, 5, rounds, trials=4000, seed=1)):
                interval = estimate(seen.count, seen.trials, SURE)
                assert interval.low <= signed.best_failure(width, 5, r) <= interval.high

    @pytest.mark.parametrize("rounds", [1, 2, 6])
    def test_simulated_width(self, rounds):
        simulated = signed_simulate.simulated_width(20, 0.1, rounds, trials=2000)
        assert simulated == pytest.approx(signed.best_width(20, 0.1, rounds), abs=2)

    def test_kaiming_scale(self):
        """At width n the step is 2/√n: within 0.1 of all weights from n = 100 on, and reachable there."""
        assert signed.kaiming_widths(0.1, (1, 1)) == [100]
        assert signed.kaiming_widths(0.5, (4, 2)) == [2 * 16]  # d'(l·√d_0/ε)²
        grid = [0.2 * number for number in range(-5, 6)]
        worst = max(min(abs(w / 1000 - point) for point in grid) for w in range(-1000, 1001))
        assert worst == pytest.approx(0.1)
        assert signed.best_failure(100, 5, 1) < 1e-7


def enumerate_column_failure(counts, copies, rounds):
    """The construction for one input by going through every outcome, with a plain loop."""
    neurons, outputs = 2 * copies, len(counts)
    failed = 0
    outcomes = list(itertools.product([-1, 1], repeat=neurons * (1 + outputs) * rounds))
    for outcome in outcomes:
        draws = [outcome[n * rounds : (n + 1) * rounds] for n in range(neurons * (1 + outputs))]
        sides = [(1 if 1 in draws[n] else -1) if n < copies else (-1 if -1 in draws[n] else 1) for n in range(neurons)]
        for side, output in itertools.product((1, -1), range(outputs)):
            own = [n for n in range(neurons) if sides[n] == side]
            good = sum(side in draws[neurons * (1 + output) + n] for n in own)  # all weights are positive
            if good < counts[output]:
                failed += 1
                break
    return failed / len(outcomes)


class TestConstructionOfAColumn:
    @pytest.mark.parametrize(
        ("counts", "copies", "rounds"), [([1], 2, 1), ([2], 3, 1), ([1, 1], 2, 1), ([1, 0], 1, 2), ([1, 1], 1, 2)]
    )
    def test_failure_is_the_sum_over_all_outcomes(self, counts, copies, rounds):
        wanted = enumerate_column_failure(counts, copies, rounds)
        assert signed.column_failure(counts, copies, rounds) == pytest.approx(wanted, rel=1e-12)

    @pytest.mark.parametrize(("count", "copies"), [(3, 4), (5, 20)])
    def test_is_the_best_choice_without_redraws(self, count, copies):
        best = signed.best_failure(2 * copies, count, 1)
        assert signed.column_failure([count], copies, 1) == pytest.approx(best, rel=1e-9)
        assert signed.column_failure([count], copies, 3) > signed.best_failure(2 * copies, count, 3)

    @pytest.mark.parametrize("outputs", [1, 7])
    @pytest.mark.parametrize("rounds", [1, 2, 8])
    @pytest.mark.parametrize("delta", [0.5, 0.05, 1e-6])
    def test_theorem_d_is_never_violated(self, outputs, rounds, delta):
        for count in (1, 5, 60):
            copies = math.ceil(signed.enough_copies(count, math.log(2 * outputs / delta), rounds))
            assert signed.column_failure([count] * outputs, copies, rounds) <= delta

    def test_bound_by_hand(self):
        # m = 5, Λ = log 40 = 3.689: (5 + 3.689 + √(13.61 + 36.89)) / (1 / 2) = 31.59
        assert signed.bound_widths(0.1, 0.05, (1, 1), rounds=1) == [2 * 32]
        assert signed.bound_rounds(0.1, 0.05, (1, 1)) == 9  # log₂(20 / 0.05) = 8.64
        assert signed.bound_widths(0.1, 0.05, (1, 1), rounds=9) == [10]
        first, second = signed.network_steps(0.2, [4, 2, 8])
        assert first == pytest.approx(2 * 0.1 / (2 * math.sqrt(8)))
        assert second == pytest.approx(2 * 0.1 / (2.1 * 4))

    @pytest.mark.parametrize("rounds", [1, 3, 40])
    def test_bound_is_enough_for_networks(self, rounds):
        """Also for targets whose norm is in one column, or in all of them alike."""
        widths, epsilon, delta = (6, 4, 3), 0.3, 0.1
        bound = signed.bound_widths(epsilon, delta, widths, rounds)
        even = [torch.full((m, n), 1 / math.sqrt(m * n)) for n, m in itertools.pairwise(widths)]
        single = [nn.functional.pad(torch.ones(1, 1), (0, n - 1, 0, m - 1)) for n, m in itertools.pairwise(widths)]
        for target in (even, single, matrices(network(*widths))):
            for weight, step, hidden in zip(target, signed.network_steps(epsilon, widths), bound):
                columns = [[signed.units(w, step) for w in column] for column in weight.double().T.tolist()]
                share = delta / (2 * len(columns))
                if rounds == 40:
                    assert signed.bound_rounds(epsilon, delta, widths) <= rounds
                    copies = [max(column) for column in columns]
                    failure = sum(signed.column_failure(column, c, rounds) for column, c in zip(columns, copies) if c)
                    assert failure <= delta / 2
                else:
                    copies = [signed.column_copies(column, share, rounds) for column in columns]
                assert 2 * sum(copies) <= hidden


class TestDepth:
    @pytest.mark.parametrize(("base", "layers", "most"), [(5, 2, 5), (1, 4, 3), (2, 4, 14), (3, 4, 39), (7, 3, 56)])
    def test_every_slope_up_to_the_largest_has_digits(self, base, layers, most):
        assert signed_depth.largest(base, layers) == most
        digits = itertools.product(range(base + 1), repeat=layers - 1)
        slopes = {sum(digit * base**power for power, digit in enumerate(own)) for own in digits}
        assert slopes == set(range(most + 1))

    def test_by_hand(self):
        assert [signed_depth.least_base(500, layers) for layers in (2, 3, 4, 9)] == [500, 22, 8, 2]
        assert signed_depth.digit_width(2, 9) == 6
        assert signed_depth.digit_width(3, 4, inputs=5, outputs=7) == 2 * (15 + 7)
        # 2·(2·2 + 1·(4 + 3)) = 22 signs: log₂(22 / 0.05) = 8.78
        assert signed_depth.digit_rounds(2, 3, 0.05) == 9
        assert [signed_depth.necessary_width(5, layers) for layers in (2, 3, 4)] == [10, 5, 3]

    @pytest.mark.parametrize(("count", "copies", "rounds"), [(3, 7, 1), (3, 7, 2), (10, 12, 5)])
    def test_two_layers_are_a_column(self, count, copies, rounds):
        failure = signed_depth.pool_failure(Pool(copies, 0), count, 2, rounds)
        assert failure == pytest.approx(signed.column_failure([count], copies, rounds), rel=1e-9)

    @pytest.mark.parametrize("layers", [3, 6, 10])
    @pytest.mark.parametrize("delta", [0.1, 1e-6])
    def test_theorem_e_is_never_violated(self, layers, delta):
        for base in (1, 2, 5):
            rounds = signed_depth.digit_rounds(base, layers, delta)
            assert signed_depth.pool_failure(Pool(base, 1), base, layers, rounds) <= delta

    @pytest.mark.parametrize(
        ("pool", "base", "layers", "rounds"),
        [(Pool(5, 2), 2, 3, 1), (Pool(8, 5), 2, 6, 1), (Pool(4, 2), 2, 6, 3), (Pool(12, 3), 7, 3, 2)],
    )
    def test_pools_simulated(self, pool, base, layers, rounds):
        truth = signed_depth.pool_failure(pool, base, layers, rounds)
        assert 0.05 < truth < 0.95
        seen = signed_simulate.pool_failures(pool, base, layers, rounds, trials=1000)
        interval = estimate(seen.count, seen.trials, SURE)
        assert interval.low <= truth <= interval.high

    @pytest.mark.parametrize("layers", [3, 5])
    def test_no_smaller_pool_is_enough(self, layers):
        base, delta = signed_depth.least_base(20, layers), 0.1
        best = signed_depth.pool_for(20, layers, delta, 1)
        assert signed_depth.pool_failure(best, base, layers, 1) <= delta
        smaller = best.width // 2 - 1
        for sums in range(1, smaller - base + 1):
            assert signed_depth.pool_failure(Pool(smaller - sums, sums), base, layers, 1) > delta


def plain_best_slope(widths):
    """Every choice of all weights from {−1, 0, 1}, by forward passes."""
    sizes = [1, *widths, 1]
    shapes = [(n, m) for m, n in itertools.pairwise(sizes)]
    total = sum(n * m for n, m in shapes)
    codes = torch.arange(3**total)
    weights = torch.stack([codes // 3**place % 3 - 1 for place in range(total)], dim=1).float()
    x, start = torch.tensor([1.0, -1.0]).view(1, 2, 1).expand(len(codes), 2, 1), 0
    for number, (n, m) in enumerate(shapes):
        x = x @ weights[:, start : start + n * m].reshape(-1, n, m).transpose(1, 2)
        x, start = (x.relu() if number < len(shapes) - 1 else x), start + n * m
    right, left = x[..., 0].unbind(1)
    reached = set(right[right == -left].int().tolist())
    return next(slope for slope in itertools.count() if slope + 1 not in reached)


class TestExhaustiveSearch:
    @pytest.mark.parametrize("widths", [(1,), (3,), (4,), (2, 2), (2, 3), (3, 2), (2, 2, 2)])
    def test_against_every_choice_of_weights(self, widths):
        assert signed_depth.best_slope(widths) == plain_best_slope(widths)

    def test_small_cases(self):
        """Two and three layers meet the bound at even widths; with four, sides that share neurons beat halves."""
        rows = {row.widths: row for row in signed_tables.slope_rows()}
        assert {widths: row.best for widths, row in rows.items()} == {
            (4,): 2, (6,): 3, (4, 4): 4, (6, 6): 9, (3, 3, 3): 4, (4, 4, 4): 8, (3, 3, 3, 3): 6,
        }  # fmt: skip
        assert all(row.digits <= row.best <= row.bound for row in rows.values())
        assert all(row.best == row.bound for widths, row in rows.items() if len(widths) < 3)

    def test_too_many_choices_are_refused(self):
        with pytest.raises(ValueError, match=r"hidden widths \(9, 9, 9\) have \d+ sets of neurons"):
            signed_depth.best_slope((9, 9, 9))


class TestConstruct:
    @pytest.mark.parametrize("widths", [(1, 1), (3, 2), (3, 4, 2)])
    @pytest.mark.parametrize("rounds", [1, 3, None])
    def test_keeps_its_word(self, widths, rounds):
        target = network(*widths)
        made = signed_construct.construct(target, 0.4, 1e-3, rounds, seed=1)
        assert made.held
        linear = [module.weight.detach() for module in made.model if isinstance(module, nn.Linear)]
        for weight in linear:
            assert set((weight.abs() / math.sqrt(2 / weight.shape[1])).round(decimals=5).unique().tolist()) <= {
                0.0,
                1.0,
            }
        found = certify(target, made.model, gains=made.gains, points=256)
        assert found.measured <= found.proven <= 0.4
        x = torch.rand(500, widths[0], generator=torch.Generator().manual_seed(2)) * 2 - 1
        with torch.no_grad():
            error = (target(x) - math.prod(made.gains) * made.model(x)).norm(dim=1).max()
        assert float(error) <= found.measured + 1e-5

    def test_more_rounds_make_it_narrower(self):
        target = network(3, 2)
        hidden = [signed_construct.construct(target, 0.4, 0.01, r).model[0].weight.shape[0] for r in (1, 2, 5, None)]
        assert hidden == sorted(hidden, reverse=True)
        step = signed.network_steps(0.4, (3, 2))[0]
        assert hidden[-1] == 2 * sum(signed.units(float(w), step) for w in matrices(target)[0].abs().amax(dim=0))

    @pytest.mark.parametrize("rounds", [1, 3])
    def test_the_event_happens_as_often_as_it_must(self, rounds):
        weight = torch.tensor([[0.9, -0.3], [0.5, 0.6]])
        copies = [11, 7] if rounds == 1 else [5, 4]
        counts = [[signed.units(w, 0.25) for w in column] for column in weight.T.double().tolist()]
        success = math.prod(1 - signed.column_failure(own, c, rounds) for own, c in zip(counts, copies))
        assert 0.1 < success < 0.9
        held = sum(signed_construct.build([weight], [0.25], [copies], rounds, seed).held for seed in range(80))
        seen = estimate(held, 80, 0.9999)
        assert seen.low <= success <= seen.high

    def test_is_what_pruning_and_randomizing_leave(self):
        rounds = 4
        target = network(2, 2)
        made = signed_construct.construct(target, 0.5, 0.05, rounds, seed=7)
        wanted = iterand.masked_layers(made.model)
        hidden = made.model[0].weight.shape[0]
        replay = iterand.prune_(plain_network(2, hidden, 2), sparsity=0.0, weights="signed_constant", seed=7)
        for number in range(rounds):
            for name, layer in iterand.masked_layers(replay).items():
                keep = wanted[name].mask & (wanted[name].draw <= number)
                layer.score.data.copy_(torch.where(keep, 1.0, -1.0))
                layer.parametrization.kept.fill_(int(keep.sum()))
            if number < rounds - 1:
                iterand.randomize_(replay, 1.0)
        for name, layer in iterand.masked_layers(replay).items():
            assert torch.equal(layer.mask, wanted[name].mask)
            assert torch.equal(layer.weight, wanted[name].weight)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: signed.best_width(10**6, 0.05, 1), "a weight takes 1000000 neurons on each side.*raise epsilon"),
        (lambda: signed.scalar_units(0.1, 1.5), "a weight is 1.5; it must lie between -1 and 1"),
        (lambda: signed.best_failure(4, 1, 0), "rounds has 0"),
        (lambda: signed_depth.largest(2, 1), "layers has 1; it must be a whole number from 2 to 1000"),
        (lambda: signed_tables.failure_rows(0.1, [1], weight=0.05), "0 is within epsilon 0.1 of it"),
        (
            lambda: signed_construct.construct(network(90, 9), 1e-3, 0.05),
            "even with all signs drawn, the construction has .* are built; raise epsilon$",
        ),
        (lambda: signed_construct.construct(network(2, 2), 0.01, 0.05, 0), "rounds has 0"),
    ],
)
def test_bad_input_gets_a_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_few_rounds_may_ask_for_too_much(monkeypatch):
    monkeypatch.setattr(signed_construct, "LARGEST", 10_000)
    with pytest.raises(
        ValueError, match=r"^building with 1 round takes .* are built; raise epsilon, or take more rounds$"
    ):
        signed_construct.construct(network(9, 3), 0.1, 0.05, 1)
    signed_construct.construct(network(9, 3), 0.1, 0.05, 20)
