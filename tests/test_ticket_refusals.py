"""Files from strangers: each refusal is one TicketError that names what is wrong, before memory is taken."""

import hashlib
import importlib.util
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save as save_tensors
from torch import nn

import iterand
from iterand import memory
from iterand.errors import NotEnoughMemoryError, TicketError
from iterand.lab.networks import build_network
from iterand.ticket import codec, format, read, save
from ticket_models import Mixed, edited, mixed, searched


@pytest.fixture(scope="module")
def whole() -> bytes:
    return save.ticket_bytes(mixed(), recipe={"network": {"name": "conv6"}})


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
    assert refused(b"", tmp_path) == "this is no ticket; save_ticket writes those"
    assert "no ticket" in refused(b"PK\3\4 something else", tmp_path)
    assert "no ticket" in refused(save_tensors({"a": torch.zeros(3)}), tmp_path)
    with pytest.raises(FileNotFoundError):
        iterand.read_ticket(tmp_path / "missing.ticket")


def test_damage_on_the_way(whole, tmp_path):
    for damaged in (whole[:-1], whole[: len(whole) // 2], whole + b"\0", whole[:44]):
        assert refused(damaged, tmp_path).startswith("its checksum is wrong, so it was damaged on the way")
    assert refused(whole[:20], tmp_path) == "it has 20 bytes, so it was cut off; copy or download it again"


def test_every_single_bit_is_under_the_checksum(whole):
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        with pytest.raises(TicketError):
            read.parse(bytes(flipped))


def with_checksum(data: bytes) -> bytes:
    return data[:8] + hashlib.sha256(data[:8] + data[40:]).digest() + data[40:]


def test_a_header_length_that_is_not_true(whole, tmp_path):
    lengths = {(1 << 32) - 1: "its header has 4294967295 bytes, and the file only", 0: "does not end where it should"}
    lengths |= {10: "does not end where it should", int.from_bytes(whole[40:44], "little") + 1: "where it should"}
    for length, message in lengths.items():
        assert message in refused(with_checksum(whole[:40] + length.to_bytes(4, "little") + whole[44:]), tmp_path)


def test_another_version(whole, tmp_path):
    older, newer = (with_checksum(whole[:7] + version + whole[8:]) for version in (b"\1", b"\3"))
    assert refused(newer, tmp_path) == (
        "it is a ticket of format 3, written by a newer version; this iterand reads format 2, so upgrade it"
    )
    assert refused(older, tmp_path) == (
        "it is a ticket of format 1, written by an older version; this iterand reads format 2, so train or save the "
        "network again"
    )


def layers(**values: Any) -> Callable[[dict[str, Any]], None]:
    """Another entry of the first layer in these columns."""

    def edit(header: dict[str, Any]) -> None:
        table = header["layers"]
        for key, value in values.items():
            entries = table.get(key, [None])
            table[key] = [value] + (entries if len(entries) == 1 else entries[1:])

    return edit


def whole_column(table: str, **values: list[Any]) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[table].update(values)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda header: header.pop("iterand"), "the header has no 'iterand'"),
        (lambda header: header.update(more=1), "the header has an unknown key 'more'"),
        (lambda header: header.update(layers=[]), "the header has layers '[]'; it must be a table"),
        (lambda header: header.update(layers={}), "it has no layers"),
        (lambda header: header["layers"].pop("seed"), "table 'layers' has no column 'seed'"),
        (whole_column("layers", more=[1]), "table 'layers' has an unknown column 'more'"),
        (whole_column("layers", seed=[]), "column 'seed' of table 'layers' is '[]'; it must be a list with an entry"),
        (whole_column("layers", seed=3), "column 'seed' of table 'layers' is '3'; it must be a list with an entry"),
        (whole_column("layers", seed=[1, 2, 3]), "column 'seed' of table 'layers' has 3 entries for 2 rows"),
        (whole_column("layers", floor=[2]), "table 'layers' has floor '2'; it must be a number from 0 to 1"),
        (whole_column("layers", fan_in=["many"]), "has fan_in 'many'; it must be an integer of at least 1"),
        (whole_column("layers", fan_in=[True]), "has fan_in 'True'; it must be an integer of at least 1"),
        (whole_column("layers", dtype=["I8"]), "has dtype 'I8'; it must be F64, F32, F16 or BF16"),
        (whole_column("layers", unit=[1e39]), "has unit '1e+39'; it must be a float32 number"),
        (whole_column("layers", unit=[0.1]), "has unit '0.1'; it must be a float32 number"),
        (whole_column("layers", unit=[0.5]), "'convolution.weight' has its own unit of 'kaiming_uniform'"),
        (whole_column("layers", weight_distribution=["x"]), "distribution 'x', which is not the package's, and no un"),
        (whole_column("layers", stored=["level"]), "'convolution.weight' counts more values than the 0 there are"),
        (whole_column("layers", history=[[[1 << 33, 1]]]), "has history '[[8589934592, 1]]'; it must be"),
        (whole_column("layers", history=[[[5, 1 << 25]]]), "randomized 33554432 times; the limit is 16777216"),
        (whole_column("layers", history=[[]]), "after 0 rounds"),
        (whole_column("layers", fan_in=[10]), "the weights it gives here are not the ones that were saved"),
        (whole_column("layers", seed=[8]), "holds a draw of a round in which the weight was not redrawn"),
        (layers(shape=[4, -3, 3]), "has shape '[4, -3, 3]'; it must be a list of sizes of at least 1"),
        (layers(shape=[1 << 15, 1 << 15]), f"it describes {(1 << 30) + 2 * 24 + 19 + 16 + 12 + 6} elements in"),
        (layers(shape=[1 << 20, 1 << 20]), "has 1099511627776 weights; the limit is 4294967295"),
        (layers(shape=[4, 3, 1]), "layer 'convolution.weight' keeps 18 of 12 weights"),
        (layers(shape=[4, 9]), "'convolution.weight' has shape [4, 9] in it and [4, 3, 3] in Mixed"),
        (layers(name="other"), "it holds 'other', which Mixed does not have; is it a ticket of another model?"),
        (layers(name="norm.weight"), "it describes 'norm.weight' 2 times"),
        (layers(counts=[9, 0, 9]), "has counts '[9, 0, 9]'; it must be a list of counts and gaps"),
        (layers(counts=[9, -1]), "has counts '[9, -1]'; it must be a list of counts and gaps"),
        (layers(counts=[9, -1, -1, 9]), "has counts '[9, -1, -1, 9]'; it must be a list of counts and gaps"),
        (layers(counts=[18]), "its coded stream cannot be read"),
        (layers(counts=[36]), "its coded stream cannot be read"),
        (lambda header: header.update(weights_sha256="0" * 64), "the weights it gives here are not the ones"),
        (lambda header: header.update(weights_sha256="0" * 63), "it must be 64 hexadecimal digits"),
        (lambda header: header.update(planes=[3]), "it names 1 planes, too few for its tensors"),
        (lambda header: header["planes"].append(3), "planes, too many for its tensors"),
        (lambda header: header.update(planes=[1 << 40, *header["planes"][1:]]), "its tensors are longer than the file"),
        (whole_column("filled", element=["00"]), "it has a F32 tensor filled with 1 bytes"),
        (whole_column("filled", element=["0"]), "has element '0'; it must be the bytes of an element"),
        (whole_column("filled", shape=[[1 << 27]]), "elements in"),
        (whole_column("filled", dtype=["BOOL"], element=["02"]), "filled with another one than 0 and 1"),
        (whole_column("tensors", saved_as=["I16"]), "tensor saved as I16; only F32 and F64 become F16"),
        (lambda header: header["aliases"].update(x="y"), "'x' is tied to 'y', which it does not hold"),
        (lambda header: header.update(levels={"kaiming_uniform": [1]}), "its own levels for 'kaiming_uniform'"),
        (lambda header: header.update(levels={"x": [1, 1]}), "it must be an object of ascending levels"),
    ],
)  # fmt: skip
def test_headers_that_are_not_as_they_must_be(whole, tmp_path, edit, message):
    assert message in refused(edited(whole, edit), tmp_path)


def test_another_unit_of_levels_is_refused(tmp_path):
    whole = save.ticket_bytes(searched(nn.Linear(20, 20), weights="signed_constant"))
    changed = edited(whole, lambda header: header["layers"].update(fan_in=[5]))
    assert "not the ones that were saved" in refused(changed, tmp_path, nn.Linear(20, 20))


def test_another_mask_of_the_same_count_is_refused(tmp_path):
    """Bits that change places keep all counts, and the checksum of the file can be made right."""
    whole = save.ticket_bytes(searched(nn.Linear(20, 20), weights="signed_constant"))
    header, body = format.unpack(whole)
    assert read.parse(whole).layers["weight"].header.mask_model.kind == "bits"
    assert "not the ones that were saved" in refused(
        format.pack(header, body[1:2] + body[:1] + body[2:]), tmp_path, nn.Linear(20, 20)
    )


def test_work_is_bounded_by_the_size_of_the_file(whole, tmp_path):
    def edit(header: dict[str, Any]) -> None:
        header["layers"]["history"] = [[[5, 1 << 24]]]

    size = len(edited(whole, edit))
    limit = (1 << 25) + size * (1 << 10)
    assert f"coins to be tossed; the limit for its size is {limit}" in refused(edited(whole, edit), tmp_path)


def test_many_layers_that_share_a_long_history_take_no_time():
    """A hundred thousand runs of rounds, shared by a thousand layers of one weight that was never redrawn."""
    model = iterand.prune_(nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(1000))), 0.0)
    data = save.ticket_bytes(model)
    runs = [[5 + number % 2, 100] for number in range(100_000)]

    def edit(header: dict[str, Any]) -> None:
        header["layers"].update(history=[runs], stored=["first"])

    ticket = read.parse(edited(data, edit))
    assert len({id(layer.history) for layer in ticket.header.layers}) == 1  # read once, kept once
    state = ticket.state_dict()
    assert all(torch.equal(state[f"{number}.weight"], model[number].weight) for number in range(1000))


def test_headers_and_planes_do_not_inflate_without_end(whole, tmp_path):
    header, _ = format.unpack(whole)
    bomb = format.pack({**header, "recipe": {"x": " " * (1 << 22)}}, b"")
    assert len(bomb) < 1 << 13
    assert "its header inflates to more than" in refused(bomb, tmp_path)

    def deflated(count: int) -> bytes:
        compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
        return compressor.compress(bytes(count)) + compressor.flush()

    plane = deflated(1000)
    header["tensors"] = {"name": ["x"], "shape": [[500]], "dtype": ["U8"]}
    header["planes"] = [len(plane)]
    assert "its plane inflates to more than 500 bytes" in refused(format.pack(header, plane), tmp_path)
    header["tensors"]["shape"] = [[2000]]
    assert "a plane inflates to 1000 bytes instead of 2000" in refused(format.pack(header, plane), tmp_path)
    header["planes"] = [len(plane) - 1]
    assert "its plane does not end where it should" in refused(format.pack(header, plane), tmp_path)
    header["tensors"]["shape"] = [[5]]
    assert "a plane of 5 bytes is stored in" in refused(format.pack(header, plane), tmp_path)
    header["tensors"]["dtype"], header["planes"] = ["BOOL"], [5]
    assert "truth values with others than 0 and 1" in refused(format.pack(header, b"\0\1\2\1\0"), tmp_path)


def test_a_header_that_is_no_json(tmp_path):
    def with_text(text: str) -> bytes:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json, "dumps", lambda *_, **__: text)
            return format.pack({}, b"")

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
        (None, r"it has no recipe of a network inside; in Python, give the model, too: load_ticket\(file, model\)"),
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
    path = Path(__file__).parents[1] / "tools" / "fuzz_ticket.py"
    spec = importlib.util.spec_from_file_location("fuzz_ticket", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result = module.fuzz(files=3000, seed=1)
    assert result["findings"] == []
    assert len(result["outcomes"]) > 40  # the mutations reach most of the checks


def test_what_is_computed_from_masked_weights_is_not_saved_as_if_it_were_not(tmp_path):
    model = iterand.prune_(nn.Sequential(nn.Linear(4, 5)), 0.5)
    nn.utils.parametrizations.spectral_norm(model[0])
    with pytest.raises(ValueError, match=r"'0\.weight' has another parametrization on top of its mask"):
        iterand.save_ticket(model, tmp_path / "a.ticket")
    assert not (tmp_path / "a.ticket").exists()
    del model[0].parametrizations.weight[-1]  # as the message says
    iterand.save_ticket(model, tmp_path / "a.ticket")
    plain = iterand.load_ticket(tmp_path / "a.ticket", nn.Sequential(nn.Linear(4, 5)))
    assert torch.equal(plain[0].weight, model[0].weight)


def test_a_ticket_of_a_part_that_was_compiled_says_so(tmp_path):
    model = iterand.prune_(nn.Sequential(nn.Linear(4, 5)), 0.5)
    model[0] = nn.ModuleDict({"_orig_mod": model[0]})  # what torch.compile(model[0]) makes of the names
    iterand.save_ticket(model, tmp_path / "a.ticket")
    compiled, plain = nn.Sequential(nn.ModuleDict({"_orig_mod": nn.Linear(4, 5)})), nn.Sequential(nn.Linear(4, 5))
    with pytest.raises(TicketError, match=r"torch.compile\(part\) renamed .*: compile the same part before loading"):
        iterand.load_ticket(tmp_path / "a.ticket", plain)
    iterand.load_ticket(tmp_path / "a.ticket", compiled)
    iterand.save_ticket(iterand.prune_(plain, 0.5), tmp_path / "b.ticket")
    with pytest.raises(TicketError, match=r"torch.compile\(part\) renames .*: load before it, or use part.compile\(\)"):
        iterand.load_ticket(tmp_path / "b.ticket", compiled)


def test_masked_weights_that_the_state_dict_calls_otherwise_are_not_saved(tmp_path):
    def rename(module, state, prefix, metadata):  # as checkpoint_wrapper of torch.distributed does it
        for name in [name for name in state if name.startswith(f"{prefix}inner.")]:
            state[prefix + name.removeprefix(f"{prefix}inner.")] = state.pop(name)

    wrapper = nn.Module()
    wrapper.inner = nn.Linear(4, 5)
    wrapper.register_state_dict_post_hook(rename)
    model = iterand.prune_(nn.Sequential(wrapper), 0.5)
    with pytest.raises(ValueError, match=r"'0\.inner\.weight' has another name in the model's state_dict"):
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


def test_counts_that_all_layers_share_are_limited(tmp_path):
    """A column with one entry holds for all rows: a thousand bytes could ask for gigabytes of counts."""
    layers = {
        "name": [str(number) for number in range(400)], "shape": [[32768]], "seed": [0], "stored": ["first"],
        "weight_distribution": ["kaiming_uniform"], "history": [[[1, 40000]]],
        "counts": [[1] * 32768], "sparsity": [0.5],
    }  # fmt: skip
    data = format.pack({"iterand": "0.2.0", "layers": layers, "weights_sha256": "0" * 64}, b"")
    assert len(data) < 1200
    assert f"its layers have 13107200 counts in {len(data)} bytes; the limit is" in refused(data, tmp_path)


def test_runs_without_end_are_refused_soon(monkeypatch):
    """A symbol that continues a run costs hardly a bit, so a short stream could hold millions of them."""
    size, symbols = (1 << 22) - 10, []
    model = codec.Model([size - 1, 1])
    frequency, state, words = int(model.frequencies[255]), 1 << 16, []
    for _ in range(60_000):  # all 255; of a tensor of this size there are no more than 16,448
        if state >> 16 >= frequency:
            words.append(state & 0xFFFF)
            state >>= 16
        state = (state // frequency << 16) + (1 << 16) - frequency + state % frequency
    stream = struct.pack(f"<I{len(words)}H", state, *reversed(words))
    assert len(stream) < 100
    take = codec._Words.take
    monkeypatch.setattr(codec._Words, "take", lambda self, count: symbols.append(count) or take(self, count))
    with pytest.raises(ValueError, match="its runs are longer than the tensor"):
        codec.decode(stream, [model])
    assert len(symbols) == model.max_coded + 1 == 1 + (size - 1) // 255 + 1
    longest = np.zeros(size, dtype=np.uint8)
    longest[-1] = 1
    coded = model.cut(longest)
    assert len(coded) == model.max_coded
    assert np.array_equal(codec.decode(codec.encode([coded], [model]), [model])[0], coded)


def test_a_network_that_does_not_fit_into_memory_is_refused(whole, monkeypatch):
    ticket = read.parse(whole)
    monkeypatch.setattr(memory, "main_memory", lambda: 100)
    with pytest.raises(NotEnoughMemoryError, match=r"the network of this ticket takes at least .*, but 100 B are free"):
        ticket.state_dict()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: iterand.save_ticket("b.ticket", model), "path is of type Linear; it must be the path of a file"),
        (lambda model: iterand.load_ticket(model, "b.ticket"), "path is of type Linear; it must be the path of a file"),
        (lambda model: iterand.read_ticket(3), "path is of type int; it must be the path of a file"),
        (lambda model: iterand.save_ticket(model, ""), "path is empty; it must be the path of a file"),
        (lambda model: iterand.read_ticket(""), "path is empty; it must be the path of a file"),
    ],
)
def test_what_is_no_path_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(nn.Linear(4, 4))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_what_is_no_regular_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TicketError, match="this is no regular file"):
        iterand.read_ticket(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("wide", torch.eye(4).to_sparse(), "'wide' in the model's state is torch.sparse_coo; a ticket holds dense"),
        ("wide", torch.empty(3, device="meta"), "'wide' in the model's state has no memory"),
        ("\ud800", torch.zeros(3), r"'\\ud800' in the model's state is half of a surrogate pair"),
    ],
)
def test_tensors_that_a_ticket_cannot_hold_are_named(name, value, message):
    model = nn.Linear(8, 8)
    model.register_buffer(name, value)
    with pytest.raises(ValueError, match=message):
        save.ticket_bytes(iterand.prune_(model, 0.5))


def test_text_and_numbers_that_are_none(whole, tmp_path):
    with pytest.raises(ValueError, match="metrics holds half of a surrogate pair"):
        save.ticket_bytes(mixed(), metrics={"note": "\ud800"})

    def edit(header: dict[str, Any]) -> None:
        header["layers"]["identity"] = ["\ud800"]

    escaped = json.dumps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json, "dumps", lambda *given, ensure_ascii, **options: escaped(*given, **options))
        data = edited(whole, edit)
    assert "table 'layers' has identity '\\ud800'; it must be a name" in refused(data, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json, "dumps", lambda *_, **__: '{"metrics": {"loss": 1e999}}')
        data = format.pack({}, b"")
    assert "1e999 is no float64 number" in refused(data, tmp_path)
