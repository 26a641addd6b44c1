import copy
import functools
import importlib.util

import numpy as np
import pytest
import torch
from torch import nn

import iterand
from iterand.errors import IterandError, MissingExtraError
from iterand.lab.networks import build_network
from ticket_models import searched

onnx = pytest.importorskip("onnx", reason="ONNX export is an extra: pip install 'iterand[onnx]'")
onnxruntime = pytest.importorskip("onnxruntime", reason="ONNX export is an extra: pip install 'iterand[onnx]'")

from iterand.inference import onnx as exporter  # noqa: E402

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
NETWORK = {"name": "resnet20", "width_factor": 0.5}


@pytest.fixture(scope="module", autouse=True)
def _one_registry():
    """torch collects all operations of ONNX anew for each export, which takes longer than the rest of it."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = searched(build_network(**NETWORK), 2, 0.5, weights="signed_constant")
    model(IMAGES)  # batch norm has seen something
    path = tmp_path_factory.mktemp("onnx") / "a.ticket"
    iterand.save_ticket(model, path, recipe={"network": NETWORK})
    return iterand.read_ticket(path), iterand.load_ticket(path)


@pytest.fixture(scope="module")
def exported(saved, tmp_path_factory):
    path = tmp_path_factory.mktemp("onnx") / "a.onnx"
    return path, exporter.export_onnx(*saved, (IMAGES,), path)


def test_onnxruntime_computes_what_torch_does_for_any_batch(saved, exported):
    path, report = exported
    assert report.bytes == path.stat().st_size
    assert report.difference < 1e-5
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    more = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    (found,) = session.run(None, {session.get_inputs()[0].name: more.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(found, saved[1](more).numpy(), rtol=1e-4, atol=1e-4)


def test_weights_are_four_bits_and_lose_nothing(saved, exported):
    ticket, network = saved
    proto = onnx.load(exported[0])
    onnx.checker.check_model(proto)
    assert {entry.version for entry in proto.opset_import if entry.domain == ""} == {21}
    assert set(exported[1].whole_numbers) == set(ticket.layers)
    initializers = {tensor.name: tensor for tensor in proto.graph.initializer}
    state = network.state_dict()
    for name in ticket.layers:
        levels = initializers[f"{name}.levels"]
        assert levels.data_type == onnx.TensorProto.INT4
        assert len(levels.raw_data) == -(-state[name].numel() // 2)
        unit = onnx.numpy_helper.to_array(initializers[f"{name}.unit"])
        values = onnx.numpy_helper.to_array(levels).astype(np.float32) * unit
        assert np.array_equal(values, state[name].numpy())
        assert name not in initializers


def test_the_file_is_about_eight_times_smaller_than_float32(tmp_path):
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(500, 500), nn.ReLU(), nn.Linear(500, 500))

    iterand.save_ticket(iterand.prune_(build(), 0.5, weights="signed_constant"), tmp_path / "a.ticket")
    plain = iterand.load_ticket(tmp_path / "a.ticket", build())
    ticket, example = iterand.read_ticket(tmp_path / "a.ticket"), (torch.randn(2, 500),)
    small = exporter.export_onnx(ticket, plain, example, tmp_path / "a.onnx")
    assert 7.5 < 4 * 500_000 / small.bytes < 8
    wider = exporter.export_onnx(ticket, plain, example, tmp_path / "b.onnx", integers="int8")
    assert 3.8 < 4 * 500_000 / wider.bytes < 4
    assert wider.difference < 1e-5


@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
def test_embedding_bags_are_exported(tmp_path, mode, capfd):
    def build() -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(60, 12, mode=mode), nn.Linear(12, 2))

    iterand.save_ticket(iterand.prune_(build(), 0.5, weights="signed_constant"), tmp_path / "a.ticket")
    ticket, plain = iterand.read_ticket(tmp_path / "a.ticket"), iterand.load_ticket(tmp_path / "a.ticket", build())
    report = exporter.export_onnx(ticket, plain, (torch.randint(60, (4, 5)),), tmp_path / "a.onnx")
    assert set(report.whole_numbers) == {"0.weight", "1.weight"}
    more = torch.randint(60, (7, 5))
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: more.numpy()})
    np.testing.assert_allclose(found, plain(more).detach().numpy(), rtol=1e-4, atol=1e-4)
    assert capfd.readouterr() == ("", "")


def test_a_continuous_distribution_stays_float32_and_exporting_says_nothing(tmp_path, capfd):
    iterand.save_ticket(iterand.prune_(nn.Linear(8, 3), 0.5), tmp_path / "a.ticket")
    ticket, plain = (
        iterand.read_ticket(tmp_path / "a.ticket"),
        iterand.load_ticket(tmp_path / "a.ticket", nn.Linear(8, 3)),
    )
    report = exporter.export_onnx(ticket, plain, (torch.randn(2, 8),), tmp_path / "a.onnx")
    assert report.whole_numbers == ()
    assert report.difference < 1e-5
    assert capfd.readouterr() == ("", "")


def test_outputs_that_differ_are_not_written(tmp_path, monkeypatch):
    iterand.save_ticket(iterand.prune_(nn.Linear(8, 3), 0.5), tmp_path / "a.ticket")
    ticket, plain = (
        iterand.read_ticket(tmp_path / "a.ticket"),
        iterand.load_ticket(tmp_path / "a.ticket", nn.Linear(8, 3)),
    )
    monkeypatch.setattr(exporter, "_difference", lambda *_: 0.01)
    with pytest.raises(IterandError, match=r"differ from torch's by 0.01 of the largest; nothing is written"):
        exporter.export_onnx(ticket, plain, (torch.randn(2, 8),), tmp_path / "a.onnx")
    assert not (tmp_path / "a.onnx").exists()


def test_what_torch_cannot_export_is_said_in_one_sentence(tmp_path):
    class Branching(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs) if inputs.sum() > 0 else inputs

    iterand.save_ticket(iterand.prune_(Branching(3, 3), 0.5), tmp_path / "a.ticket")
    plain = iterand.load_ticket(tmp_path / "a.ticket", Branching(3, 3))
    with pytest.raises(IterandError, match="torch cannot export Branching to ONNX: ") as caught:
        exporter.export_onnx(
            iterand.read_ticket(tmp_path / "a.ticket"), plain, (torch.ones(2, 3),), tmp_path / "a.onnx"
        )
    assert "\n" not in str(caught.value)


def test_an_error_without_a_message_is_called_by_its_type(tmp_path):
    class Untraced(nn.Linear):
        def forward(self, inputs):
            if torch.compiler.is_compiling():
                raise AssertionError
            return super().forward(inputs)

    iterand.save_ticket(iterand.prune_(Untraced(3, 3), 0.5), tmp_path / "a.ticket")
    plain = iterand.load_ticket(tmp_path / "a.ticket", Untraced(3, 3))
    with pytest.raises(IterandError, match=r"torch cannot export Untraced to ONNX: AssertionError$"):
        exporter.export_onnx(tmp_path / "a.ticket", plain, torch.ones(2, 3), tmp_path / "a.onnx")


def test_a_forward_that_takes_any_number_of_inputs(tmp_path):
    class Added(nn.Linear):
        def forward(self, first, *others):
            return super().forward(sum(others, first))

    iterand.save_ticket(iterand.prune_(Added(3, 3), 0.5), tmp_path / "a.ticket")
    plain = iterand.load_ticket(tmp_path / "a.ticket", Added(3, 3))
    for count in (1, 2, 3):
        exporter.export_onnx(tmp_path / "a.ticket", plain, tuple(torch.randn(count, 2, 3)), tmp_path / "a.onnx")


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.attention = nn.Embedding(20, 16), nn.MultiheadAttention(16, 4, batch_first=True)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, words):
        found = self.words(words)
        return self.head(self.norm(found + self.attention(found, found, found)[0])).mean(1)


def test_one_input_is_enough_for_attention(tmp_path):
    path, words = tmp_path / "a.ticket", torch.arange(15).view(3, 5)
    iterand.save_ticket(iterand.prune_(Reader(), 0.5, weights="signed_constant"), path)
    plain = iterand.load_ticket(path, Reader()).eval()
    exporter.export_onnx(path, plain, words[:1], tmp_path / "a.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    for batch in (words, words[:1]):
        (found,) = session.run(None, {"words": batch.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), plain(batch).detach())


def test_inputs_that_do_not_fit_are_refused_in_one_sentence(saved, tmp_path):
    with pytest.raises(IterandError, match=r"Sequential does not run on one input of shape \(1, 8, 8\): ") as caught:
        exporter.export_onnx(*saved, (torch.zeros(2, 1, 8, 8),), tmp_path / "a.onnx")
    assert "\n" not in str(caught.value)
    with pytest.raises(IterandError, match=r"does not run on inputs of shapes \(3, 32, 32\), \(3, 32, 32\): "):
        exporter.export_onnx(*saved, (IMAGES, IMAGES), tmp_path / "a.onnx")


def test_a_model_that_gives_more_than_a_tensor_is_refused(saved, tmp_path):
    with pytest.raises(ValueError, match="the model gives a tuple; wrap it in a module that gives one tensor"):
        exporter.export_onnx(saved[0], nn.LSTM(4, 4), (torch.randn(2, 3, 4, requires_grad=True),), tmp_path / "a.onnx")


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.body = nn.BatchNorm1d(4), nn.Linear(4, 6)

    def forward(self, inputs):
        return {"boxes": self.body(self.norm(inputs)), "features": inputs}


class Boxes(nn.Module):
    def __init__(self, detector):
        super().__init__()
        self.weight, self.detector = nn.Parameter(torch.ones(6)), detector

    def forward(self, inputs):
        return self.detector(inputs)["boxes"] * self.weight


def test_a_wrapper_of_the_loaded_model_is_exported(tmp_path):
    path = tmp_path / "a.ticket"
    iterand.save_ticket(iterand.prune_(Detector(), 0.5, weights="signed_constant"), path)
    detector = iterand.load_ticket(path, Detector())
    inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="the model gives a dict; wrap it in a module that gives one tensor"):
        exporter.export_onnx(path, detector, inputs, tmp_path / "a.onnx")
    done = exporter.export_onnx(path, Boxes(detector), inputs, tmp_path / "a.onnx")
    assert done.whole_numbers == ("body.weight",)
    (found,) = onnxruntime.InferenceSession(tmp_path / "a.onnx").run(None, {"inputs": inputs.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), detector.eval()(inputs)["boxes"].detach())
    with pytest.raises(IterandError, match=r"the network's 'body\.weight' is not as in the ticket"):
        exporter.export_onnx(path, Boxes(Detector()), inputs, tmp_path / "a.onnx")


@pytest.mark.parametrize("weights", ["signed_constant", "existing"])
def test_a_wrapper_may_have_tensors_of_the_same_name(weights, tmp_path):
    path, base = tmp_path / "a.ticket", nn.Linear(4, 6)
    iterand.save_ticket(iterand.prune_(copy.deepcopy(base), 0.5, weights=weights), path)
    wrapper = nn.Sequential(nn.BatchNorm1d(4), iterand.load_ticket(path, base))
    exporter.export_onnx(path, wrapper, torch.randn(3, 4), tmp_path / "a.onnx")


def test_wrong_arguments_and_missing_packages(saved, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="integers is 'int2'; it must be one of int4, int8"):
        exporter.export_onnx(*saved, (IMAGES,), tmp_path / "a.onnx", integers="int2")
    for example in ("images", [IMAGES], (IMAGES, 3)):
        with pytest.raises(ValueError, match="; it must be a tensor, or a tuple of tensors"):
            exporter.export_onnx(*saved, example, tmp_path / "a.onnx")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"ONNX export needs onnx, .* pip install 'iterand\[onnx\]'"):
        exporter.export_onnx(*saved, (IMAGES,), tmp_path / "a.onnx")


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))

    def forward(self, inputs):
        return inputs @ self.matrix


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(200, 64)
        self.out = nn.Linear(64, 200, bias=False)
        self.out.weight = self.words.weight

    def forward(self, tokens):
        return self.out(self.words(tokens).mean(1))


@pytest.mark.parametrize("integers", ["int4", "int8"])
@pytest.mark.parametrize(
    ("make", "example", "name"),
    [(Product, torch.randn(2, 5, 64), "matrix"), (Tied, torch.arange(24).view(4, 6), "words.weight")],
)
def test_products_with_matrices_and_tied_weights(make, example, name, integers, tmp_path):
    """onnxruntime would round the inputs of a product with a matrix of integers."""
    path = tmp_path / "a.ticket"
    iterand.save_ticket(iterand.prune_(make(), 0.6, weights="signed_constant", include="*"), path)
    report = exporter.export_onnx(
        path, iterand.load_ticket(path, make()), example, tmp_path / "a.onnx", integers=integers
    )
    assert report.whole_numbers == (name,)
    assert report.difference < 1e-5
    assert report.bytes < 1.5 * iterand.read_ticket(path).layers[name].weight().numel()


def test_half_precision_is_compared_as_such(tmp_path):
    def build():
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).half()

    path = tmp_path / "a.ticket"
    iterand.save_ticket(iterand.prune_(build(), 0.6, weights="signed_constant"), path)
    inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).half()
    assert exporter.export_onnx(path, iterand.load_ticket(path, build()), inputs, tmp_path / "a.onnx").difference < 0.01


class Answers(nn.Module):
    """Gives what ``answer`` makes of the outputs of a linear layer."""

    def __init__(self, answer):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.answer = answer

    def forward(self, inputs):
        return self.answer(self.layer(inputs))


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(lambda outputs: outputs > 0, id="bool"),
        pytest.param(lambda outputs: outputs.masked_fill(outputs < 0, -torch.inf), id="infinite"),
        pytest.param(lambda outputs: outputs.sqrt(), id="NaN"),
    ],
)
def test_outputs_without_a_difference_are_compared_too(answer, tmp_path, monkeypatch):
    path = tmp_path / "a.ticket"
    iterand.save_ticket(iterand.prune_(Answers(answer), 0.5, weights="signed_constant"), path)
    plain = iterand.load_ticket(path, Answers(answer))
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    done = exporter.export_onnx(path, plain, inputs, tmp_path / "a.onnx")
    assert done.difference < 1e-6
    (found,) = onnxruntime.InferenceSession(tmp_path / "a.onnx").run(None, {"inputs": inputs.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), plain(inputs).detach(), equal_nan=True)
    monkeypatch.setattr(exporter, "_outputs", lambda model, example: plain(-example[0]).detach())
    with pytest.raises(IterandError, match="onnxruntime's outputs differ from torch's by"):
        exporter.export_onnx(path, plain, inputs, tmp_path / "b.onnx")


@pytest.mark.parametrize("masked", [False, True])
def test_a_model_without_the_ticket_is_refused(masked, tmp_path):
    model = iterand.prune_(nn.Sequential(nn.Linear(3, 3)), 0.5)
    iterand.save_ticket(model, tmp_path / "a.ticket")
    other = model if masked else nn.Sequential(nn.Linear(3, 3))
    sentence = (
        r"the model is masked" if masked else r"the network's '0\.weight' is not as in the ticket; load the ticket"
    )
    with pytest.raises((IterandError, ValueError), match=sentence):
        exporter.export_onnx(tmp_path / "a.ticket", other, torch.ones(2, 3), tmp_path / "a.onnx")


def test_a_ticket_on_a_base_is_exported_once_it_is_loaded(tmp_path):
    base = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    pruned = iterand.prune_(copy.deepcopy(base), 0.5, weights="existing")
    iterand.save_ticket(pruned, tmp_path / "a.ticket")
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    with pytest.raises(IterandError, match=r"'0\.weight' is not as in the ticket"):
        exporter.export_onnx(tmp_path / "a.ticket", base, inputs, tmp_path / "a.onnx")
    loaded = iterand.load_ticket(tmp_path / "a.ticket", base)
    done = exporter.export_onnx(tmp_path / "a.ticket", loaded, inputs, tmp_path / "a.onnx")
    assert done.whole_numbers == ()
    (found,) = onnxruntime.InferenceSession(tmp_path / "a.onnx").run(None, {"input": inputs.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), pruned(inputs).detach())


def test_what_onnxruntime_cannot_run_is_said_in_one_sentence(tmp_path):
    def build():
        return nn.Sequential(nn.Linear(3, 3)).bfloat16()

    path = tmp_path / "a.ticket"
    iterand.save_ticket(iterand.prune_(build(), 0.5), path)
    plain = iterand.load_ticket(path, build())
    with pytest.raises(IterandError, match="onnxruntime cannot run the network, so nothing is written: ") as caught:
        exporter.export_onnx(path, plain, torch.ones(2, 3).bfloat16(), tmp_path / "a.onnx")
    assert "\n" not in str(caught.value)


class Loop(nn.Module):
    """Computes a batch row by row, which torch exports for the number of rows of the example."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, inputs):
        return torch.stack([self.layer(row) for row in inputs])


class Flat(nn.Module):
    """Asks for the size of the batch by ``len``, which is a constant in torch's usual way to trace."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(1, 1, 8))
        self.encoder, self.head = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(24, 4)

    def forward(self, inputs):
        tokens = torch.cat([self.token.expand(len(inputs), -1, -1), inputs.view(len(inputs), 2, 8)], 1)
        return self.head(self.encoder(tokens).view(len(inputs), -1))


def test_the_batch_may_be_asked_for_its_length(tmp_path, capfd):
    iterand.save_ticket(iterand.prune_(Flat(), 0.5, exclude="token"), tmp_path / "a.ticket")
    loaded = iterand.load_ticket(tmp_path / "a.ticket", Flat()).eval()
    fused = torch.backends.mha.get_fastpath_enabled()
    exporter.export_onnx(tmp_path / "a.ticket", loaded, torch.randn(2, 16), tmp_path / "a.onnx")
    assert torch.backends.mha.get_fastpath_enabled() == fused
    assert "onnxruntime" not in capfd.readouterr().err
    inputs = torch.randn(5, 16)
    (found,) = onnxruntime.InferenceSession(tmp_path / "a.onnx").run(None, {"inputs": inputs.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), loaded(inputs).detach(), rtol=1e-4, atol=1e-5)


def test_a_network_for_batches_of_one_size_is_refused(tmp_path):
    iterand.save_ticket(iterand.prune_(Loop(), 0.5), tmp_path / "a.ticket")
    loaded = iterand.load_ticket(tmp_path / "a.ticket", Loop())
    with pytest.raises(IterandError, match="torch exports Loop for batches of 2 only, so nothing is written"):
        exporter.export_onnx(tmp_path / "a.ticket", loaded, torch.randn(2, 8), tmp_path / "a.onnx")
    assert not (tmp_path / "a.onnx").exists()


def test_wrapped_models_are_opened_and_keep_their_mode(saved, tmp_path):
    ticket, model = saved
    model.train()
    done = exporter.export_onnx(ticket, nn.DataParallel(model), IMAGES, tmp_path / "a.onnx")
    assert done.difference < 1e-4
    assert all(module.training for module in model.modules())
    model.eval()
    with pytest.raises(ValueError, match="example has no inputs"):
        exporter.export_onnx(ticket, model, IMAGES[:0], tmp_path / "a.onnx")
