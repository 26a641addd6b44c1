"""Files from strangers: each refusal is one TicketError that names what is wrong, before memory is taken."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import nn

import iterand
from iterand.errors import TicketError
from iterand.networks import build_network
from iterand.ticket import coding, container, reading, writing
from ticket_models import Mixed, mixed, searched


@pytest.fixture(scope="module")
def whole() -> bytes:
    return writing.ticket_bytes(mixed(), recipe={"network": {"name": "conv6"}})


def edited(data: bytes, edit: Callable[[dict[str, Any]], None]) -> bytes:
    """The ticket with its header edited and its checksum right."""
    header, tensors = container.unpack(data)
    edit(header)
    return container.pack(header, tensors)


def refused(data: bytes, tmp_path: Path, model: nn.Module | None = None) -> str:
    path = tmp_path / "a.ticket"
    path.write_bytes(data)
    with pytest.raises(TicketError) as caught:
        iterand.load_ticket(path, model or Mixed())
    message = str(caught.value)
    assert message.startswith(f"ticket '{path}': ")
    assert "\n" not in message
    return message.removeprefix(f"ticket '{path}': ")


def test_a_model_with_layers_that_have_no_shape_yet(tmp_path):
    path = tmp_path / "a.ticket"
    iterand.save_ticket(iterand.prune_(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), 0.5), path)
    lazy = nn.Sequential(nn.Linear(3, 4), nn.LazyBatchNorm1d())
    with pytest.raises(TicketError, match=r"'1\.weight' of Sequential has no shape yet; run one forward pass"):
        iterand.load_ticket(path, lazy)


def test_files_that_are_no_tickets(tmp_path):
    assert "no whole safetensors file" in refused(b"", tmp_path)
    assert "no ticket, nor any other safetensors file" in refused(b"PK\3\4 something else", tmp_path)
    assert "but no ticket" in refused(save({"a": torch.zeros(3)}), tmp_path)
    assert "but no ticket" in refused(save({"sha256": torch.zeros(32)}, {"other": "x"}), tmp_path)
    with pytest.raises(FileNotFoundError):
        iterand.read_ticket(tmp_path / "missing.ticket")


def test_damage_on_the_way(whole, tmp_path):
    assert "no whole safetensors file" in refused(whole[:-1], tmp_path)
    assert "no whole safetensors file" in refused(whole[: len(whole) // 2], tmp_path)
    assert "no whole safetensors file" in refused(whole + b"\0", tmp_path)
    for place in (len(whole) - 1, whole.index(b"conv6")):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        assert refused(bytes(flipped), tmp_path).startswith("its checksum is wrong, so it was damaged on the way")


def test_every_single_bit_is_under_the_checksum(whole):
    for place in range(8, len(whole), 5):
        flipped = bytearray(whole)
        flipped[place] ^= 4
        with pytest.raises(TicketError):
            reading.parse(bytes(flipped))


@pytest.mark.parametrize("length", [0, 1 << 20, 100_000_001, (1 << 64) - 1])
def test_a_header_length_that_is_not_true(whole, tmp_path, length):
    assert "no whole safetensors file" in refused(length.to_bytes(8, "little") + whole[8:], tmp_path)


def test_another_version(whole, tmp_path):
    newer = edited(whole, lambda header: header.update(format=2, novelty=1))
    assert refused(newer, tmp_path) == "it is a ticket of format 2; this iterand reads format 1, so upgrade it"


def layer(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["layers"][0].update(values)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda header: header.pop("cast"), "the header has no 'cast'"),
        (lambda header: header.update(more=1), "the header has an unknown key 'more'"),
        (lambda header: header.update(layers=[]), "the header has layers '[]'; it must be a list of objects"),
        (lambda header: header["shared"].update(floor=2), "'shared' has floor '2'; it must be a number from 0 to 1"),
        (lambda header: header["shared"].update(name="x"), "'shared' has name 'x'; it must be left out"),
        (layer(fan_in="many"), "layer 'convolution.weight' has fan_in 'many'; it must be a whole number of at least 1"),
        (layer(fan_in=True), "layer 'convolution.weight' has fan_in 'True'; it must be a whole number of at least 1"),
        (layer(shape=[4, -3, 3]), "layer 'convolution.weight' has shape '[4, -3, 3]'; it must be"),
        (layer(shape=[1 << 30, 1 << 30]), f"it describes {(1 << 60) + 2 * 24 + 19 + 16 + 12 + 6} elements in"),
        (lambda header: header["filled"].update(x=["I8", [1 << 27], "01"]), "elements in"),
        (layer(shape=[4, 3, 1]), "layer 'convolution.weight' keeps 18 of 12 weights"),
        (layer(shape=[4, 9]), "'convolution.weight' has shape [4, 9] in it and [4, 3, 3] in Mixed"),
        (layer(dtype="F64"), "'convolution.weight' is torch.float64 in it and torch.float32 in Mixed"),
        (layer(dtype="I8"), "layer 'convolution.weight' has dtype 'I8'; it must be"),
        (layer(name="other"), "it holds 'other', which Mixed does not have; is it a ticket of another model?"),
        (layer(streams=[8, 0]), "the streams of its layers have"),
        (layer(streams=[0, -8]), "layer 'convolution.weight' has streams '[0, -8]'; it must be two numbers of bytes"),
        (layer(name="norm.weight"), "it describes 'norm.weight' 2 times"),
        (layer(unit=1e39), "layer 'convolution.weight' has unit '1e+39'; it must be a float32 number"),
        (layer(unit=0.1), "layer 'convolution.weight' has unit '0.1'; it must be a float32 number"),
        (layer(weight_distribution="x"), "layer 'convolution.weight' has distribution 'x', which is not described"),
        (layer(stored="level"), "layer 'convolution.weight' has level 0, which is none of its distribution's"),
        (layer(history=[[1 << 33, 1]]), "layer 'convolution.weight' has history '[[8589934592, 1]]'; it must be"),
        (layer(history=[[5, 1 << 25]]), "'convolution.weight' was randomized 33554432 times; the limit is 16777216"),
        (layer(history=[]), "after 0 rounds"),
        (layer(counts=[[1, 9], [0, 9]]), "'convolution.weight' has counts '[[1, 9], [0, 9]]'; it must be an ascending"),
        (layer(counts=[[0, 0]]), "layer 'convolution.weight' has counts '[[0, 0]]'; it must be an ascending"),
        (layer(counts=[[0, 18]]), "the value stream of layer 'convolution.weight' cannot be read: it should be empty"),
        (layer(counts=[[0, 36]]), "the mask stream of layer 'convolution.weight' cannot be read: it should be empty"),
        (layer(seed=8), "layer 'convolution.weight' holds a draw of a round in which the weight's coin stayed up"),
        (layer(fan_in=10), "layer 'convolution.weight' was drawn from a 'kaiming_uniform' of unit"),
        (lambda header: header.update(weights_sha256="0" * 64), "the weights it gives here are not the ones"),
        (lambda header: header["filled"].pop("decoder.bias"), "Mixed has 'decoder.bias', which it does not hold"),
        (lambda header: header["filled"].update(x=["BOOL", [2], "02"]), "'x' is of truth values, but has others"),
        (lambda header: header["filled"].update(x=["F32", [2], "00"]), "the header has filled"),
        (lambda header: header["aliases"].update(x="y"), "'x' is tied to 'y', which it does not hold"),
        (lambda header: header["cast"].update(steps="F32"), "'steps' is a F32 stored as F16, and that is not so"),
    ],
)  # fmt: skip
def test_headers_that_are_not_as_they_must_be(whole, tmp_path, edit, message):
    assert message in refused(edited(whole, edit), tmp_path)


def test_too_many_coins_are_refused_before_one_is_tossed(whole, tmp_path):
    def edit(header: dict[str, Any]) -> None:
        header["shared"]["history"] = [[5, 1 << 24]]
        header["layers"].append(
            {**header["layers"][0], "name": "big", "shape": [1 << 20], "counts": [[0, 1], [1, 1 << 19]]}
        )

    assert "coins to be tossed; the limit is 4294967296" in refused(edited(whole, edit), tmp_path)


def test_many_layers_cannot_share_a_long_history(whole, tmp_path):
    def edit(header: dict[str, Any]) -> None:
        header["shared"]["history"] = [[5 + number % 2, 1] for number in range(5000)]
        header["layers"] = [{**header["layers"][0], "name": str(number)} for number in range(1000)]

    assert "1000 layers share 5000 runs" in refused(edited(whole, edit), tmp_path)


def test_tensors_that_do_not_belong(whole, tmp_path):
    header, tensors = container.unpack(whole)
    assert "it has a tensor 'other', which no ticket has" in refused(
        container.pack(header, {**tensors, "other": torch.ones(4)}), tmp_path
    )
    assert "its streams are torch.float32 of shape [4]; they must be a list of bytes" in refused(
        container.pack(header, {**tensors, "streams": torch.ones(4)}), tmp_path
    )
    assert "it describes 'norm.weight' twice" in refused(
        container.pack(header, {**tensors, "tensor:norm.weight": torch.ones(4)}), tmp_path
    )
    total = len(tensors["streams"])
    assert f"the streams of its layers have {total} bytes, and there are {total - 4}" in refused(
        container.pack(header, {**tensors, "streams": tensors["streams"][4:].clone()}), tmp_path
    )
    del tensors["streams"]
    assert f"the streams of its layers have {total} bytes, and there are 0" in refused(
        container.pack(header, tensors), tmp_path
    )


def test_another_mask_of_the_same_count_is_refused(tmp_path):
    model = searched(nn.Linear(20, 20), weights="signed_constant")
    header, tensors = container.unpack(writing.ticket_bytes(model))
    layer = reading.parse(writing.ticket_bytes(model)).layers["weight"]
    other = layer.mask().flip(0).reshape(-1).numpy().view(np.uint8)
    stream = coding.encode(other, [200, 200])
    header["layers"][0]["streams"][0] = len(stream)
    tensors["streams"] = torch.frombuffer(bytearray(stream + layer.value_stream), dtype=torch.uint8)
    assert "not the ones that were saved" in refused(container.pack(header, tensors), tmp_path, nn.Linear(20, 20))


def test_a_header_that_is_no_json(whole, tmp_path):
    def with_text(text: str) -> bytes:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json, "dumps", lambda *_, **__: text)
            return container.pack({}, {})

    assert "its header is no JSON" in refused(with_text("{"), tmp_path)
    assert "its header is no JSON" in refused(with_text("[" * 100_000), tmp_path)
    assert "NaN is not JSON" in refused(with_text('{"format": NaN}'), tmp_path)
    assert "its header is a JSON list" in refused(with_text("[1]"), tmp_path)


def test_another_model(whole, tmp_path):
    assert "'convolution.weight', which Linear does not have" in refused(whole, tmp_path, nn.Linear(3, 3))
    wider = Mixed()
    wider.convolution = nn.Conv1d(3, 5, 3)
    assert "'convolution.weight' has shape [4, 3, 3] in it and [5, 3, 3] in Mixed" in refused(whole, tmp_path, wider)
    more = Mixed()
    more.extra = nn.Linear(2, 2)
    assert "Mixed has 'extra.weight', which it does not hold" in refused(whole, tmp_path, more)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (None, "it has no recipe of a network inside; give load_ticket the model"),
        ({"name": ["conv6"]}, "it has no recipe of a network inside"),
        ({"name": "conv7"}, "cannot be built: no network is called 'conv7'"),
        ({"name": "conv6", "depth": 3}, "cannot be built: network 'conv6' has no option 'depth'"),
        ({"name": "conv6", "width_factor": "wide"}, "cannot be built"),
        ({"name": "conv6", "width_factor": 300}, r"has shape \[6, 3, 3, 3\] in it and \[19200, 3, 3, 3\]"),
        ({"name": "conv6", "width_factor": 1e12}, "cannot be built"),
        ({"name": "conv6", "width_factor": 1e300}, "cannot be built"),
        ({"name": "lstm", "vocabulary_size": 1 << 50}, "does not have"),
    ],
)  # fmt: skip
def test_recipes_that_do_not_give_the_network_are_refused_without_memory(tmp_path, network, message):
    model = iterand.prune_(build_network("conv6", width_factor=0.1), 0.5)
    iterand.save_ticket(model, tmp_path / "a.ticket", recipe=network and {"network": network})
    with pytest.raises(TicketError, match=message) as caught:
        iterand.load_ticket(tmp_path / "a.ticket")
    assert "\n" not in str(caught.value)


def test_a_refused_ticket_leaves_the_model_as_it_was(whole, tmp_path):
    target = Mixed()
    before = {name: value.clone() for name, value in target.state_dict().items()}
    refused(edited(whole, lambda header: header.update(weights_sha256="0" * 64)), tmp_path, target)
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


def test_mutated_files_are_refused_or_give_the_same_network():
    path = Path(__file__).parents[1] / "benchmarks" / "fuzz_ticket.py"
    spec = importlib.util.spec_from_file_location("fuzz_ticket", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result = module.fuzz(files=3000, seed=1)
    assert result["findings"] == []
    assert result["slowest_seconds"] < 1
    assert len(result["outcomes"]) > 40  # the mutations reach most of the checks


def test_what_is_computed_from_masked_weights_is_not_saved_as_if_it_were_not(tmp_path):
    model = iterand.prune_(nn.Sequential(nn.Linear(4, 5)), 0.5)
    nn.utils.parametrizations.spectral_norm(model[0])
    with pytest.raises(ValueError, match=r"'0\.weight' has another parametrization on top of its mask"):
        iterand.save_ticket(model, tmp_path / "a.ticket")
    assert not (tmp_path / "a.ticket").exists()


def test_metrics_that_are_no_number_are_named(tmp_path):
    with pytest.raises(ValueError, match="metrics cannot be written as JSON"):
        iterand.save_ticket(iterand.prune_(nn.Linear(4, 4), 0.5), tmp_path / "a", metrics={"accuracy": torch.ones(2)})


def test_a_model_is_filled_where_it_is_and_given_memory_where_it_has_none(tmp_path):
    masked = iterand.prune_(nn.Linear(4, 4), 0.5)
    iterand.save_ticket(masked, tmp_path / "a.ticket")
    hollow = iterand.load_ticket(tmp_path / "a.ticket", nn.Linear(4, 4, device="meta"))
    assert torch.equal(hollow.weight, masked.weight)
    with pytest.raises(ValueError, match=r"it must be a torch\.nn\.Module as it was before prune_"):
        iterand.load_ticket(tmp_path / "a.ticket", nn.Linear)


def test_an_lstm_with_words_of_another_size_is_not_taken_for_the_same(tmp_path):
    options = {"width_factor": 0.03, "vocabulary_size": 20}
    masked = iterand.prune_(build_network("lstm", word_scale=10.0, **options), 0.5).eval()
    iterand.save_ticket(masked, tmp_path / "a.ticket")
    plain = iterand.load_ticket(tmp_path / "a.ticket", build_network("lstm", **options)).eval()
    tokens, lengths = torch.arange(6).view(2, 3), torch.tensor([3, 2])
    assert torch.equal(plain(tokens, lengths), masked(tokens, lengths))
    with pytest.raises(ValueError, match="a text has no word"):
        plain(tokens, torch.tensor([3, 0]))
