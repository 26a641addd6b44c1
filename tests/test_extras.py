"""Without the extras: what needs one says so in a sentence, and the rest works."""

import importlib
import json
import re
import subprocess
import sys

import pytest

from iterand.errors import MissingExtraError, extra

LAB = "sklearn scipy PIL matplotlib jinja2 tensorboard pooch requests tomli_w"
LINES = {
    "recipes": "",
    "recipes digits --json": "",
    "recipes digits": "writing a recipe as TOML needs tomli-w, which is not installed",
    "reproduce": "",
    "reproduce digits --seeds 1": "training by a recipe needs tensorboard, which is not installed",
    "train --device cpu": "training by a recipe needs tensorboard, which is not installed",
    "evaluate a.ticket": "digits is not in data; it comes with scikit-learn",
    "report . --format md": "",
    "report .": "the HTML report needs jinja2, which is not installed",
    "theory width": "the theory needs scipy, which is not installed",
    "theory simulate --plot x.svg": "drawing needs matplotlib, which is not installed",
    "data status": "",
    "data fetch cifar10": "downloading data needs pooch, which is not installed",
    "bench select --size 100 --repeats 1": "",
    "ticket info a.ticket": "",
    "ticket verify a.ticket": "",
    "export a.ticket --format safetensors": "",
}
CORE = """
import contextlib, io, json, sys
sys.modules.update(dict.fromkeys(sys.argv[1].split()))  # as if they were not installed
import iterand
from iterand.cli.main import main
from iterand.lab.networks import build_network

model = iterand.prune_(build_network("digits_conv", classes=10), 0.5)
options = {"name": "digits_conv", "classes": 10}
iterand.save_ticket(model, "a.ticket", recipe={"network": options, "data": {"name": "digits"}})
iterand.load_ticket("a.ticket")
for line in json.loads(sys.argv[2]):
    sys.argv[1:] = line.split()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code
    print(json.dumps([line, code or 0, out.getvalue(), err.getvalue()]))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Exit code, stdout and stderr of each line, in a process without the packages of the lab."""
    folder = tmp_path_factory.mktemp("core")
    command = [sys.executable, "-c", CORE, LAB, json.dumps(list(LINES))]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (folder / "runs").exists()
    return {line: rest for line, *rest in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize(("line", "sentence"), LINES.items())
def test_a_missing_extra_is_said_and_the_rest_works(answers, line, sentence):
    code, out, err = answers[line]
    if sentence:
        assert (code, out) == (1, "")
        assert err.startswith(f"error: {sentence}")
        assert err.endswith("pip install 'iterand[lab]'\n")
        assert err.count("\n") == 1
    else:
        assert (code, err) == (0, "")
        assert out


@pytest.mark.parametrize(
    ("package", "name"), [("sklearn.datasets", "scikit-learn"), ("PIL.Image", "pillow"), ("tomli_w", "tomli-w")]
)
def test_packages_are_called_as_pip_knows_them(monkeypatch, package, name):
    monkeypatch.setitem(sys.modules, package.partition(".")[0], None)
    with (
        pytest.raises(MissingExtraError, match=rf"^this needs {name}, which is not installed; pip"),
        extra("lab", "this"),
    ):
        __import__(package)


@pytest.mark.parametrize(
    ("module", "packages", "sentence"),
    [
        ("lightning", "lightning lightning.pytorch pytorch_lightning", "the Lightning callback needs lightning"),
        ("transformers", "transformers", "the callback for Trainer needs transformers"),
        ("hub", "huggingface_hub", "the Hugging Face Hub needs huggingface_hub"),
    ],
)
def test_an_integration_without_its_package(module, packages, sentence, monkeypatch):
    for package in packages.split():
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"iterand.integrations.{module}", raising=False)
    expected = re.escape(f"{sentence}, which is not installed; pip install 'iterand[{module}]'")
    with pytest.raises(MissingExtraError, match=f"^{expected}$"):
        importlib.import_module(f"iterand.integrations.{module}")


def test_other_errors_are_left_as_they_are():
    with pytest.raises(ModuleNotFoundError, match=r"iterand\.nothing"), extra("lab", "this"):
        import iterand.nothing  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name"), extra("lab", "this"):
        from json import nothing  # noqa: F401
