"""Kernels give the bits of the CPU path: on a GPU as they are, elsewhere through Triton's interpreter."""

import pytest
import torch

from iterand import backend, distributions, mask_kinds, philox
from iterand.backend import reference
from iterand.lab.data import Batch
from iterand.lab.networks import build_network
from iterand.lab.training import recipe_file
from iterand.lab.training.recipe import Recipe
from iterand.lab.training.session import Session
from iterand.lab.training.steps import EagerStep, Teacher
from kernel_cases import cases, misses, shrink

pytest.importorskip("triton", reason="the kernels are written in Triton")

from iterand.backend.triton import cuts
from iterand.backend.triton import cuts as kernels
from iterand.backend.triton.layers import pointers
from iterand.backend.triton.masks import ApplyMasks, ScoreGradients, UpdateScores
from iterand.backend.triton.redraw import Redraw

# The interpreter computes with NumPy, which warns of infinities that a GPU computes with as well.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
CPU = torch.device("cpu")
TYPES = [torch.float32, torch.bfloat16]


ALIVE = []  # kernels know tensors by their addresses, so these must not go before them


SIZE = 100_000 if ON_GPU else 1200


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(kernels, "_PROGRAMS", 3)  # so that one has blocks of several layers
    if not ON_GPU:
        shrink(monkeypatch)
    yield
    ALIVE.clear()


def on_device(tensors):
    moved = [tensor.to(DEVICE) for tensor in tensors]
    ALIVE.extend(moved)
    return moved


def expected(scores, kept, *, together=False, floors=(), magnitude=False):
    ranked = [score.cpu().abs() if magnitude else score.cpu() for score in scores]
    counts = [torch.tensor(count) for count in kept]
    if together:
        return reference.cut_together(ranked, torch.stack(counts).sum(), floors or [0] * len(kept), ["s"] * len(kept))
    return [reference.cut(score, count) for score, count in zip(ranked, counts)]


def assert_same(found, wanted):
    found_cuts = list(zip(found.thresholds.tolist(), found.lasts.tolist()))
    assert found_cuts == [(cut.threshold.item(), cut.last.item()) for cut in wanted]


@pytest.mark.parametrize(
    ("name", "together"),
    [
        pytest.param(name, together, id=f"{name}-{'global' if together else 'layer'}")
        for name, (scores, _) in cases(1).items()
        for together in (False, True)[: len(scores)]  # one layer is ranked alone whatever is asked for
    ],
)
def test_cut_is_that_of_the_cpu(name, together):
    scores, kept = cases(SIZE)[name]
    moving = on_device(scores)
    found = cuts.prepare(moving, on_device(map(torch.tensor, kept)), together=together)
    for number in range(3):  # from nowhere; near the last cut; where nothing has changed
        found.run()
        assert_same(found, expected(moving, kept, together=together))
        if number == 0:
            for score in moving:
                score.mul_(1 + 1e-4)


@pytest.mark.parametrize("name", ["random", "tied", "channels last, tied", "odd"])
def test_cut_by_magnitude(name):
    scores, kept = cases(SIZE)[name]
    found = cuts.prepare(on_device(scores), on_device(map(torch.tensor, kept)), magnitude=True)
    found.run()
    assert_same(found, expected(scores, kept, magnitude=True))


@pytest.mark.parametrize("kept", [(100, 60), (21, 20), (250, 250)])
def test_cut_with_floors(kept):
    scores = [torch.randn(200), torch.randn(30, 10) * 0.1]
    scores[0][:50] = 3.0
    floors = [5, 36]
    found = cuts.prepare(on_device(scores), on_device(map(torch.tensor, kept)), together=True, floors=floors)
    for _ in range(2):
        found.run()
        assert_same(found, expected(scores, kept, together=True, floors=floors))


def test_cut_after_scores_have_jumped():
    score, kept = on_device([torch.randn(SIZE), torch.tensor(SIZE // 3)])
    found = cuts.prepare([score], [kept])
    for change in (0.0, 1e-5, 7.0, -1e4, 1e30):
        score.add_(change)
        found.run()
        assert_same(found, expected([score], [SIZE // 3]))
    assert misses(found).item() >= 4  # the first time, and where the cut has left its bracket


def test_kept_is_read_each_time():
    score, kept = torch.randn(500, device=DEVICE), torch.tensor(100, device=DEVICE)
    found = cuts.prepare([score], [kept])
    for count in (100, 101, 250, 0, 500):
        kept.fill_(count)
        found.run()
        assert_same(found, expected([score], [count]))


@pytest.mark.parametrize("together", [False, True], ids=["layer", "global"])
def test_nan_becomes_the_threshold(together):
    scores = on_device([torch.randn(50), torch.randn(60)])
    scores[1][17] = torch.nan
    found = cuts.prepare(scores, on_device([torch.tensor(5), torch.tensor(6)]), together=together)
    found.run()
    assert found.thresholds.isnan().tolist() == [together, True]
    weights = [torch.ones_like(score) for score in scores]
    masked = ApplyMasks(found, weights, [torch.float32] * 2).masked_weights()
    assert masked[1].isnan().all()
    scores[1][17] = 0.0
    found.run()
    assert_same(found, expected(scores, [5, 6], together=together))


class Network:
    """Three layers with their tensors: a convolution that lies channels last, a matrix with ties, a vector."""

    names = ("kaiming_uniform", "signed_constant", "kaiming_normal")
    fans = (36, 7, 5)

    def __init__(self):
        torch.manual_seed(0)
        scores = [torch.randn(30, 4, 3, 3).to(memory_format=torch.channels_last), torch.randn(90, 7).round()]
        self.scores = on_device([*scores, torch.randn(5)])
        self.draws = [torch.zeros_like(score, dtype=torch.int32) for score in self.scores]
        self.kept = [score.numel() // 2 for score in self.scores]
        self.keys = [philox.key(3, name) for name in self.names]
        self.distributions = [distributions.get_distribution(name) for name in self.names]
        self.origins = [
            (*key, distribution.kind, distribution.unit32(fan))
            for key, distribution, fan in zip(self.keys, self.distributions, self.fans)
        ]
        self.normal = distributions.normal_levels(DEVICE)
        self.weights = [
            torch.empty_like(score).copy_(distributions.sample(distribution, score.numel(), fan, key).view(score.shape))
            for score, distribution, fan, key in zip(self.scores, self.distributions, self.fans, self.keys)
        ]
        self.found = cuts.prepare(self.scores, on_device(map(torch.tensor, self.kept)))
        self.found.run()

    def masks(self):
        """m on the CPU."""
        cuts = expected(self.scores, self.kept)
        return [reference.keeps(score.cpu(), cut) for score, cut in zip(self.scores, cuts)]


KINDS = [*([kind] * 3 for kind in TYPES), [torch.bfloat16, torch.float32, torch.bfloat16]]


@pytest.mark.parametrize("same_order", [True, False])
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_masked_weights(kinds, same_order):
    network = Network()
    if not same_order:
        network.weights[0] = network.weights[0].contiguous()
    apply = ApplyMasks(network.found, network.weights, kinds)
    given = [torch.empty_like(weight, dtype=kind) for weight, kind in zip(network.weights, kinds)]
    apply.run(pointers(given))
    for masked in (given, apply.masked_weights()):
        for result, weight, mask, kind in zip(masked, network.weights, network.masks(), kinds):
            assert result.stride() == weight.stride()
            wanted = torch.where(mask, weight.cpu(), 0.0).to(kind)
            if kind == torch.bfloat16 and not ON_GPU:  # the interpreter cuts off where hardware rounds
                torch.testing.assert_close(result, wanted, rtol=2**-7, atol=0)
                assert torch.equal(result != 0, wanted != 0)
            else:
                assert torch.equal(result.cpu(), wanted)


@pytest.mark.parametrize(
    ("kind", "coats"), [("signed", 1), ("multicoat", 2), ("multicoat", 3), ("gem_miner", 1)], ids=str
)
def test_masked_weights_of_other_kinds(kind, coats):
    network = Network()
    network.weights[0] = network.weights[0].contiguous()  # not the order of the scores
    magnitude = kind == "signed"
    shares = [[count * (coats - coat) // coats for count in network.kept] for coat in range(coats)]
    counts = [on_device(map(torch.tensor, row)) for row in shares]
    found = [cuts.prepare(network.scores, kept, magnitude=magnitude) for kept in counts]
    options = {"signed": kind == "signed", "rounded": kind == "gem_miner"}
    apply = ApplyMasks(found[0], network.weights, [torch.float32] * 3, coats=found[1:], **options)
    given = [torch.empty_like(weight) for weight in network.weights]
    for change in (0.0, 0.4):  # the cuts are read again in each run
        for score in network.scores:
            score.mul_(1 - 2 * change).add_(change)
        for one in found:
            one.run()
        apply.run(pointers(given))
        for number, (score, weight) in enumerate(zip(network.scores, network.weights)):
            ranked = score.cpu().abs() if magnitude else score.cpu()
            mine = [reference.cut(ranked, torch.tensor(row[number])) for row in shares]
            mine[0] = mask_kinds.limit(kind, mine[0], score.numel())
            multipliers = mask_kinds.multipliers(kind, score.cpu(), ranked, mine)
            wanted = mask_kinds.apply_multipliers(weight.cpu(), multipliers, torch.zeros(()), torch.float32)
            assert multipliers.unique().numel() > 1
            assert torch.equal(given[number].cpu(), wanted)


@pytest.mark.parametrize("magnitude", [False, True])
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_gradients_of_scores(kinds, magnitude):
    network = Network()
    found = cuts.prepare(network.scores, on_device(map(torch.tensor, network.kept)), magnitude=magnitude)
    gradients = [torch.randn_like(weight).to(kind) for weight, kind in zip(network.weights, kinds)]
    results = [torch.full_like(score, 7.0) for score in network.scores]
    operation = ScoreGradients(found, network.weights, kinds, magnitude=magnitude)
    wanted = [
        gradient.cpu().float() * weight.cpu() * (score.cpu().sign() if magnitude else 1.0)
        for gradient, weight, score in zip(gradients, network.weights, network.scores)
    ]
    for add, times in ((False, 1), (True, 2)):
        operation.run(pointers(gradients), pointers(results), add=add)
        assert all(torch.equal(result.cpu(), times * one) for result, one in zip(results, wanted))


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.9, 5e-4), (0.0, 0.0), (0.9, 0.0)])
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_scores_are_updated_as_by_sgd_on_the_cpu(kinds, momentum, weight_decay):
    network = Network()
    gradients = [torch.randn_like(weight).to(kind) for weight, kind in zip(network.weights, kinds)]
    parameters = [torch.nn.Parameter(score.cpu()) for score in network.scores]
    optimizer = torch.optim.SGD(parameters, lr=0.3, momentum=momentum, weight_decay=weight_decay)
    buffers = [torch.zeros_like(score) for score in network.scores]
    update = UpdateScores(network.found, network.weights, buffers, kinds, magnitude=False)
    for _ in range(3):
        for parameter, gradient, weight in zip(parameters, gradients, network.weights):
            parameter.grad = gradient.cpu().float() * weight.cpu()
        optimizer.step()
        plain = [
            reference.update_scores(
                *(tensor.cpu() for tensor in tensors), 0.3, momentum=momentum, weight_decay=weight_decay
            )
            for tensors in zip(network.scores, network.weights, gradients, buffers)
        ]
        update.run(pointers(gradients), torch.tensor(0.3, device=DEVICE), momentum, weight_decay)
        for (score, buffer), (wanted, momenta) in zip(zip(network.scores, buffers), plain):
            torch.testing.assert_close(score.cpu(), wanted, rtol=1e-6, atol=1e-7)  # which rounds once more
            if momentum:
                torch.testing.assert_close(buffer.cpu(), momenta, rtol=1e-6, atol=1e-7)
    for score, parameter in zip(network.scores, parameters):
        assert torch.equal(score.cpu(), parameter.detach())


@pytest.mark.parametrize(
    ("rate", "same_order", "negative", "follow", "draws"),
    [
        (0.3, True, False, False, torch.uint8),
        (1.0, True, True, True, torch.int16),
        (0.3, True, False, True, torch.int32),
        (1.0, False, False, False, torch.int32),
        (0.3, False, True, True, torch.uint8),
        (0.0, False, False, True, torch.int16),
    ],
)
def test_redraw_is_that_of_the_cpu(rate, same_order, negative, follow, draws):
    network, coin = Network(), philox.coin_threshold(rate)
    network.draws = [draw.to(draws) for draw in network.draws]
    if not same_order:
        network.weights[0] = network.weights[0].contiguous()
        assert network.weights[0].stride() != network.scores[0].stride()
    before = [weight.cpu().clone() for weight in network.weights]
    scores = [score.cpu().clone() for score in network.scores]
    masks = network.masks()
    redraw = Redraw(network.found, network.weights, network.draws, network.origins, network.normal)
    numbers = [3, 3, 4]
    redraw.run(torch.tensor(numbers, device=DEVICE), coin, negative=negative, follow=follow)
    changed = 0
    for i, mask in enumerate(masks):
        words = philox.philox(torch.arange(mask.numel()), numbers[i], network.keys[i])
        redrawn = philox.coins(words[1], coin).view(mask.shape) & ~mask & ((scores[i] < 0) | (not negative))
        fresh = network.distributions[i].values(words, network.fans[i]).view(mask.shape)
        assert torch.equal(network.weights[i].cpu(), torch.where(redrawn, fresh, before[i]))
        assert torch.equal(network.draws[i].cpu(), torch.where(redrawn, numbers[i], 0).to(draws))
        turned = redrawn & ((fresh < 0) != (before[i] < 0)) & follow
        assert torch.equal(network.scores[i].cpu(), torch.where(turned, -scores[i], scores[i]))
        changed += int(redrawn.sum())
    assert (changed > 0) == (rate > 0)


@pytest.mark.parametrize("floors", [(), (150, 0)], ids=["no floors", "a floor that binds"])
def test_a_bracket_follows_a_steady_drift(floors):
    """The first cut is found digit by digit, all others in the bracket."""
    generator = torch.Generator().manual_seed(0)
    scores = on_device([torch.randn(400, generator=generator) - 5, torch.randn(2000, generator=generator)])
    kept = on_device([torch.tensor(200), torch.tensor(500)])
    found = cuts.prepare(scores, kept, together=True, floors=floors)
    for _ in range(12):
        found.run()
        for score in scores:
            score.add_(0.04)
    assert misses(found).tolist() == [1]


def test_a_drift_that_leaves_every_bracket_is_followed_and_a_jump_is_not(monkeypatch):
    """Thresholds of many scores drift by more than a bracket may be wide: where they go must be known."""
    monkeypatch.setattr(kernels, "CANDIDATES", 256)
    monkeypatch.setattr(kernels, "_WANTED", 16)
    score, kept = on_device([torch.randn(3000, generator=torch.Generator().manual_seed(0)), torch.tensor(1000)])
    found = cuts.prepare([score], [kept])
    for _ in range(7):
        found.run()
        score.add_(0.2)
    assert misses(found).item() == 3  # the first time, and until it was seen to go on
    score.add_(5.0)
    for _ in range(3):
        found.run()
        score.add_(0.2)
    assert misses(found).item() == 4


def test_floors_that_leave_nothing_to_rank_are_not_missed_every_time():
    generator = torch.Generator().manual_seed(0)
    scores = on_device([torch.randn(900, generator=generator), torch.randn(700, generator=generator)])
    kept = on_device([torch.tensor(30), torch.tensor(20)])
    found = cuts.prepare(scores, kept, together=True, floors=(30, 20))
    for _ in range(4):
        found.run()
        counts = [int((score >= threshold).sum()) for score, threshold in zip(scores, found.thresholds)]
        assert counts == [30, 20]
        for score in scores:
            score.add_(1e-5)
    assert misses(found).tolist() == [1]


def test_a_bracket_stays_wide_for_a_threshold_that_wanders():
    """Now and then it is close to where it was; that is no reason to look closely there."""
    generator = torch.Generator().manual_seed(0)
    score, kept = on_device([torch.randn(6000, generator=generator), torch.tensor(2000)])
    found = cuts.prepare([score], [kept])
    for step in 0.015 * torch.randn(60 if ON_GPU else 20, generator=generator):
        found.run()
        score.add_(step)
    assert misses(found).item() <= 3


METHODS = {
    "iterand": ["method.name=iterand", "period=2", "rate=0.5"],
    "no shift left": ["method.name=iterand", "period=2", "network.name=resnet20", "norms=shifted", "sparsity=0.9"],
    "shifted norms": ["method.name=iterand", "period=2", "network.name=resnet20", "norms=shifted", "ranking=global"],
    "iterand, scores follow": [
        "method.name=iterand", "period=1", "rate=0.5", "candidates=negative", "redrawn_scores=follow",
    ],
    "global with floor and schedule": [
        "method.name=iterand", "period=2", "ranking=global", "floor=0.05", "sparsity=0.8",
        "sparsity_schedule=cubic", "epochs=1",
    ],
    "smoothed labels": ["method.name=edge_popup", "label_smoothing=0.3"],
    "hot outputs": ["method.name=edge_popup", "temperature=0.25"],
    "teacher": ["method.name=edge_popup", "teacher=x", "teacher_temperature=2"],
    "magnitude": ["method.name=edge_popup", "rank_by=magnitude", "weight_distribution=signed_constant"],
    "sgd": ["method.name=sgd"],
    "imp": ["method.name=imp", "epochs=8"],
}  # fmt: skip


def trained(settings, device, fused):
    """The tensors of a checkpoint after three steps, or two of a network with many layers."""
    base = ["network.name=digits_conv", "network.width_factor=0.125", "training.batch_size=16"]
    recipe = recipe_file.override(Recipe(name="x"), [*base, *settings])
    session = Session(recipe, build_network(recipe.network.name, width_factor=0.125, classes=10, seed=0), 10, device)
    session.set_learning_rate(0.1)
    teacher = None
    if recipe.training.teacher:
        teacher = Teacher(
            build_network(recipe.network.name, width_factor=0.25, classes=10, seed=1).to(device), Recipe()
        )
    if fused:
        from iterand.lab.training.fused import FusedStep

        step = FusedStep(session, compile=False, graph=False, teacher=teacher)
    else:
        step = EagerStep(session, teacher)
    generator = torch.Generator().manual_seed(1)
    small = recipe.network.name == "digits_conv"
    for size in (16, 16, 7) if small else (16, 7):
        images = torch.randn(size, 1 if small else 3, 8, 8, generator=generator)
        step.train(Batch((images.to(device),), torch.arange(size, device=device) % 10))
        session.advance(size)
    return session.capture().tensors


@pytest.mark.parametrize("settings", METHODS.values(), ids=METHODS)
def test_fused_step_is_the_plain_one(settings):
    plain, fused = trained(settings, CPU, False), trained(settings, DEVICE, True)
    assert set(plain) == {name for name in fused if name != "random.cuda"}
    for name, tensor in plain.items():
        if ON_GPU and tensor.is_floating_point():  # sums inside the network
            torch.testing.assert_close(fused[name].cpu(), tensor, rtol=1e-3, atol=1e-4)
        elif not name.startswith("random"):
            assert torch.equal(fused[name].cpu(), tensor), name


def test_runs_of_one_process_share_a_network_only_if_it_is_the_same():
    from iterand.engine.normalization import FusedNorm
    from iterand.lab.training.fused import _Network

    def network(*settings, compile=False):
        recipe = recipe_file.override(Recipe(name="x"), ["network.name=resnet20", *settings])
        return _Network.of(Session(recipe, build_network("resnet20", classes=10, seed=0), 10, CPU), compile)

    fixed, shifted = network("norms=fixed"), network("norms=shifted")
    assert fixed is network("norms=fixed", "seed=1", "epochs=2", "label_smoothing=0.1", "temperature=0.5")
    assert fixed is not network("norms=fixed", "network.width_factor=0.5")
    assert fixed is not network("norms=fixed", "exclude=['stem.0.normalization']")  # which keeps its parameters
    half = ["precision=bfloat16", "channels_last=true"]
    ours, theirs = network(*half).skeleton, network(*half, compile=True).skeleton
    assert any(isinstance(module, FusedNorm) for module in ours.modules())
    assert not any(isinstance(module, FusedNorm) for module in theirs.modules())  # the compiler's business
    assert not [name for name, _ in fixed.skeleton.named_parameters() if "normalization" in name]
    assert [name for name, _ in shifted.skeleton.named_parameters() if "normalization" in name]


def test_kernels_that_do_not_compile_are_done_without(monkeypatch, caplog):
    backend.triton_problem.cache_clear()
    assert backend.triton_problem(DEVICE) is None

    def broken(operation):
        raise RuntimeError("no C compiler\nand much more")

    backend.triton_problem.cache_clear()
    monkeypatch.setattr(kernels.FindCuts, "run", broken)
    assert backend.triton_problem(DEVICE) == "Triton does not work here"
    assert caplog.messages == ["without Triton's kernels, so slower than it could be: no C compiler"]
    backend.triton_problem.cache_clear()
