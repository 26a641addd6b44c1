"""Folders for the Hugging Face Hub: a ticket, a configuration and a model card."""

import json
import math

import pytest
import torch
from torch import nn

import iterand
from pruned import INPUTS, network

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")

from iterand.integrations import hub


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


class Perceptron(nn.Module, hub.TicketHubMixin):
    def __init__(self, width: int = 16, depth: int = 1) -> None:
        super().__init__()
        self.hidden = nn.ModuleList([nn.Linear(8, 8) for _ in range(depth)])
        self.last = nn.Linear(8, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.hidden:
            inputs = layer(inputs).relu()
        return self.last(inputs)


def test_any_model(tmp_path):
    model = network(weights="signed_constant")
    hub.save_pretrained(model, tmp_path / "a", config={"width": 16}, metrics={"accuracy": 91.5})
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["README.md", "config.json", "model.ticket"]
    loaded = hub.from_pretrained(tmp_path / "a", plain())
    assert torch.equal(loaded(INPUTS), model.eval()(INPUTS))
    assert not loaded.training
    assert json.loads((tmp_path / "a" / "config.json").read_text()) == {"width": 16}
    assert iterand.read_ticket(tmp_path / "a" / "model.ticket").metrics == {"accuracy": 91.5}
    card = (tmp_path / "a" / "README.md").read_text()
    head, _, body = card.removeprefix("---\n").partition("---\n")
    assert "library_name: iterand" in head
    assert "- iterand" in head
    assert "- 77 of 192 weights kept\n- accuracy: 91.5\n" in body
    assert "Sequential" in body


def test_a_card_that_was_written_stays(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    hub.save_pretrained(network(), tmp_path)
    hub.save_pretrained(network(), str(tmp_path))
    assert (tmp_path / "README.md").read_text() == "mine"
    assert json.loads((tmp_path / "config.json").read_text()) == {}


def test_a_configuration_is_replaced_as_a_whole(tmp_path):
    hub.save_pretrained(network(), tmp_path / "a", config={"width": 16})
    (tmp_path / "before").hardlink_to(tmp_path / "a" / "config.json")
    hub.save_pretrained(network(), tmp_path / "a", config={"width": 8})
    found = [json.loads(path.read_text()) for path in (tmp_path / "before", tmp_path / "a" / "config.json")]
    assert found == [{"width": 16}, {"width": 8}]


def test_a_class_with_the_mixin(tmp_path):
    model = iterand.prune_(Perceptron(depth=3, width=5), 0.5)
    iterand.randomize_(model, 0.5)
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "config.json", "model.ticket"]
    assert json.loads((tmp_path / "config.json").read_text()) == {"depth": 3, "width": 5}
    loaded = Perceptron.from_pretrained(tmp_path)
    assert type(loaded) is Perceptron
    assert not loaded.training
    assert torch.equal(loaded(INPUTS), model.eval()(INPUTS))
    assert "- 116 of 232 weights kept" in (tmp_path / "README.md").read_text()
    folder = hub.from_pretrained(tmp_path, Perceptron(depth=3, width=5))
    assert torch.equal(folder(INPUTS), model(INPUTS))


def test_a_class_with_a_card_of_its_own(tmp_path):
    class Own(Perceptron, model_card_template="---\n{{ card_data }}\n---\n{{ name }} by {{ author }}: {{ numbers }}\n"):
        pass

    iterand.prune_(Own(width=5), 0.5).save_pretrained(tmp_path, model_card_kwargs={"author": "Ann"})
    assert (tmp_path / "README.md").read_text().endswith("---\nOwn by Ann: - 52 of 104 weights kept")


def test_arguments_of_releases_of_huggingface_hub_before_1_0(tmp_path):
    model = iterand.prune_(Perceptron(width=5), 0.5)
    model.save_pretrained(tmp_path)
    download = dict.fromkeys(["revision", "cache_dir", "proxies", "resume_download", "token"])
    download |= {"force_download": False, "local_files_only": False}
    loaded = Perceptron._from_pretrained(model_id=str(tmp_path), **download, width=5)
    assert torch.equal(loaded(INPUTS), model.eval()(INPUTS))


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("nothing/of/that/kind", "'nothing/of/that/kind' is no folder that exists, and no repository 'user/name'"),
        (".", r"\. has no model\.ticket; save_pretrained writes one"),
    ],
)
def test_what_is_no_ticket(source, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(iterand.TicketError, match=f"^{sentence}$"):
        hub.from_pretrained(source, plain())


def test_a_repository_is_downloaded(tmp_path, monkeypatch):
    model = network()
    hub.save_pretrained(model, tmp_path / "a")
    asked = []

    def download(repository: str, file: str, **options: object) -> str:
        asked.append((repository, file, options))
        return str(tmp_path / "a" / file)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    loaded = hub.from_pretrained("user/name", plain(), revision="v1")
    assert asked == [("user/name", "model.ticket", {"revision": "v1"})]
    assert torch.equal(loaded(INPUTS), model(INPUTS))


def test_a_repository_that_cannot_be_reached_may_have_a_ticket(tmp_path):
    with pytest.raises(iterand.TicketError, match=r"the model\.ticket of 'user/name' is not in the cache, and the Hub"):
        hub.from_pretrained("user/name", plain(), local_files_only=True, cache_dir=tmp_path)


def test_models_that_cannot_be_saved_leave_no_folder(tmp_path):
    with pytest.raises(ValueError, match="Sequential has no masked layer; call prune_ on it first"):
        hub.save_pretrained(plain(), tmp_path / "a")
    for wrong in (torch.device("cpu"), math.nan):
        with pytest.raises(
            ValueError, match=r"config cannot be written as JSON: .*; give numbers, strings, lists and dicts"
        ):
            hub.save_pretrained(network(), tmp_path / "a", config={"key": wrong})
    assert not (tmp_path / "a").exists()
    hub.save_pretrained(network(), tmp_path / "b")
    with pytest.raises(iterand.TicketError, match=r"model\.ticket"):
        hub.from_pretrained(tmp_path / "b", nn.Linear(8, 4))
