"""Film reviews: Appendix C.6."""

from iterand.experiments.experiment import Experiment
from iterand.experiments.paper.cells import cell, start


def imdb() -> Experiment:
    """Two recurrent networks, three methods."""
    cells = (
        cell("imdb", start(base, method), network=network, method=method)
        for network, base in (("LSTM", "lstm"), ("BiLSTM", "bilstm"))
        for method in ("IteRand (SC)", "edge-popup (SC)", "SGD")
    )
    return Experiment("imdb", "Film reviews, liked or not", tuple(cells), seeds=5, where="Table 10", plot="bars")
