"""Why a pruned LSTM hardly learns from film reviews: one change at a time, on a core of a CPU.

Run from the repository: python tools/probe_reviews.py DATA_DIR START [WORDS EPOCHS] > FILE, with a START of those below
and how many words of each review are read, the last ones, where its verdict stands.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import iterand
from iterand.lab.data.dataset import Options
from iterand.lab.data.imdb import load, locate
from iterand.lab.data.text import TextSplit
from iterand.lab.networks.convolutional import kaiming_uniform_
from iterand.lab.networks.lstm import LSTMClassifier

STARTS = {
    "pruned": "embedding of ±0.14, no biases",
    "pruned-open": "the same, but forget gates begin open: their bias is 1",
    "pruned-large": "the same, but words are as far apart as torch begins with: embedding of ±1",
    "pruned-open-large": "both",
    "trained": "SGD: Kaiming uniform, biases of zero",
    "trained-torch": "SGD from where torch begins: embedding of N(0, 1), biases up to 1/16",
}
BATCH, SEED = 64, 0


def start(name: str) -> tuple[LSTMClassifier, list[torch.nn.Parameter], float]:
    """A network, what is trained of it, and at which rate (Appendix C.6)."""
    torch.manual_seed(SEED)
    network = LSTMClassifier(bidirectional=False, forget_bias=1.0 if "open" in name else 0.0)
    if name.startswith("trained"):
        if name == "trained":
            kaiming_uniform_(network, seed=SEED)
        return network, list(network.parameters()), 1.0
    iterand.prune_(network, 0.5, weights="signed_constant", seed=SEED)
    network.set_gates_()
    if "large" in name:
        embedding = iterand.masked_layers(network)["embedding.weight"].weight
        embedding.copy_(embedding.sign())
    return network, iterand.scores(network), 2.5


def shortened(split: TextSplit, count: int, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """The last words of the first reviews, how many they are, and whether they are liked."""
    tokens, lengths, labels = torch.zeros(count, limit, dtype=torch.long), [], []
    for row, batch in zip(range(count), split.batches(torch.arange(count), 1)):
        words = batch.inputs[0][0, : int(batch.inputs[1])][-limit:]
        tokens[row, : len(words)] = words
        lengths.append(len(words))
        labels.append(float(batch.labels))
    return tokens, torch.tensor(lengths), torch.tensor(labels)


def run(folder: Path, name: str, words: int = 60, count: int = 5) -> dict[str, object]:
    """Edge-popup or SGD for some epochs."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    data = load(locate(folder), torch.device("cpu"), Options())
    tokens, lengths, labels = shortened(data.train, len(data.train), words)
    held_out = shortened(data.validation, 2500, words)
    network, parameters, rate = start(name)
    optimizer = torch.optim.SGD(parameters, lr=rate)
    epochs, began = [], time.perf_counter()
    for _ in range(count):
        network.train()
        loss_sum = 0.0
        for rows in torch.randperm(len(labels)).split(BATCH):
            optimizer.zero_grad()
            loss = binary_cross_entropy_with_logits(network(tokens[rows], lengths[rows]).squeeze(1), labels[rows])
            loss.backward()
            optimizer.step()
            loss_sum += float(loss.detach()) * len(rows)
        network.eval()
        with torch.no_grad():
            parts = zip(held_out[0].split(250), held_out[1].split(250))
            likes = torch.cat([network(*part) for part in parts]).squeeze(1) > 0
        accuracy = 100 * float((likes == held_out[2].bool()).float().mean())
        epochs.append({"train_loss": loss_sum / len(labels), "validation_accuracy": accuracy})
        print(name, epochs[-1], file=sys.stderr, flush=True)
    hardware = {"cores": os.cpu_count(), "threads": 1, "torch": torch.__version__}
    settings = {"words": words, "batch_size": BATCH, "seed": SEED, "learning_rate": rate, "sparsity": 0.5}
    seconds = time.perf_counter() - began
    return {"start": name, "is": STARTS[name], **settings, "epochs": epochs, "seconds": seconds, "hardware": hardware}


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])), indent=1))
