import errno
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import typer
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import iterand
from iterand.cli import export, ticket
from iterand.errors import TicketError
from iterand.inference.c.library import find_compiler
from iterand.lab.networks import build_network
from ticket_models import mixed, searched

NETWORK = {"name": "digits_conv", "width_factor": 0.5}
app = typer.Typer()
app.add_typer(ticket.app, name="ticket")
app.command()(export.export)


def said(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


@pytest.fixture
def file(tmp_path):
    model = searched(build_network(**NETWORK), weights="signed_constant")
    iterand.save_ticket(
        model, tmp_path / "a.ticket", recipe={"network": NETWORK}, metrics={"accuracy": 97.46835443037975}
    )
    return tmp_path / "a.ticket"


def test_info_shows_layers_and_what_they_cost(file):
    text = said("ticket", "info", file)
    assert "classifier.weight" in text
    assert "│" not in text
    assert "signed_constant, seed 0" in text
    assert "times as much" in text
    assert text.splitlines()[-1].split() == ["accuracy", "97.4684"]


def test_info_shows_what_is_not_masked(cli, tmp_path):
    iterand.save_ticket(mixed(), tmp_path / "mixed.ticket")
    _, text, _ = cli("ticket", "info", "mixed.ticket")
    row = next(line for line in text.splitlines() if "not masked" in line)
    assert row.split(maxsplit=3)[2:] == [
        "20",
        "stored in full: free.weight (4×4), free.bias (4); 78.9 % of the numbers in matrices are masked",
    ]
    facts = json.loads(said("ticket", "info", tmp_path / "mixed.ticket", "--json"))
    assert facts["unmasked"] == {"free.weight": [4, 4], "free.bias": [4]}
    assert facts["masked_share"] == pytest.approx(60 / 76)


def test_info_has_no_such_line_where_all_is_masked(file):
    assert "not masked" not in said("ticket", "info", file)
    assert json.loads(said("ticket", "info", file, "--json"))["unmasked"] == {}


@pytest.fixture
def long(tmp_path):
    """A ticket whose layers have long names that differ in the middle."""
    model = nn.Module()
    for number in range(12):
        block = nn.ModuleDict({"attention": nn.ModuleDict({"self": nn.ModuleDict({"query": nn.Linear(4, 4)})})})
        model.add_module(f"encoder_blocks_number_{number}_of_the_network", block)
    iterand.save_ticket(iterand.prune_(model, 0.5), tmp_path / "long.ticket")
    return tmp_path / "long.ticket"


NAME = "encoder_blocks_number_{}_of_the_network.attention.self.query.weight"


def layer_lines(text):
    """The lines of the table, up to the empty line after it."""
    heading, *lines = text.partition("\n\n")[0].splitlines()
    assert heading.split() == ["layer", "shape", "kept", "rounds", "redrawn", "bits"]
    return lines


@pytest.mark.parametrize("columns", [80, 100])
def test_long_names_are_shortened_in_the_middle_and_stay_distinct(cli, monkeypatch, long, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    code, text, _ = cli("ticket", "info", long)
    assert code == 0
    lines = layer_lines(text)
    assert len(lines) == len({line.split()[0] for line in lines}) == 12
    assert max(map(len, lines)) == columns
    for number, line in enumerate(lines):
        head, tail = line.split()[0].split("…")
        assert NAME.format(number).startswith(head)
        assert NAME.format(number).endswith(tail)
        assert line.split()[1] == "4×4"


@pytest.mark.parametrize(("columns", "options"), [(200, []), (200, ["--wide"]), (80, ["--wide"]), (20, ["--wide"])])
def test_names_are_printed_in_full_where_there_is_room_or_if_asked(cli, monkeypatch, long, columns, options):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = layer_lines(cli("ticket", "info", long, *options)[1])
    assert [line.split()[0] for line in lines] == [NAME.format(number) for number in range(12)]


def test_a_narrow_terminal_gets_a_line_per_layer_too(cli, monkeypatch, long):
    monkeypatch.setenv("COLUMNS", "20")
    lines = layer_lines(cli("ticket", "info", long)[1])
    assert len(lines) == 12
    assert {len(line.split()[0]) for line in lines} == {16}


def test_output_to_a_pipe_is_for_80_columns(long):
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [sys.executable, "-m", "iterand", "ticket", "info", str(long)]
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, layer_lines(done.stdout))) == 80
    done = subprocess.run(
        [*command, "--wide"], env=environment, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8"
    )
    assert NAME.format(11) in done.stdout


def test_redraws_are_shown_only_where_a_ticket_holds_them(file, long):
    assert "redrawn" not in said("ticket", "info", file)
    assert "redrawn" in said("ticket", "info", long)


def test_control_characters_of_a_ticket_do_not_reach_the_terminal(tmp_path):
    model = nn.Sequential()
    model.add_module("\x1b[31mred\x07", nn.Linear(8, 8))
    iterand.save_ticket(iterand.prune_(model, 0.5), tmp_path / "a.ticket", metrics={"\x1b[2J": "\x1b]0;title\x07"})
    text = said("ticket", "info", tmp_path / "a.ticket")
    assert not {"\x1b", "\x07"} & set(text)
    assert "\\x1b[31mred" in text


def test_info_as_json(file):
    facts = json.loads(said("ticket", "info", file, "--json"))
    assert facts["path"] == str(file)
    assert facts["bytes"]["file"] == file.stat().st_size
    assert (facts["metrics"], facts["recipe"]) == ({"accuracy": 97.46835443037975}, {"network": NETWORK})
    network = build_network(**NETWORK)
    assert facts["bytes"]["float32"] == 4 * sum(parameter.numel() for parameter in network.parameters())
    layer = facts["layers"][-1]
    assert (layer["name"], layer["shape"], layer["rounds"]) == ("classifier.weight", [10, 64], 6)
    assert layer["kept"] == 320
    assert facts["settings"][0]["weight_distribution"] == "signed_constant"


def test_verify_decodes_everything(file):
    assert "intact; 5 layers" in said("ticket", "verify", file)
    assert json.loads(said("ticket", "verify", file, "--json"))["ok"] is True


def test_verify_counts_one_layer_in_the_singular(tmp_path):
    iterand.save_ticket(iterand.prune_(nn.Linear(2, 1, bias=False), 0.5), tmp_path / "a.ticket")
    assert "intact; 1 layer, 1 kept weight, as they were saved" in said("ticket", "verify", tmp_path / "a.ticket")


def test_verify_says_what_is_wrong_by_raising(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(TicketError, match="checksum is wrong"):
        said("ticket", "verify", file)


def test_export_writes_the_dense_state_dict(file, tmp_path):
    assert said("export", file, "--format", "safetensors").startswith(f"{tmp_path / 'a.safetensors'}: ")
    expected = iterand.load_ticket(file).state_dict()
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    report = json.loads(said("export", file, "--format", "safetensors", "-o", tmp_path / "b.safetensors", "--json"))
    assert report["bytes"] == (tmp_path / "b.safetensors").stat().st_size
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()


def test_export_to_c(file, tmp_path):
    shape = ("--input-shape", "1,1,8,8")
    line = said("export", file, "--format", "c", *shape)
    assert re.fullmatch(
        r".*: .* of constant data, .* of memory; (its outputs agree with torch|no C compiler).*\n", line
    )
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "README.md", "example.c", "network.c", "network.h"
    ]  # fmt: skip
    report = json.loads(said("export", file, "--format", "c", "-o", tmp_path / "b", *shape, "--json"))
    assert report["written"] == str(tmp_path / "b")
    assert report["bytes"] > 0
    assert f"#define NETWORK_ARENA {report['arena']} " in (tmp_path / "b" / "network.h").read_text()
    assert report["weights"] == 0


def test_export_to_c_with_the_weights_of_the_ticket(file, tmp_path):
    options = ("--format", "c", "--weights", "ticket", "--input-shape", "1,1,8,8")
    line = said("export", file, *options)
    assert re.fullmatch(
        r".* of constant data, .* of memory and .* for decoded weights; (its outputs agree|no C compiler).*\n", line
    )
    report = json.loads(said("export", file, *options, "-o", tmp_path / "b", "--json"))
    header = (tmp_path / "b" / "network.h").read_text()
    assert report["weights"] > 0
    assert f"#define NETWORK_WEIGHTS {report['weights']} " in header
    assert "int network_init(void *arena);" in header


def test_export_to_onnx(file, tmp_path):
    pytest.importorskip("onnxruntime", reason="ONNX export is an extra: pip install 'iterand[onnx]'")
    report = json.loads(said("export", file, "--format", "onnx", "--input-shape", "1,1,8,8", "--json"))
    assert report["written"] == str(tmp_path / "a.onnx")
    assert report["difference"] < 1e-5
    with pytest.raises(ValueError, match="--input-shape is '1x8'; it must be whole numbers such as"):
        said("export", file, "--format", "onnx", "--input-shape", "1x8")
    with pytest.raises(ValueError, match=r"--input-shape is '1,-1,8,8'; it must be .*, all above 0"):
        said("export", file, "--format", "onnx", "--input-shape", "1,-1,8,8")


@pytest.mark.parametrize(
    ("options", "way_out"),
    [(["--format", "c"], "--input-shape"), (["--format", "c", "--activations", "int8"], "--sample")],
)
def test_export_needs_inputs_if_the_recipe_is_not_of_a_run(cli, tmp_path, options, way_out):
    model = searched(build_network(**NETWORK), weights="signed_constant")
    iterand.save_ticket(model, tmp_path / "a.ticket", recipe={"network": NETWORK, "by": "hand"})
    code, out, err = cli("export", "a.ticket", *options)
    assert (code, out) == (1, "")
    assert re.fullmatch(
        rf"error: the ticket does not say which data its network takes \(.*'by'.*\); give {way_out}\n", err
    )


@pytest.mark.parametrize(
    ("to", "exporter"), [("c", "iterand.inference.c.export.export_c"), ("onnx", "iterand.inference.onnx.export_onnx")]
)
def test_export_names_the_function_for_networks_that_it_cannot_build(cli, tmp_path, to, exporter):
    way_out = f"; in Python, load it into your model with load_ticket, and give the model to {exporter}\n"
    iterand.save_ticket(iterand.prune_(nn.Linear(8, 8), 0.5), tmp_path / "own.ticket")
    code, out, err = cli("export", "own.ticket", "--format", to)
    assert (code, out) == (1, "")
    assert err == f"error: ticket 'own.ticket': it has no recipe of a network inside{way_out}"
    by_code = {"network": {"name": "nets.py:small"}}
    iterand.save_ticket(iterand.prune_(nn.Linear(8, 8), 0.5), tmp_path / "code.ticket", recipe=by_code)
    _, _, err = cli("export", "code.ticket", "--format", to)
    assert err.startswith("error: ticket 'code.ticket': its network is made by code, 'nets.py:small', and a file never")
    assert err.endswith(way_out)
    text = {"network": {"name": "bilstm", "width_factor": 0.1}}
    iterand.save_ticket(iterand.prune_(nn.Linear(8, 8), 0.5), tmp_path / "text.ticket", recipe=text)
    _, _, err = cli("export", "text.ticket", "--format", to)
    assert err.startswith("error: ticket 'text.ticket': its network bilstm reads texts of different lengths, which")
    model = iterand.prune_(nn.Linear(8, 8), 0.5, weights="existing")
    iterand.save_ticket(model, tmp_path / "mask.ticket", base="mine")
    _, _, err = cli("export", "mask.ticket", "--format", to)
    assert err == f"error: ticket 'mask.ticket': it is a mask on the weights of 'mine', which it does not hold{way_out}"


@pytest.mark.parametrize("to", ["c", "onnx"])
def test_export_says_in_one_sentence_that_a_shape_is_wrong(cli, file, to):
    if to == "onnx":
        pytest.importorskip("onnxruntime", reason="ONNX export is an extra: pip install 'iterand[onnx]'")
    code, out, err = cli("export", file, "--format", to, "--input-shape", "1,8,8")
    assert (code, out) == (1, "")
    start = "--input-shape is 1,8,8, of which the first number is the batch, but"
    assert re.fullmatch(rf"error: {start} \w+ does not run on one input of shape \(8, 8\): .*\n", err)


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ("safetensors --activations int8", "--activations is for --format c, not for safetensors; leave it out"),
        ("safetensors --integers int4", "--integers is for --format onnx, not for safetensors; leave it out"),
        ("safetensors --data-dir .", "--data-dir is for --format onnx or c, not for safetensors; leave it out"),
        ("c --integers int8", "--integers is for --format onnx, not for c; leave it out"),
        ("onnx --weights ticket", "--weights is for --format c, not for onnx; leave it out"),
        ("c --sample a.npy", "--sample is for --activations int8; leave it out"),
        ("c --input-shape 1x8", "--input-shape is '1x8'; it must be whole numbers such as 1,3,32,32, all above 0"),
        ("c --input-shape 64", "--input-shape is '64'; the first number is the batch, so write 1,64"),
        (
            "c --activations int8 --input-shape 1,1,8,8",
            "--activations int8 needs inputs, not only their shape; give --sample, not --input-shape",
        ),
    ],
)
def test_export_refuses_options_that_do_not_go_with_the_format(cli, options, refusal):
    """Before the ticket is read."""
    assert cli("export", "none.ticket", "--format", *options.split()) == (1, "", f"error: {refusal}\n")


def test_export_checks_values_before_the_ticket_is_read(cli):
    code, out, err = cli("export", "none.ticket", "--format", "onnx", "--integers", "int2")
    assert (code, out) == (2, "")
    assert "'int2' is not one of 'int4', 'int8'" in err


@pytest.mark.parametrize("shape", ["99999999999999999999,1,8,8", "1,4000000000,4000000000,8"])
def test_export_compares_an_input_with_the_memory_first(cli, file, shape):
    code, out, err = cli("export", file, "--format", "c", "--input-shape", shape)
    assert (code, out) == (1, "")
    assert re.fullmatch(r"error: an input of this shape takes at least .*; give a smaller --input-shape\n", err)


@pytest.mark.parametrize("to", ["c", "onnx", "safetensors"])
def test_export_says_what_cannot_be_written(cli, file, to):
    if to == "onnx":
        pytest.importorskip("onnxruntime", reason="ONNX export is an extra: pip install 'iterand[onnx]'")
    shape = [] if to == "safetensors" else ["--input-shape", "1,1,8,8"]
    found = cli("export", file, "--format", to, "-o", "a.ticket/b/c", *shape)
    assert found == (1, "", "error: cannot write a.ticket/b/c: Not a directory\n")


@pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")
def test_export_does_not_blame_the_output_for_the_temporary_folder(cli, file, tmp_path, monkeypatch):
    def write_text(path, *_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_text)
    shape = ("--format", "c", "--input-shape", "1,1,8,8")
    _, _, err = cli("export", file, *shape)
    assert re.fullmatch(
        r"error: cannot write to the temporary folder \S+: No space .*, or set TMPDIR to another one\n", err
    )
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ctypes.CDLL", Mock(side_effect=OSError("network.so: failed to map segment")))
    _, _, err = cli("export", file, *shape)
    assert re.fullmatch(r"error: cannot load the network: network.so: failed to map segment; set .*TMPDIR.*\n", err)
    monkeypatch.setattr("tempfile.TemporaryDirectory", Mock(side_effect=FileNotFoundError(errno.ENOENT, "No folder")))
    assert cli("export", file, *shape) == (1, "", "error: No folder\n")


def test_the_ticket_itself_is_not_overwritten(cli, file):
    before = file.read_bytes()
    found = cli("export", file, "--format", "safetensors", "-o", file)
    assert found == (1, "", f"error: -o {file} is the ticket itself; choose another name\n")
    assert file.read_bytes() == before


def test_tickets_of_the_quickstart_are_exported_as_they_are(cli, tmp_path):
    """The recipe omits its data, which are the default."""
    pytest.importorskip("sklearn", reason="the lab is not installed")
    small = ["--set", "epochs=1", "--set", "width_factor=0.5"]
    assert cli("train", "digits", "--out", "run", *small)[0] == 0
    assert "data" not in iterand.read_ticket("run/model.ticket").recipe
    formats = ["c", "c --activations int8 -o int8"]
    if importlib.util.find_spec("onnxruntime"):
        formats.append("onnx")
    for to in formats:
        code, out, err = cli("export", "run/model.ticket", "--format", *to.split())
        assert (code, err) == (0, ""), to
        assert out
    assert {"network.c", "network.h"} <= {path.name for path in (tmp_path / "int8").iterdir()}


def test_a_run_folder_is_compared_bit_for_bit(tmp_path):
    from iterand.lab.experiments.library import find_recipe
    from iterand.lab.training import recipe_file
    from iterand.lab.training.checkpoint import write_checkpoint
    from iterand.lab.training.folder import TICKET, RunFolder
    from iterand.lab.training.run import run
    from iterand.lab.training.session import Session

    recipe = recipe_file.override(find_recipe("digits"), ["training.epochs=1", "method.period=5"])
    run(recipe, RunFolder(tmp_path / "run"), device=torch.device("cpu"))
    file = tmp_path / "run" / TICKET
    assert "equal, bit for bit" in said("ticket", "verify", file, "--run", tmp_path / "run")

    other = recipe_file.override(recipe, ["seed=5"])
    run(other, RunFolder(tmp_path / "other"), device=torch.device("cpu"))
    with pytest.raises(TicketError, match=r"is not what the run .*other.* holds"):
        said("ticket", "verify", file, "--run", tmp_path / "other")
    network = r"its network is not that of the run .*different"
    weights = r"different2 is a run of 'sgd', which trains weights; give one of a search"
    cases = {"width_factor=1.0": network, "network.name=resnet20": network, "method.name=sgd": weights}
    for number, (setting, sentence) in enumerate(cases.items()):
        different = tmp_path / f"different{number}"
        shutil.copytree(tmp_path / "run", different)
        chosen = recipe_file.override(recipe, [setting])
        (different / "recipe.toml").write_text(recipe_file.to_toml(chosen))
        model = build_network(chosen.network.name, classes=10, width_factor=chosen.network.width_factor)
        session = Session(chosen, model, 1, torch.device("cpu"))
        write_checkpoint(different, session.capture())
        with pytest.raises(TicketError, match=sentence):
            said("ticket", "verify", file, "--run", different)
    with pytest.raises(TicketError, match="holds no checkpoint to compare with"):
        said("ticket", "verify", file, "--run", tmp_path)
