"""Tickets on a base: masks of existing weights, digests of what is not stored, and the tensors that were trained."""

import copy
import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import iterand
from iterand.errors import TicketError
from iterand.existing import digest
from iterand.ticket import read, save
from test_existing import INPUTS, LABELS, bits, build, train
from ticket_models import edited

BUILD = """
import torch
from torch import nn
torch.manual_seed(0)
body = nn.Sequential(nn.Linear(12, 20), nn.LayerNorm(20), nn.ReLU(), nn.Linear(20, 16), nn.BatchNorm1d(16), nn.ReLU())
model = nn.ModuleDict({"body": body, "head": nn.Linear(16, 3)})
"""


def searched(**options):
    model = iterand.prune_(build(), **{"sparsity": 0.2, "weights": "existing", "trainable": "head", **options})
    train(model, 6)
    return model.eval()


@pytest.fixture(scope="module")
def model():
    return searched()


@pytest.fixture(scope="module")
def data(model):
    return save.ticket_bytes(model, base="a network", metrics={"accuracy": 0.5})


@pytest.fixture
def path(data, tmp_path):
    (tmp_path / "a.ticket").write_bytes(data)
    return tmp_path / "a.ticket"


def refused(path, model):
    with pytest.raises(TicketError) as caught:
        iterand.load_ticket(path, model)
    message = str(caught.value)
    assert message.startswith(f"ticket '{path}': ")
    assert "\n" not in message
    return message.removeprefix(f"ticket '{path}': ")


def test_a_ticket_holds_masks_and_what_was_trained(model, data):
    ticket = read.parse(data)
    assert ticket.base == "a network"
    assert {layer.stored for layer in ticket.header.layers} == {"base"}
    assert set(ticket.header.base_tensors) == {
        "body.0.bias", "body.1.weight", "body.1.bias", "body.3.bias", "body.4.weight", "body.4.bias",
    }  # fmt: skip
    trained = {"head.weight", "head.bias", "body.4.running_mean", "body.4.running_var"}
    assert set(ticket.header.tensors) == trained
    assert set(ticket.header.filled) == {"body.4.num_batches_tracked"}
    for name, layer in iterand.masked_layers(model).items():
        assert torch.equal(ticket.layers[name].mask, layer.mask)
        assert ticket.layers[name].header.digest == digest(build().get_parameter(name))


def test_loaded_into_the_base_it_is_the_folded_model(model, path):
    plain = iterand.load_ticket(path, build()).eval()
    assert torch.equal(plain(INPUTS), model(INPUTS))
    folded = iterand.fold_(copy.deepcopy(model)).state_dict()
    assert all(torch.equal(bits(tensor) if tensor.is_floating_point() else tensor,
                           bits(folded[name]) if tensor.is_floating_point() else folded[name])
               for name, tensor in plain.state_dict().items())  # fmt: skip


def test_outputs_are_equal_in_a_fresh_process(model, path, tmp_path):
    torch.save((INPUTS, model(INPUTS).detach()), tmp_path / "outputs.pt")
    program = BUILD + (
        "import sys, iterand\n"
        "iterand.load_ticket(sys.argv[1], model).eval()\n"
        "inputs, outputs = torch.load(sys.argv[2])\n"
        "assert torch.equal(model['head'](model['body'](inputs)), outputs)\n"
    )
    command = [sys.executable, "-c", program, str(path), str(tmp_path / "outputs.pt")]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr[-2000:]


def test_the_digest_is_that_of_the_bytes_in_order():
    import hashlib

    tensor = torch.arange(6.0).view(2, 3)
    expected = hashlib.sha256(b"".join(value.numpy().tobytes() for value in tensor.flatten())).hexdigest()[:32]
    assert digest(tensor) == expected
    assert digest(tensor.t().contiguous().t()) == expected
    assert digest(-0.0 * tensor) != digest(0.0 * tensor)


def test_another_base_is_refused_by_name(path):
    other = build()
    with torch.no_grad():
        other.body[3].weight[2, 1] += 1e-6
    assert refused(path, other) == (
        "'body.3.weight' of the model differs from the base 'a network' that it was saved on; load these weights "
        "first, or switch between tickets with TaskSet"
    )
    norm = build()
    with torch.no_grad():
        norm.body[1].bias.add_(1)
        norm.body[4].bias.add_(1)
    assert refused(path, norm).startswith("'body.1.bias' (and 1 more) of the model differs from the base 'a network'")
    twice = iterand.load_ticket(path, build())
    assert "'body.0.weight' (and 1 more) of the model differs" in refused(path, twice)


def test_a_head_of_the_base_may_be_any(model, path):
    other = build()
    nn.init.zeros_(other.head.weight)
    iterand.load_ticket(path, other)
    assert torch.equal(other.head.weight, model.head.weight)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda model: model.double(), "'body.0.weight' is torch.float32 in it and torch.float64 in Network; convert"),
        (lambda model: model.add_module("head", nn.Linear(16, 4)), "has shape [3] in it and [4] in Network"),
        (lambda model: setattr(model, "body", model.body[:4]), "which Network does not have; is it a ticket of"),
        (lambda model: model.add_module("more", nn.Linear(2, 2)), "Network has 'more.weight', which it does not hold"),
        (lambda model: model.to("meta"), "'body.0.weight' of the base is on the meta device, without weights"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_fit_is_refused(path, change, sentence):
    model = build()
    change(model)
    assert sentence in refused(path, model)


def test_without_the_base_it_says_so(path):
    sentence = "it is a mask on the weights of 'a network', which it does not hold; load it into a model that has them"
    assert refused(path, None) == sentence
    ticket = iterand.read_ticket(path)
    with pytest.raises(TicketError, match="which it does not hold"):
        ticket.state_dict()
    with pytest.raises(TicketError, match=r"layer 'body\.0\.weight' is a mask on weights of a base"):
        ticket.layers["body.0.weight"].values()


@pytest.mark.parametrize("sparsity", [0.05, 0.2, 0.5])
def test_the_size_is_near_the_entropy_of_the_mask(sparsity):
    torch.manual_seed(0)
    layer = nn.Linear(768, 1024)
    model = iterand.prune_(layer, sparsity, weights="existing")
    with torch.no_grad():
        for score in iterand.scores(model):
            score.copy_(torch.rand(score.shape))
    size, bound = len(save.ticket_bytes(model)), iterand.summary(model).bits / 8
    assert bound < size < 1.02 * bound + 400


def test_what_does_not_change_is_not_stored():
    model = iterand.prune_(build(), 0.2, weights="existing", trainable="*.bias").eval()
    train(model, 2)  # of statistics and biases only the biases change in eval mode
    ticket = read.parse(save.ticket_bytes(model))
    assert set(ticket.header.tensors) == {f"body.{n}.bias" for n in (0, 1, 3, 4)} | {"head.bias"}
    assert not ticket.header.filled
    assert ticket.base == "Network"


def test_a_frozen_tensor_that_is_trained_after_all_is_stored():
    model = iterand.prune_(build(), 0.2, weights="existing")
    model.body[1].weight.requires_grad_(True)
    train(model, 2)
    ticket = read.parse(save.ticket_bytes(model))
    assert "body.1.weight" in ticket.header.tensors
    assert "body.1.bias" in ticket.header.base_tensors
    assert torch.equal(ticket.state_dict(build().state_dict())["body.1.weight"], model.body[1].weight)


def test_tied_tensors():
    def make():
        torch.manual_seed(0)
        words = nn.ModuleDict({"words": nn.Embedding(9, 8), "out": nn.Linear(8, 9), "copy": nn.Linear(8, 9)})
        words["out"].weight = words["words"].weight
        words["copy"].bias = words["out"].bias
        return words

    model = iterand.prune_(make(), 0.3, weights="existing", include="words")
    data = save.ticket_bytes(model)
    header = read.parse(data).header
    assert header.aliases == {"out.weight": "words.weight", "copy.bias": "out.bias"}
    plain = iterand.ticket.load.load(read.parse(data), make())
    assert plain["out"].weight is plain["words"].weight
    assert torch.equal(plain["out"].weight, model["out"].weight)


def test_a_part_may_be_random():
    model = build()
    iterand.prune_(model.body, 0.2, weights="existing")
    iterand.prune_(model.head, 0.5, weights="signed_constant", seed=3)
    train(model, 3)
    ticket = read.parse(save.ticket_bytes(model.eval()))
    assert [layer.header.stored == "base" for layer in ticket.layers.values()] == [True, True, False]
    assert "head.bias" in ticket.header.filled
    assert "body.0.bias" in ticket.header.base_tensors
    plain = iterand.ticket.load.load(ticket, build()).eval()
    assert torch.equal(plain(INPUTS), model(INPUTS))


def test_a_search_is_resumed_on_the_base(model, path):
    resumed = iterand.prune_(build(), 0.2, weights="existing", trainable="head")
    ticket = iterand.read_ticket(path)
    ticket.resume_(resumed)
    assert torch.equal(resumed.eval()(INPUTS), model(INPUTS))
    other = build()
    with torch.no_grad():
        other.body[0].weight[0, 0] += 1
    with pytest.raises(TicketError, match=r"the weights of 'body\.0\.weight' are not those that it masks"):
        ticket.resume_(iterand.prune_(other, 0.2, weights="existing", trainable="head"))
    random = iterand.prune_(build(), 0.2, exclude="head")
    with pytest.raises(TicketError, match="has weight_distribution 'existing' in the ticket and 'kaiming_uniform'"):
        ticket.resume_(random)


def test_pruned_weights_are_held_at_zero(path):
    plain = iterand.load_ticket(path, build())
    iterand.read_ticket(path).hold_zeros_(plain)
    before = plain.body[0].weight.detach().clone()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    F.cross_entropy(plain(INPUTS), LABELS).backward()
    optimizer.step()
    assert torch.equal(plain.body[0].weight == 0, before == 0)
    assert not torch.equal(plain.body[0].weight, before)


def test_the_name_of_a_base_goes_with_existing_weights(tmp_path):
    with pytest.raises(ValueError, match="base is 'x', but no weight of the model is an existing one; leave it out"):
        iterand.save_ticket(iterand.prune_(build(), 0.2), tmp_path / "a.ticket", base="x")
    with pytest.raises(ValueError, match="base is ''; it must be a name"):
        iterand.save_ticket(iterand.prune_(build(), 0.2, weights="existing"), tmp_path / "a.ticket", base="")


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda header: header.pop("base"), "it says that 'body.0.weight' is that of a base, and names none"),
        (lambda header: header.update(base=3), "the header has base '3'; it must be a name"),
        (lambda header: header["layers"].update(digest=["00"]), "has digest '00'; it must be 32 hexadecimal digits"),
        (lambda header: header["layers"].pop("digest"), "stored 'base', distribution 'existing' and a digest"),
        (lambda header: header["layers"].update(stored=["round"]), "must have stored 'base', distribution 'existing'"),
        (lambda header: header["layers"].update(unit=[0.5]), "has its own unit of 'existing', whose unit is known"),
        (lambda header: header["layers"].update(counts=[[3, 4]]), "counts more values than the 1 there are"),
        (lambda header: header["layers"].update(digest=["0" * 32]), "'body.0.weight' (and 1 more) of the model"),
        (lambda header: header["base_tensors"].pop("digest"), "table 'base_tensors' has no column 'digest'"),
        (lambda header: header["base_tensors"]["name"].append("head.bias"), "entries for 7 rows"),
        (lambda header: header.update(weights_sha256="0" * 64), "are not the ones that were saved"),
    ],
)  # fmt: skip
def test_headers_that_are_not_as_they_must_be(data, tmp_path, edit, sentence):
    (tmp_path / "a.ticket").write_bytes(edited(data, edit))
    assert sentence in refused(tmp_path / "a.ticket", build())


def test_a_base_without_tensors_of_it_is_refused(tmp_path):
    whole = save.ticket_bytes(iterand.prune_(build(), 0.2))
    (tmp_path / "a.ticket").write_bytes(edited(whole, lambda header: header.update(base="x")))
    assert "it names a base, 'x', and holds all tensors itself" in refused(tmp_path / "a.ticket", build())


def test_commands(path, cli, tmp_path):
    _, text, _ = cli("ticket", "info", str(path))
    assert "those of the base a network, which the ticket does not hold" in " ".join(text.split())
    _, text, _ = cli("ticket", "info", str(path), "--json")
    assert json.loads(text)["base"] == "a network"
    code, text, _ = cli("ticket", "verify", str(path))
    assert code == 0
    assert "of the base a network; masks as saved" in " ".join(text.split())
    for kind in ("safetensors", "onnx", "c"):
        code, _, errors = cli("export", str(path), "--format", kind, "-o", str(tmp_path / "out"))
        assert code == 1
        assert "it is a mask on the weights of 'a network'" in " ".join(errors.split())


def test_compiled(tmp_path):
    network = nn.Sequential(*(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 3)))
    base = copy.deepcopy(network)
    masked = iterand.prune_(network, 0.5, weights="existing")
    iterand.save_ticket(masked, tmp_path / "b.ticket")
    outputs = iterand.compile_ticket(tmp_path / "b.ticket", base)(INPUTS)
    torch.testing.assert_close(outputs, masked(INPUTS).detach())


def test_a_copy_of_the_model_gives_the_same_bytes(model, data):
    assert save.ticket_bytes(copy.deepcopy(model), base="a network", metrics={"accuracy": 0.5}) == data
