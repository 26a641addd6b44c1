"""The engine on a GPU: graphs, compiled networks, no waits, runs side by side."""

import json

import pytest
import torch

from iterand import IterativeRandomization, masked_layers, philox, prune_, randomize_, scores
from iterand.backend import reference
from iterand.lab.data import Batch
from iterand.lab.experiments.library import find_recipe
from iterand.lab.experiments.local import Reporter, Task, do
from iterand.lab.networks import build_network
from iterand.lab.training import recipe_file
from iterand.lab.training.session import Session
from iterand.lab.training.steps import EagerStep, Execution
from kernel_cases import misses

pytestmark = [
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),  # torch.compile's own
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DEVICE = torch.device("cuda")


def session_of(network, settings=()):
    recipe = recipe_file.override(find_recipe(network), ["period=3", *settings])
    session = Session(
        recipe,
        build_network(recipe.network.name, width_factor=recipe.network.width_factor, classes=10, seed=0),
        100,
        DEVICE,
    )
    session.set_learning_rate(0.01 if recipe.method.trains_weights else 0.1)
    return session


def batches(count, size=64):
    generator = torch.Generator(device="cuda").manual_seed(0)
    for _ in range(count):
        images = torch.randn(size, 3, 32, 32, device="cuda", generator=generator)
        yield Batch((images,), torch.randint(0, 10, (size,), device="cuda", generator=generator))


@pytest.fixture
def deterministic():
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("method", ["iterand", "edge_popup", "sgd", "imp"])
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_a_graph_does_what_the_plain_step_does(deterministic, method, precision):
    from iterand.lab.training.fused import FusedStep

    found = []
    for fused in (False, True):
        # In bfloat16 and channels last some convolutions are our own, with sums in another order.
        small = ["width_factor=0.5", "epochs=4", "batch_size=64", "channels_last=false"]
        session = session_of("conv6", [f"method.name={method}", f"precision={precision}", *small])
        step = FusedStep(session, compile=False, graph=True) if fused else EagerStep(session)
        for batch in (*batches(7), *batches(1, size=20)):
            step.train(batch)
            session.advance(len(batch.labels))
        found.append(session.capture().tensors)
        assert int(session.correct) > 0
    for name, tensor in found[0].items():
        if name.startswith("random"):
            continue
        if method in ("iterand", "edge_popup"):
            assert torch.equal(found[1][name], tensor), name
        elif tensor.is_floating_point():  # torch's fused optimizer is used in both, but sums may be in another order
            torch.testing.assert_close(found[1][name], tensor, rtol=1e-4, atol=1e-5)


SETTINGS = {
    "scores stay": [],
    "scores follow": ["rate=1.0", "candidates=negative", "redrawn_scores=follow"],
    "global": ["ranking=global", "sparsity=0.8"],
    "schedule": ["sparsity=0.8", "sparsity_schedule=cubic"],
    "schedule, scores follow": ["sparsity=0.8", "sparsity_schedule=cubic", "redrawn_scores=follow"],
}


@pytest.fixture
def finds(monkeypatch):
    """How often the host had cuts found, one entry each."""
    from iterand.backend.triton.cuts import FindCuts

    found, find = [], FindCuts.run

    def counted(selection):
        found.append(selection)
        find(selection)

    monkeypatch.setattr(FindCuts, "run", counted)
    return found


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "launches"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_graph_finds_cuts_by_itself_and_rounds_are_those_of_the_plain_step(deterministic, finds, settings, graph):
    from iterand.lab.training.fused import FusedStep

    small = ["width_factor=0.5", "epochs=4", "batch_size=64", "channels_last=false", *settings]
    plain, fused = session_of("conv6", small), session_of("conv6", small)
    step = EagerStep(plain)
    for batch in batches(7):
        step.train(batch)
        plain.advance(64)
    finds.clear()
    step = FusedStep(fused, compile=False, graph=graph)
    for batch in batches(7):
        step.train(batch)
        fused.advance(64)
    assert step.way == ("graph" if graph else "fused")
    # Three steps before the capture, one in it, and two rounds; without a graph every step.
    assert len(finds) == (3 + 1 if graph else 7) + 2
    assert next(iter(masked_layers(fused.model).values())).parametrization.rounds == 2
    found = fused.capture().tensors
    for name, tensor in plain.capture().tensors.items():
        assert name.startswith("random") or torch.equal(found[name], tensor), name


PLAIN = ["channels_last=false", "precision=float32"]


def test_between_two_steps_cuts_are_those_of_the_scores(deterministic):
    """Evaluations, a checkpoint that is restored and a round by hand come between the same steps."""
    from iterand.lab.training.fused import FusedStep

    found = []
    for fused in (False, True):
        session = session_of("conv6", ["width_factor=0.5", "batch_size=64", "period=2", *PLAIN])
        step = FusedStep(session, compile=False) if fused else EagerStep(session)
        first, *rest = list(batches(6))
        step.train(first)
        saved = {name: tensor.clone() for name, tensor in session.model.state_dict().items()}
        measured = []
        for batch in rest:
            step.train(batch)
            session.advance(64)
            measured.append(step.evaluate(_Whole(batch)))
        session.model.load_state_dict(saved)
        measured.append(step.evaluate(_Whole(first)))
        randomize_(session.model, 0.5, redrawn_scores="follow")
        measured.append(step.evaluate(_Whole(first)))
        step.train(first)
        found.append((session.capture().tensors, measured))
    (plain, plainly), (tensors, measured) = found
    for name, tensor in plain.items():
        assert name.startswith("random") or torch.equal(tensors[name], tensor), name
    assert [one["accuracy"] for one in measured] == [one["accuracy"] for one in plainly]


RECIPES = {
    "layer": [],
    "scores follow": ["candidates=negative", "redrawn_scores=follow"],
    "global with schedule": ["ranking=global", "sparsity=0.9", "sparsity_schedule=cubic", "epochs=1"],
    "global with floor": ["ranking=global", "sparsity=0.9", "floor=0.02"],
    "norms shifted": ["norms=shifted"],
    "sgd": ["method.name=sgd"],
}


@pytest.mark.parametrize(
    ("settings", "compile"),
    [*((settings, False) for settings in RECIPES.values()), ([], True)],
    ids=[*RECIPES, "layer, compiled"],
)
def test_no_step_waits_for_the_device(settings, compile):
    from iterand.lab.training.fused import FusedStep

    session = session_of("resnet20", ["batch_size=64", *settings])
    step = FusedStep(session, compile=compile)
    given = list(batches(8))
    for batch in given[:5]:
        step.train(batch)
        session.advance(64)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in given[5:]:
            step.train(batch)
            session.advance(64)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert step.way == ("compiled graph" if compile else "graph")
    if settings != ["method.name=sgd"]:
        assert next(iter(masked_layers(session.model).values())).parametrization.rounds == 2


@pytest.mark.parametrize("compile", [False, True])
def test_a_graph_learns_as_the_plain_step(compile):
    from iterand.lab.training.fused import FusedStep

    losses = []
    for fused in (False, True):
        session = session_of("resnet20", ["batch_size=256"])
        step = FusedStep(session, compile=compile) if fused else EagerStep(session)
        (batch,) = batches(1, size=256)
        for _ in range(60):
            step.train(batch)
            session.advance(256)
        losses.append(float(session.loss_sum) / session.seen)
        measured = step.evaluate(_Whole(batch))
        assert 0 <= measured["accuracy"] <= 100
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.parametrize("norms", ["fixed", "shifted"])
@pytest.mark.parametrize("network", ["resnet20", "vgg11"])
def test_statistics_of_norms_are_those_of_the_plain_step(network, norms):
    from iterand.lab.training.fused import FusedStep

    found = []
    for fused in (False, True):
        session = session_of(network, ["batch_size=128", f"norms={norms}", "sparsity=0.5"])
        session.set_learning_rate(0.0)  # else they go apart by rounding, and the networks with them
        step = FusedStep(session, compile=False) if fused else EagerStep(session)
        for batch in batches(4, size=128):
            step.train(batch)
            session.advance(128)
        if fused:
            assert step.way == "graph"
        found.append({name: buffer for name, buffer in session.model.named_buffers() if "normalization." in name})
    plain, ours = found
    assert plain.keys() == ours.keys()
    for name, buffer in plain.items():
        if name.endswith("num_batches_tracked"):
            assert int(ours[name]) == int(buffer) == 4
        elif name.endswith(("running_mean", "running_var")):
            scale = buffer.abs().max()
            torch.testing.assert_close(ours[name] / scale, buffer / scale, rtol=0.03, atol=0.03)


class _Whole:
    """A part of data that is one batch, given in pieces."""

    def __init__(self, batch):
        self.batch = batch

    def __len__(self):
        return len(self.batch.labels)

    def batches(self, order, size, random=None):
        for index in torch.split(order.cuda(), 100):
            yield Batch((self.batch.inputs[0][index],), self.batch.labels[index])


def test_evaluation_is_the_plain_one(deterministic):
    from iterand.lab.training.fused import FusedStep

    session = session_of("conv6", ["precision=float32", "batch_size=256"])
    step = FusedStep(session, compile=False)
    (batch,) = batches(1, size=256)
    step.train(batch)
    fused, plain = step.evaluate(_Whole(batch)), EagerStep(session).evaluate(_Whole(batch))
    assert fused["accuracy"] == plain["accuracy"]
    assert fused["loss"] == pytest.approx(plain["loss"], rel=1e-5)


def test_runs_one_after_another_are_those_done_alone(deterministic, tmp_path):
    """Runs of one process share the network that was made for the first."""
    recipes = [recipe_file.override(find_recipe("digits"), [f"seed={seed}", "epochs=2"]) for seed in range(3)]

    def done(folder, *chosen):
        tasks = [
            Task("run", one, tmp_path / folder / str(one.seed), "cuda", None, Execution(compile=False))
            for one in chosen
        ]
        events = [do(task, Reporter(lambda value: None)) for task in tasks]
        assert {event.kind for event in events} == {"done"}
        return {event.task.recipe.seed: event.value for event in events}

    alone = {seed: record for one in recipes for seed, record in done("alone", one).items()}
    for seed, record in done("again", *reversed(recipes)).items():
        assert record["result"] == alone[seed]["result"], json.dumps([record["result"], alone[seed]["result"]])
        assert record["metrics"] == alone[seed]["metrics"]


@pytest.mark.parametrize("compile", [False, True])
def test_steps_that_take_turns_are_those_done_alone(deterministic, compile):
    """Conv6 has matrices so wide that libraries add up parts of them in scratch memory."""
    from iterand.lab.training.fused import FusedStep

    def trained(turns):
        streams = [torch.cuda.Stream() for _ in turns]
        sessions = [session_of("conv6", [f"seed={seed}"]) for seed in turns]
        steps = [FusedStep(session, compile=compile) for session in sessions]
        given = list(batches(60, size=128))  # kept, so that no memory is used again while a stream reads it
        torch.cuda.synchronize()
        for batch in given:
            for session, step, stream in zip(sessions, steps, streams):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    step.train(batch)
                    session.advance(128)
        torch.cuda.synchronize()
        return [session.capture().tensors for session in sessions]

    alone = [trained([seed])[0] for seed in range(4)]
    for one, other in zip(alone, trained(range(4))):
        for name, tensor in one.items():
            assert name.startswith("random") or torch.equal(tensor, other[name]), name


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch 2.11, of its own doing
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_cut_of_the_users_own_loop_is_one_operation_and_compiles():
    model = prune_(build_network("conv6", classes=10, seed=0).cuda(), 0.5)
    compiled = torch.compile(model)
    images = torch.randn(8, 3, 32, 32, device="cuda")
    torch.testing.assert_close(compiled(images), model(images), rtol=1e-3, atol=1e-3)
    optimizer = torch.optim.SGD(scores(model), lr=0.1)
    randomizer = IterativeRandomization(model, period=1, rate=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        compiled(images).square().mean().backward()
        optimizer.step()
        randomizer.step()
    torch.testing.assert_close(compiled(images), model(images), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("count", [10**6, 10**8])
def test_large_selection(count):
    from iterand.backend.triton import cuts

    score = torch.randn(count, device="cuda")
    kept = torch.tensor(count // 3, device="cuda")
    found = cuts.prepare([score], [kept])
    for _ in range(3):
        found.run()
        threshold, last = found.thresholds[0], found.lasts[0]
        assert int(reference.keeps(score, reference.Cut(threshold, last)).sum()) == count // 3
        score.mul_(0.99999)
    assert misses(found).item() < 3


def test_order_of_data_is_that_of_the_cpu():
    key = philox.key(5, "data order")
    assert torch.equal(philox.permutation(45000, key, 3, "cuda").cpu(), philox.permutation(45000, key, 3))
