"""The code in README.md and docs/beyond.md, run as it is printed."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import iterand

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BEYOND = (ROOT / "docs" / "beyond.md").read_text()


def blocks(page):
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


class MyNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(8 * 36, 10)

    def forward(self, images):
        return self.head(self.features(images))


@pytest.fixture(scope="module")
def names():
    generator = torch.Generator().manual_seed(0)
    loader = [
        (torch.randn(8, 1, 8, 8, generator=generator), torch.randint(10, (8,), generator=generator)) for _ in range(3)
    ]
    return {"MyNetwork": MyNetwork, "loader": loader}


def test_the_code_runs_as_printed(names, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first, second = blocks(README)
    exec(first, names)
    images = names["loader"][0][0]
    assert torch.equal(names["model"].eval()(images), names["plain"].eval()(images))
    assert (tmp_path / "mine.ticket").stat().st_size < 4 * (8 * 9 + 288 * 10)
    assert "bits a weight" in capsys.readouterr().out
    exec(second, names)
    assert set(names["model"].state_dict()) == set(MyNetwork().state_dict())


def test_our_recipe_in_a_loop_of_ones_own(names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _ = blocks(BEYOND)
    exec(code, names)
    model, images = names["model"], names["loader"][0][0]
    layers = iterand.masked_layers(model).values()
    assert sum(int(layer.mask.sum()) for layer in layers) == round(0.1 * sum(layer.weight.numel() for layer in layers))
    assert any(bool((layer.draw > 0).any()) for layer in layers)
    plain = iterand.load_ticket("mine.ticket", MyNetwork()).eval()
    assert torch.equal(plain(images), model.eval()(images))
    found = torch.cat([images for images, _ in names["loader"]])
    with torch.no_grad():
        inputs = plain.features[0](found)
    torch.testing.assert_close(plain.features[1].running_mean, inputs.mean((0, 2, 3)))


def test_an_lstm_of_ones_own_begins_with_open_gates():
    model = nn.Module()
    model.lstm, model.classifier = nn.LSTM(4, 8), nn.Linear(8, 2)
    _, code = blocks(BEYOND)
    exec(code, {"torch": torch, "iterand": iterand, "model": model})
    assert set(iterand.masked_layers(model)) == {"lstm.weight_ih_l0", "lstm.weight_hh_l0", "classifier.weight"}
    assert torch.equal(model.lstm.bias_ih_l0.view(4, 8), torch.tensor([0.0, 1.0, 0.0, 0.0])[:, None].expand(4, 8))
    assert not model.lstm.bias_hh_l0.any()


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_two_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    for command in ("quickstart", "test"):
        assert f"make {command}" in README
        assert f"\n{command}:" in makefile
