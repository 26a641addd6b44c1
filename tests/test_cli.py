"""The command line in this process: what it prints, where, and with which exit code."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from iterand.cli import console, options
from iterand.cli.main import _show_warning, app
from iterand.lab.benchmarks import catalog as benchmarks
from iterand.lab.data import DATASETS
from iterand.lab.data.dataset import VARIABLE
from iterand.lab.data.packs import QUALITY
from iterand.lab.experiments.catalog import experiment_names
from iterand.lab.experiments.library import profile_names, recipe_names
from iterand.lab.report.formatting import size
from iterand.lab.training import recipe_file
from iterand.lab.training.recipe import SCALES

TINY = ["--set", "epochs=1", "--set", "batch_size=300"]


def test_a_warning_of_torch_is_shown_without_its_stack(capsys):
    _show_warning("no bf16 here\nException raised from matmul at Matmul.cpp:338\nframe #0: c10")
    assert capsys.readouterr().err == "warning: no bf16 here\n"


def test_train_evaluate_and_go_on(cli, tmp_path):
    code, out, err = cli("train", *TINY, "--out", "run", "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["run"] == "run"
    assert (tmp_path / "run" / "model.ticket").stat().st_size == result["ticket_bytes"]
    for path in ("run", "run/model.ticket"):
        code, out, _ = cli("evaluate", path, "--json")
        assert code == 0
        assert json.loads(out)["test_accuracy"] == result["test_accuracy"]
    code, out, _ = cli("evaluate", "run")
    assert f"{result['test_accuracy']:.2f} %" in out
    code, out, _ = cli("train", *TINY, "--out", "run")
    assert code == 0
    assert "none ever trained" in out
    assert "5.5 kB as float32: run" in out


def commands(group, path=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


@pytest.mark.parametrize(
    ("path", "command"), [pytest.param(*each, id=" ".join(each[0])) for each in commands(get_command(app))]
)
def test_help_is_shown_whole(cli, monkeypatch, path, command):
    """Brackets would be taken for markup and swallowed."""
    monkeypatch.setenv("COLUMNS", "300")
    _, out, _ = cli(*path, "--help")
    shown = " ".join(out.replace("│", " ").split())
    for parameter in command.params:
        assert " ".join((parameter.help or "").split()) in shown


def test_default_folder(cli, tmp_path):
    code, out, _ = cli("train", *TINY, "--json")
    assert code == 0
    assert json.loads(out)["run"].startswith("runs" + os.sep + "digits-")
    assert (tmp_path / json.loads(out)["run"] / "recipe.toml").exists()


@pytest.mark.parametrize("name", ["run[red]x", "run[/x]", "a rather long name " * 8])
def test_a_folder_is_shown_as_it_is_named(cli, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = cli("train", *TINY, "--out", name)
    assert code == 0
    assert f": {name}{os.sep}model.ticket\n" in out
    assert out.endswith(f"run            {name}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--set", "limit=30", "--set", "batch_size=64", "--set", "drop_last=true"],
        ["--set", "network.classes=3", "--out", "deep/run"],
        ["--set", "network.classes=3", "--fresh"],
        ["conv6", "--data-dir", "nowhere"],
        ["--device", "tpu"],
    ],
)
def test_a_refused_run_leaves_nothing(cli, tmp_path, arguments):
    assert cli("train", *arguments)[0] == 1
    assert list(tmp_path.iterdir()) == []


def test_a_refused_run_leaves_a_folder_that_was_there(cli, tmp_path):
    (tmp_path / "r").mkdir()
    assert cli("train", "--set", "network.classes=3", "--out", "r")[0] == 1
    assert (tmp_path / "r").is_dir()


def test_a_run_that_never_began_is_not_tested(cli):
    Path("r").mkdir()
    code, _, err = cli("evaluate", "r")
    assert (code, err) == (1, "error: r is not a run folder: it holds no recipe.toml\n")
    Path("r/recipe.toml").write_text('name = "x"\n')
    code, _, err = cli("evaluate", "r")
    assert (code, err) == (1, "error: r holds no checkpoint; train it first\n")


def test_recipes(cli):
    assert "digits" in cli("recipes")[1]
    code, out, _ = cli("recipes", "digits")
    assert code == 0
    assert "[method]" in out
    assert json.loads(cli("recipes", "digits", "--set", "rate=0.5", "--json")[1])["method"]["rate"] == 0.5
    code, _, err = cli("recipes", "--set", "rate=0.5")
    assert code == 1
    assert "--set changes a recipe; say which" in err


def test_reproduce(cli):
    code, out, _ = cli("reproduce")
    assert code == 0
    assert "digits" in out


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["train", "digit"], 1, "unknown recipe 'digit'; did you mean 'digits'?"),
        (["train", "none.toml"], 1, "error: cannot read the recipe none.toml: No such file or directory\n"),
        (["train", "--set", "perod=1"], 1, "recipe has no key 'perod'; did you mean 'method.period'?"),
        (["train", "--set", "sparsity=1.5"], 1, "method.sparsity is 1.5; it must be at least 0 and at most 1"),
        (["train", "--set", "rate=-1"], 1, "method.rate is -1.0; it must be"),
        (["train", "--set", "period=0"], 1, "method.period is 0; it must be at least 1"),
        (["train", "--set", "sparsity=1.0"], 1, "sparsity 1 leaves none of the 36 weights"),
        (["train", "--set", "weight_distribution=KU"], 1, "unknown distribution 'KU'"),
        (["train", "--set", "network.name=convv6"], 1, "did you mean 'conv6'?"),
        (["train", "--set", "data.name=mnist"], 1, "unknown data set 'mnist'"),
        (["train", "--device", "tpu"], 1, "device is 'tpu'; it must be auto, cpu, cuda or cuda:N"),
        (["train", "--device", "cuda:99"], 1, "device is 'cuda:99', but torch sees"),
        (["train", "--out", "file/run"], 1, "cannot write to the run folder file/run"),
        (["evaluate", "nowhere"], 1, "there is no run folder or ticket 'nowhere'"),
        (["evaluate", "."], 1, "is not a run folder"),
        (["evaluate", "file"], 1, "ticket 'file': this is no ticket"),
        (["ticket", "info", "."], 1, "this is a folder; that of a run holds its ticket as model.ticket"),
        (["ticket", "info", "none.ticket"], 1, "error: there is no ticket 'none.ticket'\n"),
        (["ticket", "verify", "none.ticket"], 1, "error: there is no ticket 'none.ticket'\n"),
        (["export", "none.ticket", "--format", "c"], 1, "error: there is no ticket 'none.ticket'\n"),
        (["report", ".", "-o", "file/a/b.md", "--format", "md"], 1, "error: cannot read or write "),
        (["train", "--out", "-"], 1, "- is not the name of a file or folder, and this is not written to stdout"),
        (["reproduce", "digits", "--out", "-"], 1, "- is not the name of a file or folder"),
        (["export", "file", "--format", "c", "-o", "-"], 1, "- is not the name of a file or folder"),
        (["theory", "construct", "--ticket", "-"], 1, "- is not the name of a file or folder"),
        (["train", "--set", "name=../x"], 1, "name is '../x', by which no folder can be called; choose another"),
        (["train", "--set", "name=sgd"], 1, "name is 'sgd', but name only names the run; write method.name=sgd"),
        (["train", "--set", "name="], 1, "name is '', by which no folder can be called"),
        (["train", "--set", "norm_statistics=recomputed"], 1, "digits_conv has no batch norm; leave it out"),
        (
            [
                *("train", "--set", "epochs=9999", "--set", "period=2"),
                *("--set", "weight_distribution=uniform", "--set", "width_factor=4"),
            ],
            1,
            "more different draws of 'convolutions.1.0.weight' than a ticket holds; set it to 3 or more",
        ),
        (
            ["train", "--set", "network.name=lstm"],
            1,
            "but data.name is 'digits', which has images",
        ),
        (
            ["train", "--set", "network.name=resnet20"],
            1,
            "which is not made for the images of digits, 1×8×8",
        ),
        (["train", "--set", "network.classes=3"], 1, "network.classes is 3, but digits has 10; leave it out"),
        (["train", "--set", "width_factor=1e300"], 1, "is 1e+300; it must be at least 1e-06 and at most 1e+12"),
        (["train", "--set", f"name={'[' * 3000}"], 1, "File name too long"),
        (["train", "--set", "threads=100000"], 1, "training.threads is 100000; it must be at least 0 and at most 1024"),
        (["train", "lstm", "--set", "forget_bias=1e39"], 1, "network.forget_bias is 1e+39; it must be at least -1000"),
        (["theory", "width", "--epsilon", "1e-300"], 1, "epsilon is 1e-300; it must be at least 1e-100"),
        (["evaluate", "[/red]"], 1, "there is no run folder or ticket '[/red]'"),
        (["reproduce", "digts"], 1, "unknown experiment 'digts'; did you mean 'digits'?"),
        (["reproduce", "digits", "--out", "file/runs"], 1, "error: cannot read or write file/runs: Not a directory\n"),
        (["train", "--foo"], 2, "No such option"),
        (["nonsense"], 2, "No such command"),
        (["reproduce", "digits", "--seeds", "0"], 2, "--seeds"),
    ],
)
def test_bad_input_gets_one_sentence(cli, tmp_path, arguments, code, sentence):
    (tmp_path / "file").write_text("not a folder")
    found, out, err = cli(*arguments)
    assert found == code
    assert out == ""
    assert sentence in err
    assert "Traceback" not in err
    if code == 1:
        assert err.startswith("error: ")
        assert err.count("\n") == 1


AT_ONCE = """
import itertools, os, sys
from typer.main import get_command
from iterand.cli import main as command

def lines(group, path=()):
    yield [*path, "--help"]
    for name, part in getattr(group, "commands", {}).items():
        yield from lines(part, (*path, name))

wrong = [["--version"], ["nonsense"], ["train", "--foo"], ["evaluate"], ["reproduce", "digits", "--seeds", "0"], []]
for line in itertools.chain(lines(get_command(command.app)), wrong):
    sys.argv = ["iterand", *line]
    try:
        command.main()
    except SystemExit as end:
        print(line, end.code, {"torch", "numpy"} & sys.modules.keys(), file=sys.stderr)
"""


def test_help_and_usage_errors_do_not_wait_for_torch():
    answer = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    told = [line for line in answer.stderr.splitlines() if line.startswith("[")]
    assert "['theory', 'construct', '--help'] 0 set()" in told
    assert "['train', '--foo'] 2 set()" in told
    assert "['--version'] 0 set()" in told
    assert len(told) > 20
    assert all(line.endswith(" set()") for line in told)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("iterand tr", ["train"]),
        ("iterand train dig", ["digits"]),
        ("iterand recipes best-resnet2", ["best-resnet20", "best-resnet20-imp", "best-resnet20-sgd"]),
        ("iterand reproduce figure3", ["figure3", "figure3-curves"]),
        ("iterand reproduce digits --profile ", ["paper", "text", "best"]),
        ("iterand bench s", ["step", "select"]),
        ("iterand data fetch im", ["imagenet", "imdb"]),
    ],
)
def test_tab_completion(line, found):
    program = "import sys; from iterand.cli.main import main; sys.argv = ['iterand']\ntry: main()\n"
    program += "finally: assert 'torch' not in sys.modules"
    words = {"_ITERAND_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    answer = subprocess.run([sys.executable, "-c", program], env=os.environ | words, capture_output=True, text=True)
    assert (answer.stdout.split(), answer.stderr) == (found, "")


def test_names_for_help_and_completion_are_those_there_are():
    assert tuple(benchmarks.BENCHMARKS) == options.BENCHMARKS
    assert tuple(DATASETS) == options.DATASETS
    assert tuple(experiment_names()) == options.EXPERIMENTS
    assert tuple(profile_names()) == options.PROFILES
    assert options.recipes() == recipe_names()
    assert (options.SCALES, options.QUALITY, options.DATA_VARIABLE) == (SCALES, QUALITY, VARIABLE)


@pytest.mark.parametrize("line", [["recipes"], ["train"], ["ticket", "info", "a.ticket"], ["theory", "width"]])
def test_ctrl_c_while_torch_is_imported_stops_at_once(tmp_path, line):
    """Torch's own import goes on after an exception, or breaks."""
    (tmp_path / "torch.py").write_text(
        "import os, signal\ntry: os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException: print('goes on')\n"
    )
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    code = (
        "import signal, iterand.cli.main as cli; signal.signal(signal.SIGINT, signal.default_int_handler); cli.main()"
    )
    command = [sys.executable, "-c", code, *line]  # a job in the background would ignore the signal
    answer = subprocess.run(command, env=os.environ | path, capture_output=True, text=True)
    assert (answer.returncode, answer.stdout, answer.stderr) == (130, "", "stopped\n")


WITH_GREEK = ["theory", "width", "--rounds", "3", "--trials", "9"]


def test_an_encoding_without_greek():
    command = [sys.executable, "-m", "iterand", *WITH_GREEK]
    answer = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": "cp1252"}, capture_output=True)
    assert (answer.returncode, answer.stderr.strip()) == (0, b"")
    assert rb"\u03b5 = 0.1" in answer.stdout


def test_version_and_help(cli):
    assert cli("--version")[1].startswith("iterand 0.")
    assert "reproduce" in cli("--help")[1]


@pytest.mark.parametrize(("count", "text"), [(999, "999 B"), (1500, "1.5 kB"), (44_700_000, "44.70 MB")])
def test_sizes_for_people(count, text):
    assert size(count) == text


@pytest.mark.skipif(sys.platform == "win32", reason="no file can be called so there")
@pytest.mark.parametrize("name", ["lr:100:b:x", ":smile:", "tab\there", "[bold]x[/]"])
def test_what_a_program_reads_is_what_was_written(cli, tmp_path, name):
    """rich would put pictures in the place of words between colons, and spaces in that of tabs."""
    run = tmp_path / name
    code, out, _ = cli("train", *TINY, "--out", run, "--json")
    assert code == 0
    assert Path(json.loads(out)["run"]).is_dir()
    code, out, _ = cli("train", *TINY, "--out", run)
    assert out.endswith(f"run            {run}\n")
    (tmp_path / "mine.toml").write_text(f'name = "mine"\ndescription = {json.dumps(name)}\n')
    code, out, _ = cli("recipes", "mine.toml")
    assert recipe_file.from_toml(out, "printed").description == name
    code, _, err = cli("evaluate", f"nowhere/{name}")
    assert err == f"error: there is no run folder or ticket {f'nowhere/{name}'!r}\n"


def test_a_name_that_is_no_text_is_printed_byte_by_byte(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    console.say("run ρ \udcff")
    console.say("half of a character: \ud800")
    assert stream.buffer.getvalue() == "run ρ ".encode() + b"\xff\nhalf of a character: \\ud800\n"


def test_nothing_is_written_where_nothing_should_be(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    console.write("there is no stdout")
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(console.out, "quiet", True)
    console.write("another rank talks")
    assert stream.buffer.getvalue() == b""


@pytest.mark.parametrize(
    ("command", "shown"), [(["data", "status"], rb"1,797 images of 8\xd78"), (WITH_GREEK, rb"\u03b5 = 0.1")]
)
def test_a_table_is_shown_whatever_the_encoding(cli, monkeypatch, command, shown):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    code, _, err = cli(*command)
    assert (code, err) == (0, "")
    stream.flush()
    assert shown in stream.buffer.getvalue()


@pytest.mark.skipif(sys.platform == "win32", reason="pipes break in another way there")
@pytest.mark.parametrize("command", [["recipes", "digits"], ["recipes", "digits", "--json"], ["recipes"]])
def test_a_reader_that_is_gone_gets_no_traceback(command):
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-m", "iterand", *command], stdout=writer, stderr=subprocess.PIPE, timeout=120
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, b"")


def test_a_record_of_another_program_gets_one_sentence(cli, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "record.json").write_text("{}")
    code, out, err = cli("train", "--out", "run")
    assert (code, out) == (1, "")
    assert err == (
        f"error: run{os.sep}record.json is not a record that can be used: its format is None; this version reads "
        "'iterand record 1'; remove it, choose another --out, or use --fresh to replace the run\n"
    )
