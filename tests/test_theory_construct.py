"""The construction: what the proof keeps, from draws a pruned model makes, with an error that is certified."""

import itertools
import math

import pytest
import torch
from torch import nn

import iterand
from iterand import philox
from iterand.lab.theory import exact
from iterand.lab.theory.construct import Experiment, build, build_draws, construct, digits_experiment, error_rows
from iterand.lab.theory.exact import Tolerance
from iterand.lab.theory.simulate import estimate, uniform
from iterand.lab.theory.target import (
    accuracy,
    certify,
    digits,
    matrices,
    measured_error,
    normalize_,
    proven_error,
    trained_target,
    unprotected,
)
from iterand.ticket import load_ticket, save_ticket


def plain_network(*widths):
    modules = []
    for inputs, outputs in itertools.pairwise(widths):
        modules += [nn.Linear(inputs, outputs, bias=False), nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def network(*widths, seed=0):
    """A target of unit norms."""
    target, generator = plain_network(*widths), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in target.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return normalize_(target)


def effective(model):
    return [module.weight.detach().double() for module in model if isinstance(module, nn.Linear)]


class TestConstruct:
    @pytest.mark.parametrize("widths", [(1, 1), (3, 2), (3, 4, 2), (2, 2, 2, 2)])
    def test_keeps_its_word(self, widths):
        target = network(*widths)
        for seed in range(5):
            made = construct(target, epsilon=0.4, delta=1e-3, seed=seed)
            assert made.held
            assert [w.shape[0] for w in effective(made.model)[::2]] == [2 * width for width in widths[:-1]]
            found = certify(target, made.model, points=256)
            assert 0 < found.measured <= found.proven <= 0.4

    def test_small_rounds_make_it_wider_instead(self):
        target = network(2, 2)
        made = construct(target, epsilon=0.8, delta=0.01, rounds=40)
        assert made.held
        (hidden,) = exact.repaired_widths(0.8, 0.01, [2, 2], rounds=40)
        assert effective(made.model)[0].shape == (hidden, 2)
        assert hidden > 4
        assert certify(target, made.model, points=256).proven <= 0.8

    @pytest.mark.parametrize("copies", [1, 3])
    def test_masks_and_draws_of_the_proof(self, copies):
        """Every input has two halves; in each, every output is served by one neuron that is within the tolerances."""
        (weight,) = matrices(network(3, 2))
        tolerance = Tolerance(0.3, 0.2)
        made = build([weight], [tolerance], 100, [copies], seed=5)
        assert made.held
        first, second = effective(made.model)
        for j in range(3):
            for half, sign in enumerate((1.0, -1.0)):
                block = range((2 * j + half) * copies, (2 * j + half + 1) * copies)
                for k in range(2):
                    serving = [h for h in block if second[k, h] != 0]
                    assert len(serving) == 1
                    assert abs(float(first[serving[0], j]) - sign) <= 0.3
                    assert abs(float(second[k, serving[0]]) - sign * float(weight[k, j])) <= 0.2
        for h in range(6 * copies):
            unused = bool((second[:, h] == 0).all())
            assert int(first[h].count_nonzero()) == (0 if unused else 1)

    def test_is_what_pruning_and_randomizing_leave(self):
        """Replayed with ``prune_`` and ``randomize_``: a weight is kept from the draw on at which it stays."""
        rounds = 30
        made = build(matrices(network(3, 2, 2)), [Tolerance(0.2, 0.1)] * 2, rounds, [2, 1], seed=7)
        wanted = iterand.masked_layers(made.model)
        replay = iterand.prune_(plain_network(3, 12, 2, 4, 2), sparsity=0.0, weights="uniform", seed=7)
        layers = iterand.masked_layers(replay)
        assert list(layers) == list(wanted)
        for number in range(rounds):
            for name, layer in layers.items():
                keep = wanted[name].mask & (wanted[name].draw <= number)
                layer.score.data.copy_(torch.where(keep, 1.0, -1.0))
                layer.parametrization.kept.fill_(int(keep.sum()))
            if number < rounds - 1:
                iterand.randomize_(replay, 1.0)
        for name, layer in layers.items():
            assert torch.equal(layer.mask, wanted[name].mask)
            assert torch.equal(layer.draw, wanted[name].draw)
            assert torch.equal(layer.weight, wanted[name].weight)
            assert layer.parametrization.history.runs == wanted[name].parametrization.history.runs

    @pytest.mark.parametrize(("rounds", "copies"), [(80, [1, 1]), (40, [2, 2])])
    def test_the_event_happens_as_often_as_it_must(self, rounds, copies):
        target = matrices(network(2, 2, 1))
        tolerances = [Tolerance(0.1, 0.05), Tolerance(0.1, 0.05)]
        failure = exact.network_failure(target, tolerances, rounds, copies)
        assert 0.1 < failure < 0.9
        trials = 150
        failed = sum(not build(target, tolerances, rounds, copies, seed).held for seed in range(trials))
        seen = estimate(failed, trials, 0.9999)
        assert seen.low <= failure <= seen.high

    def test_leaves_the_global_generator_alone(self):
        target = network(2, 1)
        torch.manual_seed(1)
        wanted = torch.rand(3)
        torch.manual_seed(1)
        construct(target, epsilon=0.8, delta=0.1)
        trained_target(digits()[0], hidden=2, steps=1)
        assert torch.equal(torch.rand(3), wanted)

    def test_too_few_draws_still_build_something(self):
        target = network(3, 2)
        made = build(matrices(target), [Tolerance(0.01, 0.01)], 8, [1], seed=0)
        assert not made.held
        found = certify(target, made.model, points=256)
        assert 0.01 < found.measured <= found.proven

    def test_more_draws_bring_it_nearer(self):
        rows = list(error_rows(network(4, 3, 2), [8, 128, 2048]))
        assert rows[0].measured > 4 * rows[1].measured > 16 * rows[2].measured
        assert all(row.measured <= row.proven for row in rows)


class TestCertificate:
    def test_one_weight_is_known_exactly(self):
        """For f(x) = w·x the error is the larger distance of the two slopes from w, and both numbers say so."""
        wanted = [torch.tensor([[0.6]]).double()]
        given = [torch.tensor([[0.9], [-0.8]]).double(), torch.tensor([[0.7, -0.5]]).double()]
        truth = max(abs(0.6 - 0.63), abs(0.6 - 0.4))
        assert measured_error(wanted, given, 8) == pytest.approx(truth)
        assert proven_error(wanted, given) == pytest.approx(truth)

    def test_nothing_on_a_fine_grid_exceeds_the_proven_error(self):
        target = network(2, 3, 2, seed=3)
        made = build(matrices(target), [Tolerance(0.3, 0.3)] * 2, 20, [1, 1], seed=1)
        found = certify(target, made.model, points=64)
        axis = torch.linspace(-1, 1, 201)
        grid = torch.cartesian_prod(axis, axis)
        with torch.no_grad():
            errors = (target(grid) - made.model(grid)).norm(dim=1)
        assert float(errors.max()) <= found.measured + 1e-5
        assert found.measured <= found.proven

    @pytest.mark.parametrize("widths", [(1, 1), (9, 4), (9, 4, 3), (4, 4, 4, 4)])
    def test_whatever_the_event_allows_is_proven_to_be_within_epsilon(self, widths):
        """All weights at the edge of their tolerances on the side that hurts, in the target that it hurts most."""
        epsilon = 0.3
        wanted, given = [], []
        for (n, m), tolerance in zip(itertools.pairwise(widths), exact.network_tolerances(epsilon, widths)):
            weight = torch.full((m, n), 1 / math.sqrt(m * n), dtype=torch.float64)
            u, v = torch.eye(n).double() * (1 - tolerance.u), weight - tolerance.v
            wanted.append(weight)
            given += [torch.cat([u, -u]), torch.cat([v, -v], dim=1)]
        measured, proven = measured_error(wanted, given, 64), proven_error(wanted, given)
        assert 0.8 * epsilon < measured <= proven <= epsilon

    def test_climbing_finds_the_worst_corner(self):
        wanted = [torch.full((1, 20), 0.1).double()]
        given = [torch.cat([torch.eye(20), -torch.eye(20)]).double(), torch.zeros(1, 40).double()]
        assert measured_error(wanted, given, 4) == pytest.approx(2.0)

    def test_other_networks_are_refused(self):
        with pytest.raises(ValueError, match="looks at several inputs"):
            proven_error([torch.eye(2).double()], [torch.ones(4, 2).double(), torch.ones(2, 4).double()])

    def test_unprotected(self):
        target = nn.Sequential(nn.Linear(2, 2, bias=False))
        with torch.no_grad():
            target[0].weight.copy_(torch.eye(2))
        images = torch.tensor([[0.5, 0.0], [0.1, 0.0], [0.0, 0.3], [0.2, 0.2]])
        assert unprotected(target, images, 0.2) == 0.5  # gaps .5, .1, .3, 0 against √2 · .2 = .28

    @pytest.mark.parametrize("repaired", [False, True])
    def test_the_paper_forgets_the_norm_of_the_input(self, repaired):
        """Theorem 4.1 takes ‖x_1‖ ≤ 1 where ‖x‖∞ ≤ 1, but here it is √d_0 = 10.

        All weights are within the tolerances ε/(4·l·d_(i−1)·√d_i) of its proof, yet the error is more than 2ε; with
        the repaired tolerances it is not.
        """
        epsilon, inputs = 0.1, 100
        wanted = [torch.full((1, inputs), 0.1, dtype=torch.float64), torch.ones(1, 1).double()]
        tolerance = exact.network_tolerances(epsilon, [inputs, 1, 1])[1] if repaired else Tolerance(0.0125, 0.0125)
        u, v = 1 - tolerance.u, 1 - tolerance.v
        first = [torch.cat([torch.eye(inputs), -torch.eye(inputs)]).double(), torch.cat([wanted[0], -wanted[0]], 1)]
        second = [torch.tensor([[u], [-u]], dtype=torch.float64), torch.tensor([[v, -v]], dtype=torch.float64)]
        error = measured_error(wanted, first + second, 16)
        assert error == pytest.approx(10 * (1 - u * v))
        assert (error <= epsilon) == repaired
        if not repaired:
            assert error > 2 * epsilon


@pytest.fixture(scope="module")
def data():
    return digits()


@pytest.fixture(scope="module")
def target(data):
    return trained_target(data[0])


class TestDigits:
    def test_target(self, data, target):
        assert [len(part.labels) for part in data] == [1437, 360]
        assert all(part.inputs.abs().max() == 1 for part in data)
        assert accuracy(target, data[1]) > 0.93
        assert [float(weight.norm()) for weight in matrices(target)] == pytest.approx([1, 1])

    def test_trials_meet_epsilon_and_keep_the_accuracy(self, data, target):
        """The full record, 200 trials at ε = .1, is results/records/benchmarks/theory-construct.json."""
        experiment = Experiment(target, data[1], epsilon=0.4, delta=0.05)
        trials = [experiment.run(seed)[0] for seed in range(10)]
        summary = experiment.summary(trials)
        assert (summary.trials, summary.target_widths, summary.hidden_widths) == (10, [64, 12, 10], [128, 24])
        assert summary.within_epsilon >= (1 - 0.05) * 10
        assert summary.event_held == sum(trial.held for trial in trials)
        assert summary.exact_failure <= 0.05
        assert summary.largest_proven == max(trial.proven for trial in trials)
        for trial in trials:
            assert abs(trial.accuracy - summary.target_accuracy) <= trial.unprotected
            assert trial.measured <= trial.proven

    def test_its_ticket_is_the_same_network(self, data, target, tmp_path):
        made = construct(target, epsilon=0.9, delta=0.05)
        save_ticket(made.model, tmp_path / "construction.ticket")
        plain = load_ticket(tmp_path / "construction.ticket", plain_network(64, 128, 12, 24, 10))
        assert torch.equal(plain(data[1].inputs), made.model(data[1].inputs))
        found = certify(target, plain)
        assert found == certify(target, made.model)
        share = unprotected(target, data[1].inputs, found.proven)
        assert abs(accuracy(plain, data[1]) - accuracy(target, data[1])) <= share


class TestBadTargets:
    @pytest.mark.parametrize(
        ("target", "message"),
        [
            (nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU()), "has 2 modules"),
            (nn.Sequential(nn.Linear(2, 2)), "layer 0 of the target has a bias; make it with"),
            (
                nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 2, bias=False)),
                "module 1 of the target is a Tanh",
            ),
        ],
    )
    def test_form(self, target, message):
        with pytest.raises(ValueError, match=message):
            construct(normalize_(target), 0.5, 0.1)

    def test_norm_names_the_scaling(self):
        target = nn.Sequential(nn.Linear(2, 2, bias=False))
        with torch.no_grad():
            target[0].weight.copy_(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
        with pytest.raises(ValueError, match=r"Frobenius norm 5 and .* at most 1; divide its weight by 5"):
            construct(target, 0.5, 0.1)
        assert float(normalize_(target)[0].weight.detach().norm()) == pytest.approx(1)

    def test_normalize_leaves_small_layers(self):
        target = nn.Sequential(nn.Linear(1, 1, bias=False))
        with torch.no_grad():
            target[0].weight.fill_(0.25)
        assert normalize_(target)[0].weight.item() == 0.25

    def test_rounds(self):
        with pytest.raises(ValueError, match="rounds has 0"):
            construct(network(2, 2), 0.5, 0.1, rounds=0)
        with pytest.raises(
            ValueError, match=r"building with 2 rounds takes \d+ random weights, .* \d+ rounds need no more"
        ):
            construct(network(20, 20), 0.1, 0.1, rounds=2)


def test_where_every_draw_has_the_wrong_sign_nothing_is_built():
    """With one input, one copy and one draw that happens in a quarter of all cases."""
    (weight,) = matrices(network(1, 1))
    refused = []
    for seed in range(20):
        u, _ = philox_draws(seed)
        wrong = bool(u[0] <= 0 and u[1] >= 0)
        if wrong:
            sentence = rf"seed {seed} draws no weight of layer 0 with the sign .*more rounds than 1, more copies than 1"
            with pytest.raises(ValueError, match=sentence):
                build([weight], [Tolerance(0.1, 0.1)], 1, [1], seed)
        else:
            build([weight], [Tolerance(0.1, 0.1)], 1, [1], seed)
        refused.append(wrong)
    assert any(refused)
    assert not all(refused)


def philox_draws(seed):
    """The two u and the two v of a construction of width 2."""
    names = ("0.weight", "2.weight")
    zero = torch.zeros(2, dtype=torch.int64)
    return [uniform(torch.arange(2), zero, philox.key(seed, name)) for name in names]


def test_progress_counts_the_draws():
    weights, tolerances = matrices(network(3, 4, 2)), [Tolerance(0.02, 0.01)] * 2
    made = []
    build(weights, tolerances, 10_000, [1, 2], 0, made.append)
    assert sum(made) == pytest.approx(build_draws(weights, tolerances, 10_000, [1, 2]), rel=0.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: construct(network(3, 2), 1e-12, 0.05),
            r"building with up to [\d,]+ rounds takes about .* draws, and at most",
        ),
        (
            lambda: construct(network(3, 2), 0.9, 0.05, rounds=1 << 32),
            r"rounds has 4294967296; it must be at most 2e\+09",
        ),
        (lambda: digits_experiment(10**12, 0.5, 0.05), r"widths has 1000000000000; it must be at most 1e\+09"),
        (lambda: digits_experiment(100_000, 0.5, 0.05), r"hidden has 100000; its construction has at least \d+ random"),
        (lambda: digits_experiment(100, 0.5, 0.05, rounds=0), "rounds has 0"),
    ],
)
def test_what_would_take_for_ever_is_refused_at_once(monkeypatch, call, message):
    monkeypatch.setattr("iterand.lab.theory.construct.trained_target", lambda *arguments: pytest.fail("began to train"))
    with pytest.raises(ValueError, match=message):
        call()
