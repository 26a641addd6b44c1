"""TaskSet: many tickets on one model, exact round trips, a task per row."""

import copy
import pickle
import re
import threading

import pytest
import torch
from torch import nn

import iterand
from iterand.errors import TicketError
from iterand.ticket import read, save
from iterand.ticket import tasks as module
from test_existing import bits

TASKS = 10
INPUTS = torch.randn(6, 5, 16, generator=torch.Generator().manual_seed(0))


class Encoder(nn.Module):
    """Embedded vectors through two residual blocks; a norm, and a head on the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16)) for _ in range(2))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 3)

    def forward(self, inputs):
        for layer in self.layers:
            inputs = inputs + layer(inputs)
        return self.head(self.norm(inputs).mean(1))


def build():
    torch.manual_seed(0)
    return Encoder()


def ticket(number, sparsity=0.2, make=build, **options):
    model = iterand.prune_(make(), sparsity, weights="existing", **{"trainable": ["head", "norm"], **options})
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for score in iterand.scores(model):
            score.add_(0.05 * torch.randn(score.shape, generator=generator))
        for parameter in (one for name, one in model.named_parameters() if one.requires_grad and "score" not in name):
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    return save.ticket_bytes(model)


@pytest.fixture(scope="module")
def tickets():
    return [ticket(number) for number in range(TASKS)]


@pytest.fixture(scope="module")
def plains(tickets):
    return [iterand.ticket.load.load(read.parse(data), build()).eval() for data in tickets]


@pytest.fixture
def tasks(tickets):
    found = iterand.TaskSet(build().eval(), cached=3)
    for number, data in enumerate(tickets):
        found.add(str(number), read.parse(data))
    return found


def same(model, other):
    ours, theirs = model.state_dict(), other.state_dict()
    return all(torch.equal(bits(ours[name]), bits(theirs[name])) for name in theirs)


def test_a_task_is_what_load_ticket_gives(tasks, plains):
    for number, plain in enumerate(plains):
        assert tasks.activate(str(number)) is tasks.model
        assert tasks.active == str(number)
        assert same(tasks.model, plain)
        assert torch.equal(tasks.model(INPUTS), plain(INPUTS))


@pytest.mark.parametrize("cached", [1, 3, 10])
def test_the_base_is_unchanged_after_a_thousand_switches(tickets, plains, cached):
    base = build()
    memory = [tensor.data_ptr() for tensor in base.state_dict().values()]
    tasks = iterand.TaskSet(base, cached=cached)
    for number, data in enumerate(tickets):
        tasks.add(str(number), read.parse(data))
    order = torch.randint(TASKS, (1000,), generator=torch.Generator().manual_seed(1)).tolist()
    for step, number in enumerate(order):
        tasks.activate(str(number))
        if step % 100 == 0:
            assert same(base, plains[number])
    tasks.deactivate()
    assert tasks.active is None
    assert same(base, build())
    assert [tensor.data_ptr() for tensor in base.state_dict().values()] == memory


@pytest.mark.parametrize("through_base", [False, True])
def test_weights_written_while_a_task_is_active_are_not_kept(tickets, plains, through_base):
    tasks = iterand.TaskSet(build())
    for number in (0, 1):
        tasks.add(str(number), read.parse(tickets[number]))
    tasks.activate("0").load_state_dict(build().state_dict())
    if through_base:
        tasks.deactivate()
    tasks.activate("1")
    assert torch.equal(tasks.activate("0")(INPUTS), plains[0](INPUTS))
    with torch.no_grad():
        tasks.model.layers[0][0].weight.zero_()
    assert torch.equal(tasks.activate("0")(INPUTS), plains[0](INPUTS))


def test_what_a_task_holds_does_not_grow_with_the_base(tasks):
    base = sum(tensor.nbytes for tensor in build().state_dict().values())
    tasks.activate("0")
    packed, own = tasks._tasks["0"].parts()
    assert sum(bits.nbytes for bits in packed.values()) == sum(-(-16 * 24 // 8) for _ in range(4))
    assert set(own) == {"head.weight", "head.bias", "norm.weight", "norm.bias"}
    assert sum(tensor.nbytes for tensor in (*packed.values(), *own.values())) < base / 10
    for number in range(TASKS):
        tasks.activate(str(number))
    assert len(tasks._masked) == 3


def test_as_many_are_cached_as_fit_into_memory(tickets, plains, monkeypatch):
    masked = 4 * 16 * 24 * 4  # bytes: four layers of float32
    monkeypatch.setattr(module, "_CACHE_BYTES", 2 * masked + 1)
    tasks = iterand.TaskSet(build())
    for number in (0, 1, 2):
        tasks.add(str(number), read.parse(tickets[number]))
        tasks.activate(str(number))
    assert list(tasks._masked) == ["1", "2"]
    monkeypatch.setattr(module, "_CACHE_BYTES", 1)
    assert same(tasks.activate("0"), plains[0])
    assert list(tasks._masked) == ["0"]


def test_files_and_names(tasks, tickets, tmp_path):
    (tmp_path / "a.ticket").write_bytes(tickets[0])
    tasks.add("file", tmp_path / "a.ticket")
    assert len(tasks) == TASKS + 1
    assert "file" in tasks
    assert list(tasks)[-1] == "file"
    tasks.activate("file")
    tasks.remove("file")
    assert tasks.active is None
    assert same(tasks.model, build())
    assert "file" not in tasks


def test_what_is_refused(tasks, tickets, tmp_path):
    with pytest.raises(ValueError, match="unknown task '10'; did you mean '1'"):
        tasks.activate("10")
    with pytest.raises(ValueError, match=r"unknown task 'x'; there are 0, 1, 2, 3, 4, 5, 6, 7, 8, 9$"):
        tasks.activate("x")
    with pytest.raises(ValueError, match=re.escape("unknown task ['0']; there are 0, 1")):
        tasks.activate(["0"])
    with pytest.raises(ValueError, match="there is no task 'a'; add it first"):
        iterand.TaskSet(build()).activate("a")
    with pytest.raises(ValueError, match="name is '0'; it must be a printable text that no other task has"):
        tasks.add("0", read.parse(tickets[0]))
    with pytest.raises(ValueError, match="it must be a printable text"):
        tasks.add("a\nb", read.parse(tickets[0]))
    with pytest.raises(ValueError, match="ticket is a bytes; it must be a path, or what read_ticket gives"):
        tasks.add("a", tickets[0])
    (tmp_path / "random.ticket").write_bytes(save.ticket_bytes(iterand.prune_(build(), 0.2)))
    with pytest.raises(TicketError, match=r"random\.ticket': it holds all its weights itself, so it is no task"):
        tasks.add("random", tmp_path / "random.ticket")
    with pytest.raises(ValueError, match="the base is masked"):
        iterand.TaskSet(iterand.prune_(build(), 0.2))
    with pytest.raises(ValueError, match="cached is 0; it is a number of tasks, at least 1"):
        iterand.TaskSet(build(), cached=0)
    with pytest.raises(ValueError, match="base is 3; it must be a torch"):
        iterand.TaskSet(3)


def test_a_ticket_on_another_base_is_refused_while_a_task_is_active(tasks, tickets):
    def other():
        model = build()
        with torch.no_grad():
            model.layers[1][0].weight[0, 0] += 1
        return model

    tasks.activate("3")
    with pytest.raises(TicketError, match=r"'layers\.1\.0\.weight' of the model differs from the base 'Encoder'"):
        tasks.add("other", read.parse(ticket(0, make=other)))
    tasks.add("again", read.parse(tickets[0]))
    assert tasks.active == "3"


def test_a_base_that_changes_is_noticed(tasks, tickets, plains):
    tasks.activate("1")
    tasks.deactivate()
    with torch.no_grad():
        tasks.model.head.bias.add_(1)  # every task has one of its own
        assert same(tasks.activate("1"), plains[1])
        tasks.deactivate()
        tasks.model.layers[1][2].weight[3, 4] += 1
    sentence = r"'layers\.1\.2\.weight' of the base has changed since tasks were added; load its weights again"
    for refused in (lambda: tasks.activate("1"), lambda: tasks.add("a", read.parse(tickets[0]))):
        with pytest.raises(ValueError, match=sentence):
            refused()
    assert tasks.active is None
    tasks.model.load_state_dict(build().state_dict())
    assert same(tasks.activate("1"), plains[1])


def test_a_tensor_that_changes_is_noticed_by_the_tasks_that_use_it(tickets):
    tasks = iterand.TaskSet(build())
    tasks.add("own norm", read.parse(tickets[0]))
    tasks.add("norm of the base", read.parse(ticket(1, trainable="head")))
    with torch.no_grad():
        tasks.model.norm.bias.add_(1)
    for _ in range(2):
        tasks.activate("own norm")
        with pytest.raises(ValueError, match=r"'norm\.bias' of the base has changed"):
            tasks.activate("norm of the base")
        tasks.deactivate()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.double(),
        lambda model: setattr(model.norm, "bias", nn.Parameter(torch.zeros(16))),
        lambda model: setattr(model.norm.bias, "data", torch.zeros(16)),
    ],
)
def test_a_model_that_is_exchanged_is_noticed(tasks, change):
    change(tasks.activate("0"))
    with pytest.raises(ValueError, match="of the model is not where this TaskSet put it"):
        tasks.activate("1")


def test_the_base_is_restored_even_if_the_model_was_converted(tasks):
    tasks.activate("0").double()
    with pytest.raises(ValueError, match=r"'\S+' of the model is not where this TaskSet put it: the model was moved"):
        tasks.deactivate()
    for name in ("layers.0.0.weight", "head.weight"):
        assert torch.equal(tasks.model.get_parameter(name), build().get_parameter(name))


def test_two_sets_on_one_model_take_turns(tasks, tickets, plains):
    other = iterand.TaskSet(tasks.model)
    other.add("a", read.parse(tickets[4]))
    tasks.activate("0")
    with pytest.raises(ValueError, match="or another TaskSet is active on it; deactivate that one"):
        other.activate("a")
    assert same(tasks.model, plains[0])
    late = iterand.TaskSet(tasks.model)  # its base is the active task
    with pytest.raises(TicketError, match=r"'layers\.0\.0\.weight' \(and 3 more\) of the model differs"):
        late.add("a", read.parse(tickets[4]))
    tasks.deactivate()
    assert same(other.activate("a"), plains[4])
    assert same(other.deactivate(), build())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda tasks: pickle.loads(pickle.dumps(tasks))])
def test_a_copy_is_independent(tasks, plains, duplicate):
    tasks.activate("0")
    other = duplicate(tasks)
    assert same(other.model, plains[0])
    assert same(other.activate("1"), plains[1])
    assert same(tasks.model, plains[0])
    assert same(other.deactivate(), build())


def test_threads_switch_one_after_the_other(tasks, plains):
    failures = []

    def switch(start):
        try:
            for step in range(60):
                tasks.activate(str((start + step) % TASKS))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=switch, args=(start,)) for start in (0, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert same(tasks.model, plains[int(tasks.active)])
    assert same(tasks.deactivate(), build())


def test_gradients(tasks):
    with torch.inference_mode():
        tasks.activate("0")
    tasks.model(INPUTS).sum().backward()  # tensors that were made in inference mode would be refused
    before = tasks.model(INPUTS).sum()
    tasks.activate("1")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()


def test_a_ticket_that_cannot_be_decoded_leaves_the_active_task(tasks, tickets):
    from iterand.ticket import format

    header, body = format.unpack(tickets[0])
    tasks.add("damaged", read.parse(format.pack({**header, "weights_sha256": "0" * 64}, body)))
    tasks.activate("2")
    with pytest.raises(TicketError, match="not the ones that were saved"):
        tasks.activate("damaged")
    assert tasks.active == "2"


def test_a_row_per_task(tasks, plains):
    rows = ["4", None, "1", "4", "0", None]
    tasks.activate("7")
    with torch.no_grad(), tasks.rows(rows) as model:
        outputs = model(INPUTS)
        again = model(INPUTS.flip(0))
    base = build().eval()
    for number, task in enumerate(rows):
        alone = (base if task is None else plains[int(task)])(INPUTS[number : number + 1])[0]
        torch.testing.assert_close(outputs[number], alone.detach())
        flipped = (base if task is None else plains[int(task)])(INPUTS.flip(0)[number : number + 1])[0]
        torch.testing.assert_close(again[number], flipped.detach())
    assert tasks.active == "7"
    assert same(tasks.model, plains[7])
    assert all("forward" not in vars(module) for module in tasks.model.modules())


def test_rows_that_do_not_fit(tasks):
    with (
        tasks.rows(["0", "1"]) as model,
        pytest.raises(ValueError, match=r"'layers\.0\.0' gets a tensor of shape \[6, 5, 16\] for 2 tasks; give one"),
    ):
        model(INPUTS)
    with pytest.raises(ValueError, match="unknown task 'x'"), tasks.rows(["x"]):
        pass
    for wrong in (3, [["0"]]):
        with pytest.raises(ValueError, match="it must be a list with a name or None for each row"), tasks.rows(wrong):
            pass
    tasks.deactivate()
    assert same(tasks.model, build())


def test_nothing_is_switched_inside_a_block_of_rows(tasks, plains):
    inside = (tasks.deactivate, lambda: tasks.activate("1"), lambda: tasks.remove("0"), tasks.rows(["0"]).__enter__)
    with tasks.rows(["0"]):
        for refused in inside:
            with pytest.raises(ValueError, match="the rows of a batch have a task each inside this block; leave it"):
                refused()
    assert same(tasks.activate("1"), plains[1])
    tasks.model.norm.forward = lambda inputs: inputs
    with pytest.raises(ValueError, match=r"'norm' has a forward of its own, which cannot have"), tasks.rows(["0"]):
        pass


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)), torch.randn(3, 2, 4, 4)),
        (lambda: nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3)), torch.arange(6).view(3, 2)),
    ],
)  # fmt: skip
def test_rows_of_other_layers(make, inputs):
    def seeded():
        torch.manual_seed(0)
        return make()

    data = [ticket(number, make=seeded, trainable=()) for number in range(2)]
    tasks = iterand.TaskSet(seeded().to(memory_format=torch.channels_last) if inputs.dim() == 4 else seeded())
    for number, one in enumerate(data):
        tasks.add(str(number), read.parse(one))
    with torch.no_grad(), tasks.rows(["1", "0", "1"]) as model:
        outputs = model(inputs)
    for number, task in enumerate((1, 0, 1)):
        plain = iterand.ticket.load.load(read.parse(data[task]), seeded())
        torch.testing.assert_close(outputs[number], plain(inputs[number : number + 1])[0].detach())


def test_hooks_see_the_rows_of_a_batch_once():
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
        model[2].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
        return model

    tasks = iterand.TaskSet(make())
    tasks.add("a", read.parse(ticket(0, make=make, trainable=())))
    inputs = torch.ones(2, 8)
    with torch.no_grad():
        alone = [tasks.activate("a")(inputs)[0], tasks.deactivate()(inputs)[1]]
        with tasks.rows(["a", None]) as model:
            torch.testing.assert_close(model(inputs), torch.stack(alone))


class Tied(nn.Module):
    """Reads the weights of its embedding once more, as a layer or directly."""

    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.body, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.layer = layer
        if layer:
            self.head.weight = self.words.weight

    def forward(self, tokens):
        hidden = self.body(self.words(tokens)).mean(1).to(self.words.weight.dtype)
        return self.head(hidden) if self.layer else nn.functional.linear(hidden, self.words.weight)


@pytest.mark.parametrize("layer", [True, False], ids=["layer", "directly"])
def test_weights_that_are_read_outside_of_their_layer(layer):
    tokens = torch.arange(6).view(2, 3)
    tasks = iterand.TaskSet(Tied(layer))
    tasks.add("a", read.parse(ticket(0, make=lambda: Tied(layer), trainable=(), include=["words", "body"])))
    with torch.no_grad():
        alone = tasks.activate("a")(tokens)
        with tasks.rows(["a", "a"]) as model:
            if layer:
                torch.testing.assert_close(model(tokens), alone)
            else:
                with pytest.raises(ValueError, match="which the model also reads outside of its layer"):
                    model(tokens)
        assert torch.equal(tasks.model(tokens), alone)


def test_layers_that_take_no_task_per_row():
    def make():
        torch.manual_seed(0)
        return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    for include in (None, "linear1", "self_attn.out_proj"):
        tasks = iterand.TaskSet(make())
        tasks.add("a", read.parse(ticket(0, make=make, trainable=(), include=include)))
        with pytest.raises(ValueError, match="which cannot have a task per row; activate one task at a time"):
            tasks.rows(["a"]).__enter__()
        tasks.activate("a")


def test_overlap(tasks, plains):
    found = tasks.overlap("0", "1")
    assert list(found) == [f"layers.{n}.{m}.weight" for n in (0, 1) for m in (0, 2)]
    for name, overlap in found.items():
        first, second = ((plains[n].get_parameter(name) != 0) for n in (0, 1))
        assert (overlap.weights, overlap.first, overlap.second) == (384, int(first.sum()), int(second.sum()))
        assert overlap.both == int((first & second).sum())
        assert overlap.share == pytest.approx(int((first & second).sum()) / int((first | second).sum()))
    assert all(overlap.share == 1 for overlap in tasks.overlap("2", "2").values())


def test_statistics_of_batch_norms_are_a_tasks_own():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))

    model = iterand.prune_(make(), 0.2, weights="existing", trainable="2")
    model(torch.randn(30, 6))
    tasks = iterand.TaskSet(make().eval())
    tasks.add("a", read.parse(save.ticket_bytes(model)))
    inputs = torch.randn(4, 6)
    base = tasks.model(inputs)
    assert torch.equal(tasks.activate("a")(inputs), model.eval()(inputs))
    tasks.model.train()(inputs)  # changes the statistics of the active task only until it is activated again
    tasks.deactivate()
    assert torch.equal(tasks.model.eval()(inputs), base)
    assert torch.equal(tasks.activate("a")(inputs), model(inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_types_and_sizes(dtype):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(9, 7), nn.Linear(271, 300), nn.Conv1d(1, 3, 3)).to(dtype)

    data = ticket(0, make=make, trainable=(), overrides={"2": 0.5})
    tasks = iterand.TaskSet(make())
    tasks.add("a", read.parse(data))
    assert same(tasks.activate("a"), iterand.ticket.load.load(read.parse(data), make()))
    assert same(tasks.deactivate(), make())


def test_tied_weights():
    def make():
        torch.manual_seed(0)
        model = nn.ModuleDict({"words": nn.Embedding(9, 8), "out": nn.Linear(8, 9)})
        model["out"].weight = model["words"].weight
        return model

    data = ticket(0, make=make, trainable=())
    tasks = iterand.TaskSet(make())
    tasks.add("a", read.parse(data))
    plain = iterand.ticket.load.load(read.parse(data), make())
    assert torch.equal(tasks.activate("a")["out"].weight, plain["out"].weight)
    untied = copy.deepcopy(make())
    untied["out"].weight = nn.Parameter(untied["out"].weight.detach().clone())
    tasks = iterand.TaskSet(untied)
    tasks.add("a", read.parse(data))
    assert same(tasks.activate("a"), plain)
    tasks.deactivate()
    assert same(untied, make())
