"""The cost model of docs/explanation/scaling.md: bytes, memory and time of a run on many GPUs.

python tools/scaling.py table [INPUTS]     from measured steps of one GPU, by default of scaling.json
python tools/scaling.py measure OUT        what a weight costs on this machine: scaling-host.json

Both records are in results/records/benchmarks.
"""

import argparse
import json
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from iterand import maskable
from iterand.lab.experiments.library import find_recipe
from iterand.lab.experiments.sweep import TRAINING_EXAMPLES
from iterand.lab.networks import build_network
from iterand.lab.training import environment, recipe_file
from iterand.lab.training.checkpoint import CHECKPOINT, snapshot, write_checkpoint
from iterand.lab.training.distributed import digests
from iterand.lab.training.recipe import Recipe
from iterand.lab.training.session import Session

INPUTS = Path(__file__).parents[1] / "results" / "records" / "benchmarks" / "scaling.json"
RANKS = (1, 8, 64)
RECIPES = ("imagenet-resnet34", "imagenet-resnet50", "imagenet-resnet101", "imagenet-wide-resnet50-2")

# Bytes a weight that a rank holds all the time: float32 weight, score, gradient and momentum, and a draw of one byte,
# which is two after 255 rounds.
HELD = {"weight": 4, "score": 4, "gradient": 4, "momentum": 4, "draw": 1}
SAVED = {"score": 4, "momentum": 4, "draw": 1}  # of these a checkpoint needs


@dataclass(frozen=True)
class Network:
    """What of a network the costs depend on."""

    weights: int
    norms: int
    channels: int

    @classmethod
    def of(cls, recipe: Recipe) -> "Network":
        """The network of an ImageNet recipe."""
        with torch.device("meta"):
            options = {"width_factor": recipe.network.width_factor, "classes": 1000}
            model = build_network(recipe.network.name, **options, seed=0)
        norms = [module.num_features for module in model.modules() if isinstance(module, _BatchNorm)]
        chosen = maskable.choose(model, None, (), ())
        return cls(sum(owners[0].parameter.numel() for owners in chosen.values()), len(norms), sum(norms))


@dataclass(frozen=True)
class Link:
    """What ranks are joined by: bytes a second that a rank can send, and the time of a small exchange."""

    bytes_per_second: float
    latency: float


def gradient_bytes(weights: int, ranks: int) -> float:
    """Bytes a rank sends in a step to average float32 gradients around a ring."""
    return 2 * (ranks - 1) / ranks * 4 * weights


def norm_bytes(norms: int, channels: int, ranks: int) -> float:
    """Bytes a rank sends in a step for batch norm.

    Forwards every rank gets mean, deviation and count from every other; backwards two sums a channel go round a ring.
    """
    return (ranks - 1) * 4 * (2 * channels + norms) + 2 * (ranks - 1) / ranks * 4 * 2 * channels


def sent_bytes(network: Network, ranks: int) -> float:
    """Bytes a rank sends in a step; loss, hits and the wish to stop are 20 more."""
    return gradient_bytes(network.weights, ranks) + norm_bytes(network.norms, network.channels, ranks)


def exchange_seconds(network: Network, ranks: int, link: Link | None) -> float:
    """Time of all exchanges of a step, if none is hidden behind computation: an upper bound."""
    if link is None:
        return 0.0
    return sent_bytes(network, ranks) / link.bytes_per_second + (2 * network.norms + 4) * link.latency


def steps(recipe: Recipe) -> int:
    """The iterations of a run."""
    return TRAINING_EXAMPLES[recipe.data.name] // recipe.training.batch_size * recipe.training.epochs


def run_seconds(recipe: Recipe, network: Network, ranks: int, step: float, link: Link | None) -> tuple[float, float]:
    """A whole run: if all exchanges hide behind computation, and if none does."""
    return steps(recipe) * step, steps(recipe) * (step + exchange_seconds(network, ranks, link))


def table(inputs: dict[str, Any]) -> str:
    """Markdown: a row for each network and number of ranks."""
    lines = [
        "| network | weights | GPUs | images a GPU and step | sent a step and rank | held a rank | step | run |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in RECIPES:
        recipe = find_recipe(name)
        network = Network.of(recipe)
        measured = inputs["step_milliseconds"].get(name, {})
        for ranks in RANKS:
            images = recipe.training.batch_size // ranks
            held = (sum(HELD.values()) + 1) * network.weights  # of 1,040 rounds, so two bytes for a draw
            link = None if ranks == 1 else Link(**inputs["links"][str(ranks)]["values"])
            milliseconds = measured.get(str(images))
            took = whole = "not measured"
            whole_batch = measured.get(str(recipe.training.batch_size))
            if milliseconds is None and whole_batch is not None:
                # A small batch takes at least its share of a large one.
                low, high = run_seconds(recipe, network, ranks, whole_batch / ranks / 1000, link)
                took = f"≥ {whole_batch / ranks:.1f} ms"
                whole = f"≥ {_span(low, high)}"
            elif milliseconds is not None:
                low, high = run_seconds(recipe, network, ranks, milliseconds / 1000, link)
                took = f"{milliseconds:.1f} ms"
                whole = _span(low, high)
            lines.append(
                f"| {name.removeprefix('imagenet-')} | {network.weights / 1e6:.1f} M | {ranks} | {images} | "
                f"{sent_bytes(network, ranks) / 1e6:.0f} MB | {held / 1e9:.2f} GB | {took} | {whole} |"
            )
    return "\n".join(lines)


def _span(low: float, high: float) -> str:
    a, b = f"{low / 3600:.1f}", f"{high / 3600:.1f}"
    return f"{a} h" if a == b else f"{a}-{b} h"


def measure(weights: int) -> dict[str, Any]:
    """What a weight costs on this machine: memory held, drawing, saving, comparing."""
    torch.set_num_threads(1)
    width = 2048
    layers = [nn.Linear(width, width, bias=False) for _ in range(weights // width**2)]
    count = len(layers) * width**2
    recipe = recipe_file.override(Recipe(), ["weight_distribution=signed_constant", "sparsity=0.7", "rate=0.1"])
    started = time.perf_counter()
    session = Session(recipe, nn.Sequential(*layers), 1, torch.device("cpu"))
    drawn = time.perf_counter() - started
    session.model(torch.ones(1, width)).sum().backward()
    session.optimizer.step()
    held = [*session.model.parameters(), *session.model.buffers()]
    held += [p.grad for p in session.model.parameters() if p.grad is not None]
    held += [value for state in session.optimizer.state.values() for value in state.values() if value is not None]
    started = time.perf_counter()
    digests(session.model)
    compared = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.perf_counter()
        write_checkpoint(Path(folder), snapshot(session.capture()))
        saved = time.perf_counter() - started
        size = (Path(folder) / CHECKPOINT).stat().st_size
    return {
        "weights": count,
        "held_bytes_a_weight": sum(tensor.numel() * tensor.element_size() for tensor in held) / count,
        "drawing_seconds": drawn,
        "comparing_seconds": compared,
        "checkpoint_seconds": saved,
        "checkpoint_bytes_a_weight": size / count,
        "checkpoint_more_memory_bytes_a_weight":
            1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / count,
        "environment": environment.describe(torch.device("cpu")),
    }  # fmt: skip


def main() -> None:
    """Print the table, or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("table").add_argument("inputs", nargs="?", type=Path, default=INPUTS)
    measuring = commands.add_parser("measure")
    measuring.add_argument("out", type=Path)
    measuring.add_argument("--weights", type=int, default=1 << 24)
    options = parser.parse_args()
    if options.command == "table":
        print(table(json.loads(options.inputs.read_text())))
    else:
        options.out.write_text(json.dumps(measure(options.weights), indent=2) + "\n")


if __name__ == "__main__":
    main()
