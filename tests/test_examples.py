"""The examples run as they stand."""

import importlib.util
import json
import re
import runpy
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zoo import import_timm

ROOT = Path(__file__).parents[1]


def test_a_model_of_ones_own(tmp_path):
    command = [sys.executable, ROOT / "examples" / "own_model.py", "--seeds", "1", "--epochs", "3"]
    answer = subprocess.run([*command, "--json", tmp_path / "a.json"], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr[-2000:]
    ways = json.loads((tmp_path / "a.json").read_text())["ways"]
    trained, paper, ours = (ways[name]["test_accuracies"][0] for name in ways)
    assert trained > ours > paper
    assert all(name in answer.stdout for name in ways)


@pytest.fixture
def example(tmp_path, monkeypatch, capsys):
    """Run an example in an empty folder and in this process, which has imported torch; gives what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(script, *arguments):
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        with torch.random.fork_rng():
            runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
        return capsys.readouterr().out.strip()

    return run


@pytest.mark.filterwarnings("ignore")  # what other packages warn of, release by release
def test_a_timm_model(example, tmp_path):
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    import_timm()
    printed = example("timm_model.py", "--epochs", "1", "--sparsity", "0.8")
    accuracy, size = re.search(r"(\S+) % of the test images, (\S+) kB in timm.ticket$", printed).groups()
    assert float(accuracy) > 75
    assert float(size) == pytest.approx((tmp_path / "timm.ticket").stat().st_size / 1000, abs=0.05)


@pytest.mark.filterwarnings("ignore")  # what other packages warn of, release by release
def test_an_encoder_fine_tuned_by_a_mask(example, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", *(f"w{n}" for n in range(20))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "encoder")
    torch.manual_seed(0)
    encoder = transformers.BertModel(transformers.BertConfig(vocab_size=len(words), **sizes))
    encoder.save_pretrained(tmp_path / "encoder")
    for name, count in (("train.csv", 600), ("test.csv", 60)):
        rows = [f"w{n % 20} w{n * 7 % 20} {('bad', 'good')[n % 2]} w{n * 3 % 20},{n % 2}" for n in range(count)]
        (tmp_path / name).write_text("\n".join(["text,label", *rows]) + "\n")
    script = "fine_tune_by_mask.py"
    assert len((ROOT / "examples" / script).read_text().splitlines()) < 60
    printed = example(script, "encoder", "train.csv", "test.csv")
    accuracy, size = re.search(r"(\S+) % of the test texts, (\S+) kB in task.ticket$", printed).groups()
    assert float(accuracy) > 80  # of two classes; the encoder is random
    assert float(size) == pytest.approx((tmp_path / "task.ticket").stat().st_size / 1000, abs=0.05)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        ([], 2, "the following arguments are required: encoder, CSV"),
        (["encoder", "train.csv"], 2, "the following arguments are required: CSV"),
        (["--help"], 0, "one for training, one for the test"),
    ],
)
def test_fine_tuning_says_what_it_needs(monkeypatch, capsys, arguments, code, sentence):
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.setattr(sys, "argv", ["fine_tune_by_mask.py", *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "examples" / "fine_tune_by_mask.py"))
    assert end.value.code == code
    assert sentence in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--sparsity", "1.5"], "sparsity is 1.5; it is the share of weights pruned, from 0 to 1"),
        (["--seeds", "0"], "--seeds is 0 and --epochs 60; both must be at least 1"),
        (["--json", "nowhere/a.json"], "--json is nowhere/a.json, in a folder that is not there"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["own_model.py", *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "examples" / "own_model.py"), run_name="__main__")
    assert end.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("sparsity", ["0.5", "0.9"])
def test_the_guide_says_what_its_records_say(sparsity):
    folder = ROOT / "results" / "records" / "benchmarks"
    record = json.loads((folder / f"own-model-{sparsity}.json").read_text())
    lines = [line.replace("*", "") for line in (ROOT / "docs" / "guides" / "recommended.md").read_text().splitlines()]
    for name, way in record["ways"].items():
        values = way["test_accuracies"]
        said = f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"
        assert any(line.startswith(f"| {name} |") and said in line for line in lines), (name, said)
