"""Time and memory of a step in a user's own loop: eager, compiled and ``make_step``, dense and masked."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from iterand import IterativeRandomization, make_step, prune_, scores
from iterand.errors import extra
from iterand.lab.benchmarks.table import Notify, Options, Row, Table, attempt
from iterand.lab.benchmarks.timing import forget, spread, subject, take_turns, wait
from iterand.lab.networks.external import TIMM, build_timm
from iterand.randomization import Stepper

_SPARSITY = 0.6
_PERIOD = 300
_BURST_SECONDS = 0.15
_BATCHES = 2
_WARM_UP = 5  # steps before the first measurement: a graph is captured in the fourth
EXECUTIONS = ("eager", "compiled", "make_step")
METHODS = ("dense", "masked")
_MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
BERTS: dict[str, dict[str, int]] = {"bert": {}, "minilm": _MINILM}
"""Names of transformers, and where their configuration differs from that of BERT-base."""


@dataclass(frozen=True)
class Model:
    """A model that is measured, and a batch of its inputs and targets."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    batch_size: int


def measure(options: Options, notify: Notify) -> Table:
    """Milliseconds and memory of a step for every model, execution and method."""
    table = Table(
        "loop",
        [
            "A training step in a user's own loop on random inputs; AdamW for transformers, otherwise SGD with "
            "momentum; on a GPU bfloat16 and channels last.",
            f"Masked: p = {_SPARSITY}, signed constants, a round of randomization every {_PERIOD} steps. All take "
            "turns, and ratios are taken within a turn.",
        ],
    )
    default = ("resnet18", "timm:resnet18", "timm:resnet50", "timm:vit_tiny_patch16_224", "bert")
    executions = options.executions or (EXECUTIONS if options.on_gpu else ("eager", "make_step"))
    for name in executions:
        if name not in EXECUTIONS:
            raise ValueError(f"there is no execution {name!r}; there are {', '.join(EXECUTIONS)}")
    for name in options.networks or (default if options.on_gpu else ("digits",)):
        table.rows += _measure(name, executions, options, notify)
    return table


def find_model(name: str, options: Options) -> Model:
    """The model of a name: a recipe's network, ``timm:NAME``, ``bert`` or ``minilm``."""
    if name in BERTS:
        return Model(partial(_bert, name), _tokens, options.batch_size or 32)
    if name.startswith(TIMM):
        return Model(lambda: build_timm(name, 1000, 3, {}), _images(3, 224, 1000), options.batch_size or 64)
    chosen = subject(name)
    return Model(chosen.network, _images(chosen.channels, chosen.side, chosen.classes), options.batch)


def _measure(name: str, executions: tuple[str, ...], options: Options, notify: Notify) -> list[Row]:
    chosen, device = find_model(name, options), options.device
    rows: dict[tuple[str, str], Row] = {}
    loops: dict[tuple[str, str], Loop] = {}
    for execution, method in itertools.product(executions, METHODS):
        notify(f"loop: {name}, {execution}, {method}")

        def work(execution: str = execution, method: str = method) -> Row:
            loops[execution, method], peak = _alone(chosen, execution, method, options)
            return {"peak_bytes": peak}

        head = {"network": name, "batch": chosen.batch_size, "execution": execution, "method": method}
        rows[execution, method] = attempt(head, work, device)
    notify(f"loop: {name}, in turns")
    rounds = options.count(gpu=15, cpu=7, short=3)
    times = take_turns({key: loop.run for key, loop in loops.items()}, rounds, _BURST_SECONDS, device)
    for (execution, method), mine in times.items():
        row, dense, eager = rows[execution, method], times.get((execution, "dense")), times.get(("eager", "masked"))
        row["milliseconds"] = spread(mine)
        if dense is not None:
            row["ratio_to_dense"] = spread([a / b for a, b in zip(mine, dense)])
            peak, before = row["peak_bytes"], rows[execution, "dense"]["peak_bytes"]
            row["memory_ratio"] = peak / before if peak else None
        if eager is not None and method == "masked":
            row["speedup_over_eager"] = spread([a / b for a, b in zip(eager, mine)])
    loops.clear()
    forget(device)
    return list(rows.values())


def _alone(chosen: Model, execution: str, method: str, options: Options) -> tuple["Loop", int | None]:
    """A loop that has run some steps, and the peak of its memory beside what was there before."""
    device = options.device
    if not options.on_gpu:
        return Loop(chosen, execution, method, device), None
    before = torch.cuda.memory_allocated(device)
    loop = Loop(chosen, execution, method, device)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(_WARM_UP):  # the replay of a graph allocates nothing: its memory shows when it is captured
        loop.run()
    wait(device)
    return loop, torch.cuda.max_memory_allocated(device) - before


class Loop:
    """A model in training, one step a call."""

    def __init__(self, chosen: Model, execution: str, method: str, device: torch.device) -> None:
        torch.manual_seed(0)
        model = chosen.build().to(device)
        generator = torch.Generator(device).manual_seed(0)
        batches = [chosen.batch(chosen.batch_size, generator) for _ in range(_BATCHES)]
        half = device.type == "cuda"
        if half and batches[0][0].dim() == 4:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            batches = [(inputs.to(memory_format=torch.channels_last), targets) for inputs, targets in batches]
        self._batches = itertools.cycle(batches)
        self._steppers: list[Stepper] = []
        if method == "masked":
            prune_(model, _SPARSITY, weights="signed_constant")
            self._steppers.append(IterativeRandomization(model, _PERIOD))
        parameters = scores(model) if method == "masked" else list(model.parameters())
        if _is_transformer(model):
            self._optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-4)
        else:
            self._optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-4)
        self._precision = torch.bfloat16 if half else None
        self._device = device
        if execution == "make_step":
            self._step: Callable[..., object] = make_step(
                model, self._optimizer, F.cross_entropy, steppers=self._steppers, precision=self._precision
            )
        else:
            self._model: Callable[..., Tensor] = torch.compile(model) if execution == "compiled" else model
            self._step = self._by_hand

    def run(self) -> None:
        """One step."""
        self._step(*next(self._batches))

    def _by_hand(self, inputs: Tensor, targets: Tensor) -> None:
        self._optimizer.zero_grad()
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision is not None):
            loss = F.cross_entropy(self._model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        for stepper in self._steppers:
            stepper.step()


def _is_transformer(model: nn.Module) -> bool:
    return any("attention" in type(module).__name__.lower() for module in model.modules())


def _images(channels: int, side: int, classes: int) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
    def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        images = torch.randn(size, channels, side, side, device=generator.device, generator=generator)
        return images, torch.randint(classes, (size,), device=generator.device, generator=generator)

    return batch


_WORDS, _LENGTH, _CLASSES = 30_522, 128, 2


def _bert(name: str) -> nn.Module:
    """BERT-base or MiniLM with a classifier, from its configuration."""
    with extra("transformers", f"the network {name}"):
        from transformers import BertConfig, BertForSequenceClassification

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # Without dropout, so that all executions compute the same.
            dropout: Any = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": _CLASSES}
            self.bert: Any = BertForSequenceClassification(BertConfig(**dropout, **BERTS[name]))

        def forward(self, tokens: Tensor) -> Tensor:
            logits: Tensor = self.bert(input_ids=tokens).logits
            return logits

    return Logits()


def _tokens(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(_WORDS, (size, _LENGTH), device=generator.device, generator=generator)
    return tokens, torch.randint(_CLASSES, (size,), device=generator.device, generator=generator)
