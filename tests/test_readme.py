"""README.md: its code runs as printed, and it stays short."""

import re
from pathlib import Path

import torch

from test_docs import MyNetwork, blocks, loader

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_code_runs_as_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first, second = blocks(README)
    names = {"MyNetwork": MyNetwork, "loader": loader()}
    exec(first, names)
    images = names["loader"][0][0]
    assert torch.equal(names["model"].eval()(images), names["plain"].eval()(images))
    assert (tmp_path / "mine.ticket").stat().st_size < 4 * (8 * 9 + 288 * 10)
    assert "rounds of randomization" in capsys.readouterr().out
    exec(second, names)
    for _ in range(10_000):
        for stepper in names["steppers"]:
            stepper.step()
    layers = names["iterand"].summary(names["model"])
    assert layers.kept == round(0.1 * layers.total)
    assert layers.rounds == (10_000 - 300) // 300


def test_it_is_short_and_starts_with_code():
    lines = README.splitlines()
    assert len(lines) <= 150
    assert lines.index("```python") < 35


def test_the_two_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    for command in ("quickstart", "test", "docs"):
        assert f"make {command}" in README
        assert f"\n{command}:" in makefile


def test_the_commands_of_the_table_exist():
    from iterand.cli.main import app

    commands = {entry.name or entry.callback.__name__ for entry in app.registered_commands}
    commands |= {entry.name for entry in app.registered_groups}
    assert set(re.findall(r"`iterand (\w+)", README)) == commands
