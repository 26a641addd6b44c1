"""The scripts in tools: each can be imported, and the stages that tools/ticket.py measures exist."""

import importlib.util
from pathlib import Path

import pytest

import iterand
from iterand.lab.networks import build_network
from ticket_models import searched

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture
def imported(monkeypatch):
    pytest.importorskip("sklearn", reason="the lab is not installed")
    monkeypatch.syspath_prepend(TOOLS)

    def load(name):
        spec = importlib.util.spec_from_file_location(f"tool_{name}", TOOLS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize("name", sorted(path.stem for path in TOOLS.glob("*.py")))
def test_each_can_be_imported(imported, name):
    assert imported(name).__doc__


def test_the_stages_of_a_ticket_exist(imported, tmp_path):
    tool, network = imported("ticket"), {"name": "digits_conv", "width_factor": 0.5}
    model, path = searched(build_network(**network), weights="signed_constant"), tmp_path / "a.ticket"
    recipe = {"network": network}
    for action, stages in [
        (lambda: iterand.save_ticket(model, path, recipe=recipe), tool.WRITING),
        (lambda: iterand.load_ticket(path), tool.LOADING),
    ]:
        shares = tool._stages(action, stages, 1)["share_percent"]
        assert list(shares) == [*stages, "the rest"]
        assert all(0 <= share <= 100 for share in shares.values())
    with pytest.raises(SystemExit, match=r"not called.*'gone'"):
        tool._stages(lambda: iterand.load_ticket(path), {"some": [("load.py", "gone")]}, 1)
