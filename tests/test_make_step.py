"""``make_step`` against the loop that a user writes: on a CPU bit for bit, with the kernels of a GPU too."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import iterand
from iterand import randomization, selection
from iterand.engine import graph, parameters, step
from kernel_cases import shrink

BATCHES = 7
TARGETS = torch.arange(12) % 5


def images(number, size=12):
    return torch.randn(size, 3, 6, 6, generator=torch.Generator().manual_seed(number))


def network(**options):
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(16, 5)
    )
    return iterand.prune_(layers, 0.5, **options) if options else layers


MODELS = {
    "dense": {},
    "layer": {"seed": 1},
    "global": {"ranking": "global", "weights": "signed_constant"},
    "magnitude": {"rank_by": "magnitude", "norms": "keep"},
    "own and global": {"ranking": "global", "overrides": {"0": 0.2}},
    "existing": {"weights": "existing", "trainable": "5"},
}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "sgd without momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
}
LOOPS = {"plain": {}, "accumulated": {"accumulation_steps": 3}, "clipped": {"max_grad_norm": 0.05}}


def smoothed(outputs, targets):
    return F.cross_entropy(outputs, targets, label_smoothing=0.1)


def trainable(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def prepared(options, optimizer):
    model = network(**options)
    existing = options.get("weights") == "existing"
    optimizer = OPTIMIZERS[optimizer](trainable(model))
    steppers = [iterand.IterativeRandomization(model, period=2, rate=0.5)] if options and not existing else []
    steppers += [iterand.SparsitySchedule(model, "linear", steps=5)] if existing else []
    return model, optimizer, steppers, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def by_hand(options, optimizer, accumulation_steps=1, max_grad_norm=None):
    """The loop as a user writes it."""
    model, optimizer, steppers, scheduler = prepared(options, optimizer)
    losses = []
    for number in range(BATCHES):
        if number % accumulation_steps == 0:
            optimizer.zero_grad()
        loss = smoothed(model(images(number)), TARGETS)
        losses.append(loss.item())
        (loss / accumulation_steps).backward()
        if number % accumulation_steps == accumulation_steps - 1:
            if max_grad_norm:
                nn.utils.clip_grad_norm_(trainable(model), max_grad_norm)
            optimizer.step()
            for stepper in steppers:
                stepper.step()
            scheduler.step()
    return losses, model.state_dict()


def by_step(options, optimizer, accumulation_steps=1, max_grad_norm=None):
    model, optimizer, steppers, scheduler = prepared(options, optimizer)
    train = iterand.make_step(
        model,
        optimizer,
        smoothed,
        steppers=steppers,
        accumulation_steps=accumulation_steps,
        max_grad_norm=max_grad_norm,
    )
    losses = []
    for number in range(BATCHES):
        losses.append(train(images(number), TARGETS).item())
        if number % accumulation_steps == accumulation_steps - 1:
            scheduler.step()
    return losses, model.state_dict()


PAIRS = [  # each two of a model, an optimizer and a loop meet
    (model, optimizer, list(LOOPS)[(row + column) % len(LOOPS)])
    for row, model in enumerate(MODELS)
    for column, optimizer in enumerate(OPTIMIZERS)
]


@pytest.mark.parametrize(("model", "optimizer", "loop"), PAIRS)
def test_on_a_cpu_it_is_the_loop_bit_for_bit(model, optimizer, loop):
    options, loop = MODELS[model], LOOPS[loop]
    (losses, state), (expected, wanted) = by_step(options, optimizer, **loop), by_hand(options, optimizer, **loop)
    assert losses == expected
    assert len(set(losses)) == BATCHES
    for name, tensor in wanted.items():
        assert torch.equal(state[name], tensor), name


@pytest.fixture
def kernels(monkeypatch):
    """The step of a GPU, its kernels interpreted; nothing is captured without a GPU."""
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    if torch.cuda.is_available():
        pytest.skip("on a GPU tests/test_engine_cuda.py runs the same kernels")
    shrink(monkeypatch)
    monkeypatch.setattr(step, "_has_kernels", lambda device: True)
    for module in (parameters, randomization, selection):
        monkeypatch.setattr(module.backend, "uses_triton", lambda scores, weights=(), draws=(): bool(weights))


KERNEL_CASES = [
    ("layer", "sgd", "plain"),
    ("global", "sgd without momentum", "plain"),
    ("magnitude", "sgd", "plain"),
    ("own and global", "sgd", "accumulated"),
    ("layer", "nesterov", "clipped"),
    ("magnitude", "adagrad", "accumulated"),
    ("dense", "sgd", "clipped"),
    ("existing", "sgd", "plain"),
    ("existing", "adagrad", "clipped"),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities that a GPU computes with as well
@pytest.mark.parametrize(("options", "optimizer", "loop"), KERNEL_CASES)
def test_with_kernels_it_is_the_loop(kernels, monkeypatch, options, optimizer, loop):
    losses, state = by_step(MODELS[options], optimizer, **LOOPS[loop])
    monkeypatch.undo()
    expected, wanted = by_hand(MODELS[options], optimizer, **LOOPS[loop])
    exact = optimizer == "sgd" and loop == "plain" and options == "layer"  # torch's fused SGD rounds differently
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    for name, tensor in wanted.items():
        torch.testing.assert_close(
            state[name], tensor, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
        if exact or name.endswith("draw"):
            assert torch.equal(state[name], tensor), name


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_with_kernels_a_plain_pass_masks_all_layers_at_once(kernels, monkeypatch):
    from iterand.backend.triton.masks import ApplyMasks

    runs, run = [], ApplyMasks.run
    monkeypatch.setattr(ApplyMasks, "run", lambda self, masked: runs.append(1) or run(self, masked))
    found = []
    for _ in range(2):
        model = network(**MODELS["global"])
        outputs = model(images(0)) + model(images(1))  # two passes before one backward pass
        outputs.square().sum().backward()
        found.append([outputs.detach(), *(score.grad for score in iterand.scores(model))])
        monkeypatch.undo()
    assert len(runs) == 2
    assert all(torch.equal(ours, plain) for ours, plain in zip(*found))


def test_inputs_of_several_tensors():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))

        def forward(self, first, second):
            return {"loss": (self.layers(first) - second).square().mean()}

    torch.manual_seed(0)
    first, second = torch.randn(5, 4), torch.randn(5, 3)
    results = []
    for inputs in ((first, second), [first, second], {"first": first, "second": second}):
        model = iterand.prune_(Two(), 0.5)
        train = iterand.make_step(
            model, torch.optim.SGD(iterand.scores(model), 1.0), lambda outputs: outputs["loss"]
        )  # fmt: skip
        results.append([train(inputs).item() for _ in range(3)])
    assert results[0] == results[1] == results[2]
    assert len(set(results[0])) == 3


def test_precision_is_that_of_autocast():
    losses = {}
    for precision in (None, torch.float32, torch.bfloat16):
        model, optimizer, *_ = prepared({"seed": 1}, "sgd")
        losses[precision] = iterand.make_step(model, optimizer, smoothed, precision=precision)(images(0), TARGETS)
    model = network(seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(losses[torch.bfloat16], smoothed(model(images(0)), TARGETS).detach())
    assert torch.equal(losses[None], losses[torch.float32])
    assert not torch.equal(losses[None], losses[torch.bfloat16].float())


def test_a_loss_that_fails_ends_the_accumulation():
    model, optimizer, *_ = prepared({"seed": 1}, "sgd")
    fails = iter([False, True, False, False])

    def loss(outputs, targets):
        if next(fails):
            raise RuntimeError("no")
        return smoothed(outputs, targets)

    train = iterand.make_step(model, optimizer, loss, accumulation_steps=2)
    before = [score.clone() for score in iterand.scores(model)]
    train(images(0), TARGETS)
    with pytest.raises(RuntimeError, match="no"):
        train(images(1), TARGETS)
    train(images(2), TARGETS)
    assert all(torch.equal(score, old) for score, old in zip(iterand.scores(model), before))
    train(images(3), TARGETS)
    assert not any(torch.equal(score, old) for score, old in zip(iterand.scores(model), before))


def step_of(loss=smoothed, optimizer=None, options=None, **arguments):
    model = network(**({"seed": 1} if options is None else options))
    optimizer = torch.optim.SGD(trainable(model), 0.1) if optimizer is None else optimizer(model)
    return iterand.make_step(model, optimizer, loss, **arguments)


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (lambda outputs, targets: outputs, r"loss_fn returned a tensor of shape \(12, 5\); it must return a scalar"),
        (lambda outputs, targets: 1.0, "loss_fn returned a float; it must return a scalar tensor"),
        (lambda outputs, targets: torch.ones(()), "the loss does not depend on a parameter that takes gradients"),
    ],
)
def test_losses_that_are_refused(loss, sentence):
    with pytest.raises(ValueError, match=sentence):
        step_of(loss)(images(0), TARGETS)


def before_pruning(model):
    return torch.optim.SGD(network().parameters(), 0.1)


def only_some(model):
    return torch.optim.SGD(iterand.scores(model)[:-1], 0.1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"optimizer": before_pruning},
            "8 of the 8 tensors of the optimizer are no parameters of the model; make it over iterand",
        ),
        (
            {"optimizer": before_pruning, "options": {}},
            "8 of the 8 .* no parameters of the model; make it over model.parameters",
        ),
        (
            {"optimizer": only_some},
            r"the optimizer does not train the scores of '5.weight'; make it over iterand.scores\(model\)",
        ),
        (
            {"optimizer": lambda model: torch.optim.SGD([{"params": []}], 0.1)},
            r"the optimizer has no parameters; make it over iterand.scores\(model\)",
        ),
        ({"loss": None}, "loss_fn is None; it must be a function of the outputs and the targets"),
        ({"precision": torch.float16}, "precision is torch.float16; it must be torch.bfloat16"),
        ({"loss": nn.CrossEntropyLoss}, "loss_fn is <class .*; it must be a function of the outputs"),
        ({"accumulation_steps": 0}, "accumulation_steps is 0; it is a number of batches, at least 1"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0; it must be a number greater than 0, or None"),
        ({"max_grad_norm": "1"}, "max_grad_norm is '1'; it must be a number greater than 0, or None"),
        ({"steppers": None}, "steppers is None; it must be a list of objects with a method step"),
        (
            {"steppers": [iterand.IterativeRandomization(iterand.prune_(nn.Linear(4, 4), 0.5))]},
            "the IterativeRandomization in steppers is of another model; make it for the model that is trained",
        ),
        ({"steppers": ["a"]}, r"steppers is \['a'\]; it must be a list of objects with a method step"),
        ({"steppers": [iterand.IterativeRandomization]}, r"steppers is \[<class .*; it must be a list of objects"),
        ({"optimizer": lambda model: None}, "optimizer is None; it must be an optimizer of torch.optim over the model"),
        (
            {"optimizer": lambda model: torch.optim.LBFGS(iterand.scores(model))},
            "LBFGS evaluates the loss several times",
        ),
    ],
)
def test_arguments_that_are_refused(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        step_of(**arguments)


def test_a_batch_of_another_structure_is_refused():
    train = step_of(lambda outputs, targets: smoothed(outputs, targets["labels"]))
    train(images(0), {"labels": TARGETS})
    first = "but the first was one tensor with a dict of labels as targets; give all batches one structure"
    with pytest.raises(ValueError, match=f"the batch is one tensor with one tensor as targets, {first}"):
        train(images(0), TARGETS)
    with pytest.raises(ValueError, match=f"the batch is a tuple of 1 with nothing as targets, {first}"):
        train((images(0),))
    with pytest.raises(ValueError, match="the batch is on meta, the model on cpu; move it there first"):
        train(images(0).to("meta"), {"labels": TARGETS.to("meta")})
    with pytest.raises(ValueError, match="the batch is on meta, the model on cpu; move it there first"):
        train(images(0), {"labels": TARGETS.to("meta")})


def test_a_first_batch_that_fails_fixes_no_structure():
    train = step_of()
    with pytest.raises(TypeError):
        train((images(0), TARGETS))
    train(images(0), TARGETS)


def test_keywords_have_no_order():
    class Keywords(nn.Linear):
        def forward(self, *, a, b):
            return super().forward(a - b)

    model = Keywords(4, 3)
    train = iterand.make_step(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy)
    a, b, targets = torch.randn(2, 4), torch.randn(2, 4), torch.tensor([0, 2])
    expected = F.cross_entropy(model(a=a, b=b), targets)
    assert torch.equal(train({"a": a, "b": b}, targets), expected.detach())
    expected = F.cross_entropy(model(a=a, b=b), targets)
    assert torch.equal(train({"b": b, "a": a}, targets), expected.detach())


@pytest.mark.parametrize("change", [lambda model: iterand.fold_(model), lambda model: iterand.prune_(model, 0.5)])
def test_a_model_that_is_pruned_or_folded_later_is_noticed(change):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    if change.__code__.co_names[-1] == "fold_":
        iterand.prune_(model, 0.5)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], 0.1)
    train = iterand.make_step(model, optimizer, F.cross_entropy)
    train(torch.randn(2, 4), torch.tensor([0, 2]))
    change(model)
    with pytest.raises(ValueError, match=r"tensors of the optimizer are no parameters of the model; make it over"):
        train(torch.randn(2, 4), torch.tensor([0, 2]))


def test_parameters_that_the_optimizer_gets_later_are_clipped():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
    train = iterand.make_step(model, optimizer, F.cross_entropy, max_grad_norm=1e-3)
    train(torch.randn(2, 4), torch.tensor([0, 2]))
    optimizer.add_param_group({"params": model[2].parameters()})
    train(torch.randn(2, 4), torch.tensor([0, 2]))
    assert nn.utils.get_total_norm([one.grad for one in model.parameters()]) < 1.01e-3


def test_another_size_of_batch_is_not_another_structure():
    train = step_of()
    train(images(0), TARGETS)
    train(images(0, 3), TARGETS[:3])


class FakeGraph:
    """Stands in for a CUDA graph: replays by doing the work again."""

    captured = []  # noqa: RUF012

    def __init__(self, work, batch, pool, read):
        self._work = work
        self.captured.append(tuple(batch[0].shape))

    def replay(self, batch):
        return -self._work(batch)


class NoGraph(FakeGraph):
    def __init__(self, work, batch, pool, read):
        super().__init__(work, batch, pool, read)
        raise graph.CannotCapture("the model waits for the device\nand more")


@pytest.fixture
def cache(monkeypatch):
    def make(kind=FakeGraph):
        monkeypatch.setattr(graph, "CapturedGraph", kind)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        monkeypatch.setattr(FakeGraph, "captured", [])
        return graph.GraphCache("of the step", torch.device("cuda"))

    return make


def done(cache, sizes, variant="x"):
    """One letter for each size: d for directly, r for a replay."""
    return "".join("r" if cache.run(variant, lambda batch: batch[0].sum(), [torch.ones(n)]) < 0 else "d" for n in sizes)


def test_a_shape_is_captured_when_it_has_come_three_times_in_a_row(cache):
    graphs = cache()
    assert done(graphs, [4, 4, 4, 4, 4]) == "dddrr"
    assert done(graphs, [2, 4, 2, 4, 2, 4]) == "drdrdr"  # the last batch of an epoch
    assert done(graphs, [2, 2, 2, 2, 4]) == "dddrr"
    assert FakeGraph.captured == [(4,), (2,)]
    graphs.clear()
    assert done(graphs, [4, 4, 4, 4]) == "dddr"


def test_variants_that_take_turns_are_captured_each(cache):
    graphs = cache()
    assert [done(graphs, [4], variant) for variant in "abababab"] == [*"dddddd", *"rr"]


def test_few_shapes_are_kept(cache):
    graphs = cache()
    for size in range(1, 12):
        assert done(graphs, [size] * 4) == "dddr"
    assert done(graphs, [11, 4, 3]) == "rrd"


def test_what_cannot_be_captured_runs_directly_and_is_said_once(cache, caplog):
    graphs = cache(NoGraph)
    assert done(graphs, [4] * 8 + [2] * 8) == "d" * 16
    assert FakeGraph.captured == [(4,)]
    assert [record.getMessage() for record in caplog.records] == [
        "without a CUDA graph of the step, so slower than it could be: the model waits for the device"
    ]
