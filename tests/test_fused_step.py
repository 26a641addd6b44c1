"""The trainer's step with kernels does what the plain step does, whatever happens to the scores between two steps."""

from dataclasses import replace

import pytest
import torch

from iterand import masked_layers, randomization, randomize_, scores
from iterand.engine import step as engine
from iterand.lab.data import Batch
from iterand.lab.networks import build_network
from iterand.lab.training import recipe_file
from iterand.lab.training.recipe import Recipe
from iterand.lab.training.session import Session
from iterand.lab.training.steps import EagerStep
from iterand.sparsity import set_sparsity_
from kernel_cases import shrink

pytest.importorskip("triton", reason="the kernels are written in Triton")
from iterand.backend.triton import cuts as kernels

pytestmark = [
    # The interpreter computes with NumPy, which warns of infinities that a GPU computes with as well.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/test_engine_cuda.py asks the same of graphs"),
]
CPU = torch.device("cpu")
STEPS = 4


@pytest.fixture
def finds(monkeypatch):
    """How often cuts were found, one entry each; randomization goes through the kernels, as on a GPU."""
    shrink(monkeypatch)
    monkeypatch.setattr(engine, "_has_kernels", lambda device: True)
    monkeypatch.setattr(randomization.backend, "uses_triton", lambda scores, weights=(), draws=(): bool(weights))
    found, find = [], kernels.FindCuts.run

    def counted(selection):
        found.append(selection)
        find(selection)

    monkeypatch.setattr(kernels.FindCuts, "run", counted)
    return found


def session_of(*settings, external=False):
    base = ["network.name=digits_conv", "training.batch_size=16", "method.name=iterand", "rate=0.5", "epochs=1"]
    recipe = recipe_file.override(Recipe(name="x"), [*base, *settings])
    if external:
        recipe = replace(recipe, network=replace(recipe.network, name="nets.py:build"))
    session = Session(recipe, build_network("digits_conv", width_factor=0.125, classes=10, seed=0), 2 * STEPS, CPU)
    session.set_learning_rate(0.1)
    return session


def fused(session):
    from iterand.lab.training.fused import FusedStep

    return FusedStep(session, compile=False, graph=False)


BATCH = Batch((torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(1)),), torch.arange(16) % 10)


class _Whole:
    """A part of data that is one batch."""

    def __len__(self):
        return len(BATCH.labels)

    def batches(self, order, size, random=None):
        yield BATCH


def trained(session, step):
    for _ in range(STEPS):
        step.train(BATCH)
        session.advance(len(BATCH.labels))
    return session.capture().tensors


CASES = {
    "scores stay": [],
    "scores follow": ["candidates=negative", "redrawn_scores=follow"],
    "global": ["ranking=global", "sparsity=0.8"],
    "schedule": ["sparsity=0.8", "sparsity_schedule=cubic"],
}


def test_a_network_of_the_users_has_the_same_step(finds, monkeypatch):
    session = session_of("period=2", external=True)
    step = fused(session)
    found, measured = trained(session, step), step.evaluate(_Whole())
    assert len(finds) == STEPS + STEPS // 2 + 1
    monkeypatch.undo()
    session = session_of("period=2", external=True)
    step = EagerStep(session)
    for name, tensor in trained(session, step).items():
        assert torch.equal(found[name], tensor), name
    assert measured == step.evaluate(_Whole())


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_a_step_finds_its_cuts_once_and_is_the_plain_step(finds, monkeypatch, settings):
    session = session_of("period=2", *settings)
    found = trained(session, fused(session))
    assert len(finds) == STEPS + STEPS // 2  # one a step, and one for each randomization
    assert next(iter(masked_layers(session.model).values())).parametrization.rounds == STEPS // 2
    monkeypatch.undo()
    session = session_of("period=2", *settings)
    for name, tensor in trained(session, EagerStep(session)).items():
        assert torch.equal(found[name], tensor), name


KINDS = {
    "bernoulli": ["mask=bernoulli", "norms=keep"],
    "signed": ["mask=signed", "sparsity_schedule=cubic"],
    "multicoat": ["mask=multicoat", "coats=2", "sparsity_schedule=cubic"],
    "binarized": ["binarize=true", "rank_by=magnitude", "weight_distribution=kaiming_normal"],
    "gem_miner": ["mask=gem_miner", "score_distribution=unit_uniform", "ranking=global", "floor=0.1"],
}


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_every_kind_of_mask_has_the_same_step(finds, monkeypatch, settings):
    session = session_of("period=2", *settings)
    step = fused(session)
    found, measured = trained(session, step), step.evaluate(_Whole())
    assert {id(layer.score) for layer in step._step._masked.layers} == {id(one) for one in scores(session.model)}
    monkeypatch.undo()
    session = session_of("period=2", *settings)
    step = EagerStep(session)
    for name, tensor in trained(session, step).items():  # torch's fused SGD rounds in another order
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)
    assert measured == pytest.approx(step.evaluate(_Whole()), rel=1e-5)


def _nothing(session, step):
    """Nothing comes between two steps."""


def _evaluate(session, step):
    step.evaluate(_Whole())


def _redraw(session, step):
    session.steppers[0].randomize()


def _add(session, step):
    with torch.no_grad():
        for layer in masked_layers(session.model).values():
            layer.score.add_(0.1)


def _restore(session, step):
    session.model.load_state_dict(session.model.state_dict())


def _prune_less(session, step):
    set_sparsity_(session.model, 0.1)


def _turn_scores(session, step):
    randomize_(session.model, 1.0, redrawn_scores="follow")


def _write_past_torch(session, step):
    """Where torch's version counters see nothing."""
    for layer in masked_layers(session.model).values():
        layer.score.data.neg_()


def _fail(session, step):
    count, session.count = session.count, None
    with pytest.raises(TypeError):
        step.train(BATCH)
    session.count = count


CHANGES = [_nothing, _evaluate, _redraw, _add, _restore, _prune_less, _turn_scores, _write_past_torch, _fail]


@pytest.mark.parametrize("change", CHANGES)
def test_no_cut_is_stale(finds, monkeypatch, change):
    session = session_of("period=100")
    step = fused(session)
    step.train(BATCH)
    change(session, step)
    measured = step.evaluate(_Whole())
    monkeypatch.undo()
    assert measured == EagerStep(session).evaluate(_Whole())


def test_randomization_by_hand_finds_its_cuts_whatever_is_known(finds):
    """A score may have been written where torch does not count."""
    session = session_of("period=100")
    fused(session).train(BATCH)
    for layer in masked_layers(session.model).values():
        layer.score.data.neg_()
    before = len(finds)
    for number in (1, 2):
        randomize_(session.model, 0.5)
        assert len(finds) == before + number
    layer = next(iter(masked_layers(session.model).values()))
    assert not layer.draw[layer.mask].any()  # only what the scores as they are prune


def test_torch_hears_of_what_is_redrawn(finds):
    session = session_of()
    layer = next(iter(masked_layers(session.model).values()))
    tensors = (layer.weight, layer.draw, layer.score)
    before = [tensor._version for tensor in tensors]
    randomize_(session.model, 1.0)
    after = [tensor._version for tensor in tensors]
    assert after[0] > before[0]
    assert after[1] > before[1]
    assert after[2] == before[2]
