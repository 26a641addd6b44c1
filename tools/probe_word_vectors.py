"""Film reviews with pretrained word vectors (docs/explanation/reproduction.md): do the paper's numbers rest on them?

Run from the repository: python tools/probe_word_vectors.py DATA_DIR VECTORS METHOD SEED FILE [WORDS [NETWORK]]. VECTORS
is a text file of GloVe's form (a word and its 100 numbers a line, as in glove.6B.100d.txt); words that it does not have
are N(0, 1), so with an empty file all are. METHOD is sgd, edge_popup or iterand. FILE is written after every epoch.

Rates, batches, epochs and forget gates are those of the recipes NETWORK and NETWORK-sgd, with lstm (the default) or
bilstm, and so are the random weights of a network that is pruned; words are not multiplied by 10. SGD begins where
torch begins, and trains the vectors on. WORDS says what becomes of the vectors beside a pruned network: "fixed" (the
default) leaves them as they are, "masked" prunes them too (with iterand, what is pruned of them at a round becomes a
signed constant, as its weights do), and "trained" trains them by SGD at the learning rate of the scores.
"""

import hashlib
import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import iterand
from iterand.lab.data.dataset import Dataset, Options
from iterand.lab.data.imdb import load, locate
from iterand.lab.data.text import TextSplit, Vocabulary
from iterand.lab.experiments.library import find_recipe
from iterand.lab.networks.lstm import LSTMClassifier
from iterand.lab.training.environment import choose_device, compute_settings, describe
from iterand.lab.training.steps import evaluate, loss

METHODS = ("sgd", "edge_popup", "iterand")
NETWORKS = ("lstm", "bilstm")
WORDS = ("fixed", "masked", "trained")


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


def start(
    method: str, vectors: Tensor, seed: int, words: str, bidirectional: bool
) -> tuple[LSTMClassifier, list[nn.Parameter]]:
    """A network that knows its words, and what is trained of it."""
    torch.manual_seed(seed)
    network = LSTMClassifier(bidirectional=bidirectional, vocabulary_size=len(vectors), forget_bias=1.0)
    network.set_gates_()
    with torch.no_grad():
        network.embedding.weight.copy_(vectors)
    if method == "sgd":
        return network, list(network.parameters())
    exclude = () if words == "masked" else "embedding"
    iterand.prune_(network, 0.5, weights="signed_constant", exclude=exclude, seed=seed)
    network.set_gates_()
    if words == "masked":
        iterand.masked_layers(network)["embedding.weight"].weight.copy_(vectors)
    network.embedding.requires_grad_(words == "trained")
    return network, [*iterand.scores(network), *(network.embedding.parameters() if words == "trained" else [])]


def run(folder: Path, path: Path, method: str, seed: int, file: Path, words: str, kind: str) -> None:
    """The whole search or training; of the epochs so far, that of the lowest validation loss is tested."""
    device = choose_device("auto")
    found = locate(folder)
    if found is None:
        raise SystemExit(f"there are no film reviews in {folder}; see docs/guides/data.md")
    data: Dataset[TextSplit] = load(found, device, Options())
    vectors, known = word_vectors(path, data.train.vocabulary, seed)
    recipe = find_recipe(f"{kind}-sgd" if method == "sgd" else kind)
    network, parameters = start(method, vectors, seed, words, bidirectional=kind == "bilstm")
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
            error = loss(network(*batch.inputs), batch.labels)
            error.backward()
            optimizer.step()
            if rounds:
                rounds.step()
            total += float(error.detach()) * len(batch.labels)
        validation = evaluate(network, data.validation, recipe, device)
        if validation["loss"] < best["loss"]:
            test = evaluate(network, data.test, recipe, device)
            best = {"epoch": epoch, **validation, "test_accuracy": test["accuracy"]}
        epochs.append({"train_loss": total / len(data.train)} | {f"validation_{k}": v for k, v in validation.items()})
        surroundings = describe(device)
        record = {
            "method": method,
            "vectors": words,
            "seed": seed,
            "best": best,
            "epochs": epochs,
            "words": len(vectors) - 2,
            "known_words": known,
            "vectors_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "recipe": recipe.name,
            "seconds": time.perf_counter() - began,
            **{key: surroundings[key] for key in ("commit", "torch", "hardware")},
        }
        file.write_text(json.dumps(record, indent=1) + "\n")
        print(method, seed, epoch, epochs[-1], file=sys.stderr, flush=True)


if __name__ == "__main__":
    if not 6 <= len(sys.argv) <= 8 or sys.argv[3] not in METHODS or not {*sys.argv[6:7]} <= {*WORDS}:
        raise SystemExit(__doc__)
    data_dir, vectors_file, name, number, target, *rest = sys.argv[1:]
    chosen = rest[0] if rest else "trained" if name == "sgd" else "fixed"
    lstm = rest[1] if len(rest) == 2 else "lstm"
    if lstm not in NETWORKS:
        raise SystemExit(__doc__)
    if name == "sgd" and chosen != "trained":
        raise SystemExit("sgd trains the vectors; leave out WORDS")
    with compute_settings(0):
        run(Path(data_dir), Path(vectors_file), name, int(number), Path(target), chosen, lstm)
