"""``make_step`` on a GPU: graphs of any model and optimizer against a plain loop, and what falls back."""

import copy
import gc
import logging
import re
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import iterand

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
BATCHES = 12
TARGETS = torch.arange(64) % 5


class Encoder(nn.Module):
    """Tokens to classes by attention: embeddings, norms and a bare parameter that stays trainable."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.position = nn.Parameter(torch.randn(8, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, tokens):
        return self.head(self.layers(self.words(tokens) + self.position).mean(1))


def convolutional():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(32, 5)
    )


def network(name):
    torch.manual_seed(0)
    model = Encoder() if "encoder" in name else convolutional()
    if "masked" in name:
        ranking = "global" if "global" in name else "layer"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", iterand.UnmaskedWarning)  # the encoder's positions stay trainable
            iterand.prune_(model, 0.5, ranking=ranking, norms="keep")
    return model.cuda()


def inputs(name, number, size=64):
    generator = torch.Generator().manual_seed(number)
    if "encoder" in name:
        return torch.randint(0, 50, (size, 8), generator=generator).cuda()
    return torch.randn(size, 3, 6, 6, generator=generator).cuda()


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.003),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.003, fused=True),
}
LOOPS = {"plain": {}, "accumulated": {"accumulation_steps": 2}, "clipped": {"max_grad_norm": 0.1}}


def trainable(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def prepared(name, optimizer):
    model = network(name)
    optimizer = OPTIMIZERS[optimizer](trainable(model))
    steppers = [iterand.IterativeRandomization(model, period=4, rate=0.5)] if "masked" in name else []
    return model, optimizer, steppers, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def by_hand(name, optimizer, accumulation_steps=1, max_grad_norm=None):
    model, optimizer, steppers, scheduler = prepared(name, optimizer)
    losses = []
    for number in range(BATCHES):
        if number % accumulation_steps == 0:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs(name, number)), TARGETS.cuda())
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


@pytest.fixture(autouse=True)
def _exact():
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = True, False
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["dense", "masked", "masked global", "dense encoder", "masked encoder"])
def test_a_graph_is_the_loop(name, optimizer, loop):
    expected, wanted = by_hand(name, optimizer, **loop)
    model, optimizer, steppers, scheduler = prepared(name, optimizer)
    step = iterand.make_step(model, optimizer, F.cross_entropy, steppers=steppers, **loop)
    losses = []
    for number in range(BATCHES):
        losses.append(step(inputs(name, number), TARGETS.cuda()).item())
        if number % loop.get("accumulation_steps", 1) == loop.get("accumulation_steps", 1) - 1:
            scheduler.step()
    assert step.replays
    torch.testing.assert_close(losses, expected, rtol=2e-3, atol=1e-4)
    for key, tensor in wanted.items():
        if tensor.is_floating_point() and not key.endswith("original"):
            torch.testing.assert_close(model.state_dict()[key], tensor, rtol=2e-2, atol=2e-3)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.WARNING, "iterand")
    return caplog


class Waits(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = convolutional()

    def forward(self, images):
        return self.layers(images) * float(images.abs().mean() > -1)


def test_a_model_that_waits_runs_directly_and_the_log_says_why_once(log):
    model = iterand.prune_(Waits(), 0.5).cuda()
    plain, stream = copy.deepcopy(model), torch.cuda.current_stream()
    optimizer = torch.optim.SGD(iterand.scores(plain), 10.0)
    step = iterand.make_step(model, torch.optim.SGD(iterand.scores(model), 10.0), F.cross_entropy)
    for number in range(8):
        wanted = F.cross_entropy(plain(inputs("dense", number)), TARGETS.cuda())
        torch.testing.assert_close(step(inputs("dense", number), TARGETS.cuda()), wanted, rtol=1e-3, atol=1e-4)
        optimizer.zero_grad()
        wanted.backward()
        optimizer.step()
    assert not step.replays
    assert torch.cuda.current_stream() == stream
    (record,) = log.records
    message = "without a CUDA graph of the step, so slower than it could be: .*stream is capturing.* \\(.*:%d\\)"
    assert re.fullmatch(message % (Waits.forward.__code__.co_firstlineno + 1), record.getMessage())


def test_garbage_does_not_end_a_capture():
    """A graph that is part of a cycle is destroyed by the garbage collector, at any time."""

    class Collects(nn.Sequential):
        def forward(self, images):
            if torch.cuda.is_current_stream_capturing() and gc.isenabled():
                gc.collect()
            return super().forward(images)

    for _ in range(3):
        model = iterand.prune_(Collects(convolutional()), 0.5).cuda()
        step = iterand.make_step(model, torch.optim.SGD(iterand.scores(model), 0.1), F.cross_entropy)
        for number in range(5):
            step(inputs("dense", number), TARGETS.cuda())
        assert step.replays
        step.itself = step


def test_an_optimizer_keeps_no_step_alive():
    model = iterand.prune_(convolutional(), 0.5).cuda()
    optimizer = torch.optim.SGD(iterand.scores(model), 0.1)
    step = weakref.ref(iterand.make_step(model, optimizer, F.cross_entropy))
    gc.collect()
    assert step() is None
    optimizer.load_state_dict(optimizer.state_dict())


def test_an_optimizer_that_counts_on_the_host_runs_directly(log):
    model = iterand.prune_(convolutional(), 0.5).cuda()
    step = iterand.make_step(model, torch.optim.Adagrad(iterand.scores(model), 0.1), F.cross_entropy)
    losses = [step(inputs("dense", 0), TARGETS.cuda()).item() for _ in range(6)]
    assert len(set(losses)) == 6
    assert [record.getMessage().rpartition(": ")[2] for record in log.records] == [
        "Adagrad has no option capturable"
    ]  # fmt: skip


def test_sizes_of_batches_take_turns_and_a_rare_one_is_not_captured():
    model = iterand.prune_(convolutional(), 0.5).cuda()
    step = iterand.make_step(model, torch.optim.SGD(iterand.scores(model), 0.1), F.cross_entropy)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(iterand.scores(plain), 0.1)
    for number, size in enumerate([64] * 5 + [10] + [64] * 2 + [32] * 5 + [64] * 2):
        loss = step(inputs("dense", number, size), TARGETS[:size].cuda())
        optimizer.zero_grad()
        wanted = F.cross_entropy(plain(inputs("dense", number, size)), TARGETS[:size].cuda())
        wanted.backward()
        optimizer.step()
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-3, atol=1e-4)
    assert len(step._graphs._graphs) == 2


def test_many_shapes_take_no_more_memory():
    """Graphs that are dropped release what they read, and gradients are nobody's after a step."""
    model = iterand.prune_(nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 5)), 0.5).cuda()
    step = iterand.make_step(model, torch.optim.SGD(iterand.scores(model), 0.1, momentum=0.9), F.cross_entropy)
    allocated = []
    for size in range(2, 26):
        for _ in range(5):
            step(torch.ones(size, 1024, device="cuda"), TARGETS[:size].cuda())
        allocated.append(torch.cuda.memory_allocated())
    assert len(step._graphs._graphs) == 8
    one_gradient = 4 * 1024 * 2048
    assert allocated[-1] - allocated[8] < one_gradient


def test_settings_that_change_are_used():
    """The learning rate without a new graph; momentum with one."""
    model = iterand.prune_(convolutional(), 0.5).cuda()
    optimizer = torch.optim.SGD(iterand.scores(model), 0.1, momentum=0.9)
    step = iterand.make_step(model, optimizer, F.cross_entropy)
    for number in range(5):
        step(inputs("dense", number), TARGETS.cuda())
    graph = next(iter(step._graphs._graphs.values()))
    optimizer.param_groups[0]["lr"] = 0.0
    before = [score.clone() for score in iterand.scores(model)]
    step(inputs("dense", 7), TARGETS.cuda())
    assert all(torch.equal(score, old) for score, old in zip(iterand.scores(model), before))
    assert next(iter(step._graphs._graphs.values())) is graph
    assert optimizer.param_groups[0]["lr"] == 0.0
    optimizer.param_groups[0].update(lr=0.1, momentum=0.0)
    buffers = [optimizer.state[score]["momentum_buffer"].clone() for score in iterand.scores(model)]
    step(inputs("dense", 8), TARGETS.cuda())
    assert not any(torch.equal(score, old) for score, old in zip(iterand.scores(model), before))
    after = [optimizer.state[score]["momentum_buffer"] for score in iterand.scores(model)]
    assert all(torch.equal(one, old) for one, old in zip(after, buffers))


@pytest.mark.parametrize("name", ["dense", "masked"])
def test_a_state_that_is_loaded_and_a_model_that_moves_are_seen(name):
    model = network(name)
    optimizer = torch.optim.SGD(trainable(model), 0.1, momentum=0.9)
    step = iterand.make_step(model, optimizer, F.cross_entropy)
    for number in range(5):
        step(inputs("dense", number), TARGETS.cuda())
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    first = [step(inputs("dense", number), TARGETS.cuda()).item() for number in range(5, 9)]
    for move in (lambda: None, lambda: model.cpu().cuda(), lambda: model.to(memory_format=torch.channels_last)):
        move()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))  # torch's optimizers continue with the tensors they load
        again = [step(inputs("dense", number), TARGETS.cuda()).item() for number in range(5, 9)]
        torch.testing.assert_close(again, first, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("ranking", ["layer", "global"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_plain_pass_masks_all_layers_at_once(ranking, layout, monkeypatch):
    from iterand.backend.triton.masks import ApplyMasks

    runs, run = [], ApplyMasks.run
    monkeypatch.setattr(ApplyMasks, "run", lambda self, masked: runs.append(1) or run(self, masked))
    model = iterand.prune_(convolutional(), 0.5, ranking=ranking)
    on_gpu = copy.deepcopy(model).cuda().to(memory_format=layout)
    images = inputs("dense", 0)
    outputs = on_gpu(images)
    assert len(runs) == 1
    torch.testing.assert_close(outputs.cpu(), model(images.cpu()), rtol=1e-4, atol=1e-5)
    outputs.sum().backward()
    model(images.cpu()).sum().backward()
    for score, other in zip(iterand.scores(on_gpu), iterand.scores(model)):
        torch.testing.assert_close(score.grad.cpu(), other.grad, rtol=1e-3, atol=1e-4)
    twice = on_gpu(images) + on_gpu(images.flip(0))  # two passes before one backward pass
    twice.sum().backward()
