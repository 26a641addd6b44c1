"""Film reviews with word vectors that were trained before (results/README.md): do the paper's numbers rest on them?

Run from the repository: python docs/probe_word_vectors.py DATA_DIR VECTORS METHOD SEED [masked] > FILE, where VECTORS
is a text file of GloVe's form (a word and its 100 numbers a line, as in glove.6B.100d.txt) and METHOD sgd, edge_popup
or iterand. All else is as in the recipes lstm and lstm-sgd. SGD trains the vectors on; a network that is pruned leaves
them as they are or, if "masked" is said, prunes them like its weights.
"""

import hashlib
import json
import platform
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import iterand
from iterand.data.dataset import Dataset
from iterand.data.imdb import load, locate
from iterand.data.options import Options
from iterand.data.sequences import TextSplit
from iterand.data.text import Vocabulary
from iterand.experiments.library import find_recipe
from iterand.networks.lstm import LSTMClassifier
from iterand.training.outputs import correct_of, loss_of

EVALUATION_BATCH = 250
METHODS = {"sgd": "lstm-sgd", "edge_popup": "lstm", "iterand": "lstm"}


def word_vectors(path: Path, vocabulary: Vocabulary, seed: int) -> tuple[Tensor, int]:
    """The vectors of a vocabulary and how many the file knows; others are N(0, 1), unknown and padding zero."""
    vectors = torch.randn(len(vocabulary), 100, generator=torch.Generator().manual_seed(seed))
    vectors[:2] = 0
    rows, known = {word: row for row, word in enumerate(vocabulary.words, start=2)}, 0
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            word, _, numbers = line.rstrip("\n").partition(" ")
            if word in rows:
                vectors[rows[word]] = torch.tensor([float(number) for number in numbers.split(" ")])
                known += 1
    return vectors, known


def measured(network: LSTMClassifier, split: TextSplit) -> dict[str, float]:
    """Mean loss and accuracy in percent."""
    network.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for batch in split.batches(split.grouped(torch.arange(len(split)), EVALUATION_BATCH), EVALUATION_BATCH):
            outputs = network(*batch.inputs)
            loss += float(loss_of(outputs, batch.labels, reduction="sum"))
            correct += int(correct_of(outputs, batch.labels))
    return {"loss": loss / len(split), "accuracy": 100 * correct / len(split)}


def start(method: str, vectors: Tensor, seed: int, masked: bool) -> tuple[LSTMClassifier, list[nn.Parameter]]:
    """A network that knows its words, and what is trained of it."""
    torch.manual_seed(seed)
    network = LSTMClassifier(bidirectional=False, vocabulary_size=len(vectors), forget_bias=1.0)
    network.set_gates_()
    with torch.no_grad():
        network.embedding.weight.copy_(vectors)
    if method == "sgd":
        return network, list(network.parameters())
    if not masked:
        network.embedding.requires_grad_(False)
    iterand.prune_(network, 0.5, weights="signed_constant", exclude=() if masked else "embedding", seed=seed)
    network.set_gates_()
    if masked:
        iterand.masked_layers(network)["embedding.weight"].weight.copy_(vectors)
    return network, iterand.scores(network)


def run(folder: Path, words: Path, method: str, seed: int, masked: bool = False) -> dict[str, object]:
    """The whole search or training; the epoch of the lowest validation loss is tested."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_flush_denormal(True)
    found = locate(folder)
    if found is None:
        raise SystemExit(f"there are no film reviews in {folder}; see docs/data.md")
    data: Dataset[TextSplit] = load(found, device, Options())
    vectors, known = word_vectors(words, data.train.vocabulary, seed)
    recipe = find_recipe(METHODS[method])
    network, parameters = start(method, vectors, seed, masked)
    network.to(device)
    optimizer = torch.optim.SGD(parameters, lr=recipe.learning_rate.initial)
    rounds = None
    if method == "iterand":
        rounds = iterand.IterativeRandomization(network, recipe.method.period, recipe.method.rate)
    size, order = recipe.training.batch_size, torch.Generator().manual_seed(seed)
    epochs, best, began = [], {"loss": float("inf")}, time.perf_counter()
    for epoch in range(1, recipe.training.epochs + 1):
        network.train()
        total = 0.0
        drawn = data.train.grouped(torch.randperm(len(data.train), generator=order), size)
        for batch in data.train.batches(drawn, size):
            optimizer.zero_grad()
            loss = loss_of(network(*batch.inputs), batch.labels)
            loss.backward()
            optimizer.step()
            if rounds:
                rounds.step()
            total += float(loss.detach()) * len(batch.labels)
        validation = measured(network, data.validation)
        if validation["loss"] < best["loss"]:
            best = {"epoch": epoch, **validation, "test_accuracy": measured(network, data.test)["accuracy"]}
        epochs.append({"train_loss": total / len(data.train)} | {f"validation_{k}": v for k, v in validation.items()})
        print(method, seed, epoch, epochs[-1], file=sys.stderr, flush=True)
    return {
        "method": method,
        "masked": masked,
        "seed": seed,
        "best": best,
        "epochs": epochs,
        "words": len(vectors) - 2,
        "known_words": known,
        "vectors_sha256": hashlib.sha256(words.read_bytes()).hexdigest(),
        "recipe": METHODS[method],
        "seconds": time.perf_counter() - began,
        "hardware": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    data_dir, vectors_file, name, number, *rest = sys.argv[1:]
    print(json.dumps(run(Path(data_dir), Path(vectors_file), name, int(number), rest == ["masked"]), indent=1))
