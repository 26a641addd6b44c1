"""``iterand theory``: what is printed, drawn and refused."""

import io
import json
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from iterand.cli import console, theory
from iterand.cli.theory import app
from iterand.ticket import read_ticket


def run(*arguments):
    result = CliRunner().invoke(app, list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


class TestWidth:
    def test_table(self):
        out = run("width", "--rounds", "77", "--trials", "200")
        assert re.search(r"77\s*│\s*2\s*│\s*6\s*│\s*6\b", out)
        assert "paper 77, repaired 174; at least 36" in " ".join(out.split())

    def test_json_over_many_rounds(self):
        result = json.loads(run("width", "--widths", "3,2,1", "--epsilon", "0.2", "--delta", "0.1", "--json"))
        assert result["target_widths"] == [3, 2, 1]
        assert result["rounds_for_twice_the_width"] == {
            "paper": 795,
            "repaired": result["rows"][-1]["rounds"],
            "at_least": None,
        }
        assert [row["rounds"] for row in result["rows"][:6]] == [1, 2, 3, 4, 6, 8]
        claim = next(row for row in result["rows"] if row["rounds"] == 795)
        assert claim["paper"] == [6, 4]
        assert result["rows"][-1]["repaired"] == [6, 4]

    def test_plot(self, tmp_path):
        path = tmp_path / "pictures" / "width.svg"
        run("width", "--epsilon", "0.5", "--rounds", "8", "--trials", "100", "--plot", str(path))
        first = path.read_bytes()
        assert b"repaired" in first
        assert b"simulated" in first
        run("width", "--epsilon", "0.5", "--rounds", "8", "--trials", "100", "--plot", str(path))
        assert path.read_bytes() == first


class TestSimulate:
    def test_json(self, tmp_path):
        path = tmp_path / "failure.png"
        out = run("simulate", "--epsilon", "0.3", "--trials", "500", "--weight", "0.5", "--json", "--plot", str(path))
        result = json.loads(out)
        assert result["weight"] == 0.5
        last = result["rows"][-1]
        assert last["simulated_half"]["low"] <= last["exact_half"] <= last["simulated_half"]["high"]
        assert [(row["width"], row["rounds"]) for row in result["exhaustive"]] == [(2, 1), (2, 4), (4, 1), (4, 4)]
        assert path.read_bytes().startswith(b"\x89PNG")

    def test_tables(self):
        out = run("simulate", "--rounds", "77", "--trials", "2000")
        assert re.search(r"77\s*│\s*0\.0246\s*│\s*0\.264\s*│\s*0\.2", out)
        assert "every choice tried" in out


class TestConstruct:
    def test_json_and_table(self, tmp_path):
        small = ("--hidden", "2", "--epsilon", "0.9", "--trials", "2", "--seed", "3")
        result = json.loads(run("construct", *small, "--json"))
        assert result["within_epsilon"] == result["trials"] == 2
        assert [row["seed"] for row in result["rows"]] == [3, 4]
        assert result["largest_proven"] == max(row["proven"] for row in result["rows"]) <= 0.9
        again = json.loads(run(*result["command"].removeprefix("iterand theory ").split()))
        assert again == result
        path = tmp_path / "first.ticket"
        assert "2 of 2" in run("construct", *small, "--ticket", str(path))
        assert [shape for _, shape in read_ticket(path).shapes().values()] == [(128, 64), (2, 128), (4, 2), (10, 4)]


class TestSignedConstants:
    def test_width(self, tmp_path):
        path = tmp_path / "width.svg"
        options = ("--weights", "signed_constant", "--trials", "300")
        result = json.loads(run("width", *options, "--json", "--plot", str(path)))
        assert (result["units"], result["rounds_for_the_least_width"], result["kaiming_widths"]) == (5, 9, [100])
        assert [row["rounds"] for row in result["rows"]] == [1, 2, 3, 4, 6, 8, 9]
        assert [row["exact"] for row in result["rows"]] == [38, 15, 12, 11, 10, 10, 10]
        assert [row["layers"] for row in result["depths"]] == [2, 3]
        assert b"Theorem D" in path.read_bytes()
        out = " ".join(run("width", *options, "--rounds", "2").split())
        assert re.search(r"2 │ 44 │ 15 │ 1\d", out)
        assert "two layers need a width of at least 10 at any R" in out

    def test_width_of_a_network(self):
        result = json.loads(run("width", "--weights", "signed_constant", "--widths", "64,12,10", "--json"))
        assert result["rows"][0]["bound"] == [94250, 16018]
        assert result["rows"][-1]["bound"] == [35536, 6120]  # 2·⌊64 · 277.63⌋ and 2·⌊12 · 255.06⌋
        assert result["depths"] == []

    def test_simulate(self, tmp_path):
        path = tmp_path / "failure.svg"
        options = ("--weights", "signed_constant", "--weight", "-0.5", "--trials", "1000", "--epsilon", "0.05")
        result = json.loads(run("simulate", *options, "--json", "--plot", str(path)))
        assert result["widths"] == [10, 20]
        for row in result["rows"]:
            assert row["narrow_simulated"]["low"] <= row["narrow"] <= row["narrow_simulated"]["high"]
        assert {"widths": [6, 6], "best": 9, "digits": 6, "bound": 9} in result["exhaustive"]
        assert "every choice tried" in run("simulate", *options, "--rounds", "2")
        assert b"width 20" in path.read_bytes()

    def test_construct(self):
        small = ("--weights", "signed_constant", "--hidden", "2", "--epsilon", "0.9", "--trials", "2")
        result = json.loads(run("construct", *small, "--json"))
        assert result["within_epsilon"] == result["trials"] == 2
        assert "--weights signed_constant" in result["command"]
        assert json.loads(run(*result["command"].removeprefix("iterand theory ").split())) == result


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("width", "--epsilon", "0"), "epsilon is 0; it must lie between 0 and 1"),
        (("width", "--widths", "3,two"), "widths are '3,two'; name whole numbers"),
        (("width", "--rounds", "0"), "rounds has 0"),
        (("simulate", "--delta", "1"), "delta is 1; it is a probability"),
        (("simulate", "--weight", "1.5"), "a weight is 1.5"),
        (("simulate", "--trials", "0"), "trials has 0"),
        (("construct", "--trials", "0"), "trials has 0"),
        (("construct", "--hidden", "0"), "hidden has 0"),
        (("construct", "--rounds", "3", "--epsilon", "0.5"), "building with 3 rounds takes"),
        (
            ("width", "--epsilon", "1e-5"),
            "epsilon 1e-05 and 1 round takes about 3e+14 draws, and at most 1e+11 are made",
        ),
        (("width", "--delta", "1e-320"), "delta is 9.99989e-321; it must be at least 1e-100"),
        (("width", "--widths", "99999999999,1"), "widths has 99999999999; it must be at most 1e+09"),
        (("width", "--rounds", "9" * 400), "it must be at most 1e+150"),
        (("simulate", "--epsilon", "1e-6"), "simulating epsilon 1e-06 takes about"),
        (("simulate", "--trials", "9" * 200), "trials has 9999"),
        (("construct", "--epsilon", "1e-9", "--hidden", "2"), "building 1 network with up to"),
        (("construct", "--hidden", "100000"), "hidden has 100000; its construction has at least"),
        (("width", "--weights", "signed_constant", "--epsilon", "1e-6"), "a weight takes 500000 neurons on each side"),
        (("width", "--weights", "signed_constant", "--rounds", "0"), "rounds has 0"),
        (("simulate", "--weights", "signed_constant", "--weight", "0.05"), "0 is within epsilon 0.1 of it"),
        (("simulate", "--weights", "signed_constant", "--trials", "0"), "trials has 0"),
        (("construct", "--weights", "signed_constant", "--plot", "a.svg"), "R does not change it; leave it out"),
        (("width", "--plot", "picture.doc"), "'picture.doc' has no ending for a picture; use one of"),
    ],
)
def test_bad_input_is_left_to_main(arguments, message):
    result = CliRunner().invoke(app, list(arguments))
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
    assert result.stdout == ""


def test_unknown_option_is_a_usage_error():
    assert CliRunner().invoke(app, ["width", "--epsilom", "1"]).exit_code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("width", "--epsilon", "0.5", "--trials", "20"),
        ("simulate", "--epsilon", "0.5", "--trials", "20"),
        ("construct", "--epsilon", "0.9", "--hidden", "2"),
    ],
)
def test_a_long_computation_says_how_far_it_is(cli, monkeypatch, arguments):
    monkeypatch.setattr(console, "_SECONDS_A_LINE", -1.0)
    code, out, err = cli("theory", *arguments, "--json")
    assert code == 0
    json.loads(out)
    shares = [int(share) for share in re.findall(r"^(?:simulating|building): (\d+) %$", err, re.MULTILINE)]
    assert shares == sorted(shares)
    assert len(set(shares)) > 2
    assert shares[-1] > 60


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_a_spinner_and_then_a_bar(cli, monkeypatch):
    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(theory, "err", Console(file=screen, stderr=True, width=80))
    monkeypatch.setattr(console, "err", theory.err)
    code, out, _ = cli("theory", "width", "--epsilon", "0.5", "--trials", "20", "--json")
    assert code == 0
    json.loads(out)
    assert "loading" in screen.getvalue()
    assert "simulating" in screen.getvalue()
    assert "100%" in screen.getvalue()


def test_a_computation_of_a_few_seconds_prints_a_line(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    with console.counting("simulating", 100.0) as advance:
        for now, done in ((1.0, 10), (2.5, 20), (3.0, 5), (12.0, 5), (13.0, 20)):  # noqa: B007
            advance(done)
    assert capsys.readouterr().err == "simulating: 30 %\nsimulating: 60 %\n"


def test_a_long_computation_can_be_interrupted(cli, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("iterand.lab.theory.simulate.search", interrupted)
    code, out, err = cli("theory", "width")
    assert code != 0
    assert out == ""
    assert "Traceback" not in err
