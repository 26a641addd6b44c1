"""Fine-tune a ResNet18 of CIFAR-10 on a folder of images by a mask, and by its peers.

python tools/fine_tuning_images.py OUT.json --base base.pt --source CIFAR10_FOLDER --data FOLDER --method mask

The base is trained on CIFAR-10 and written to --base if there is no such file. With --source-name image_folder it is
trained on another folder of images. Methods: probe (a linear head), full (all weights), norms (scales and shifts of the
norms), lora (needs peft) and mask; a linear head is trained in all of them, and statistics of batch norms follow the
images in all but probe.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from fine_tuning import WARM_UP, median, now
from torch import Tensor, nn

import iterand
from iterand import philox
from iterand.files import atomic_write
from iterand.lab.data import Dataset, Split, load_data
from iterand.lab.networks import build_network
from iterand.lab.training import environment

METHODS = ("probe", "full", "norms", "lora", "mask")
RATES = {"base": 1e-3, "probe": 1e-2, "full": 3e-4, "norms": 1e-2, "lora": 3e-3, "mask": 3e-3}
"""The learning rate of each method, if none is given."""


def network(seed: int, classes: int, base: dict[str, Tensor] | None = None) -> nn.Module:
    """A ResNet18, with the weights of the base and a new head."""
    torch.manual_seed(seed)
    model = build_network(name="resnet18_cifar", classes=classes)
    if base is not None:
        body = {name: tensor for name, tensor in base.items() if not name.startswith("classifier.")}
        model.load_state_dict(body, strict=False)
    return model


def load_base(args: argparse.Namespace) -> dict[str, Tensor]:
    """The weights of the base, trained if there are none."""
    if not args.base.exists():
        data = load_data(
            args.source_name,
            args.device,
            args.source,
            augmentation="crop",
            limit=args.limit,
            image_size=args.image_size,
        )
        model = network(0, data.classes).to(args.device, memory_format=torch.channels_last)
        rates = {"lr": RATES["base"], "head_lr": RATES["base"]}
        settings = argparse.Namespace(**{**vars(args), **rates, "method": "base", "seed": 0})
        found = train(model, data, settings, args.base_epochs)
        print(f"base: test {evaluate(model, data.test, args):.2f} %; {found['epochs'][-1]}", flush=True)
        state = {name: tensor.cpu().contiguous() for name, tensor in model.state_dict().items()}
        atomic_write(args.base, safetensors.torch.save(state))
    return safetensors.torch.load_file(args.base)


def prepare(model: nn.Module, args: argparse.Namespace) -> nn.Module:
    """Freeze and extend the model as the method asks."""
    if args.method == "mask":
        options = {"ranking": args.ranking, "scores": args.scores, "seed": args.seed}
        trainable = ["classifier", *args.trainable]
        return iterand.prune_(model, args.sparsity, weights="existing", trainable=trainable, **options)
    for name, parameter in model.named_parameters():
        trained = {"full": True, "norms": "normalization" in name}.get(args.method, False)
        parameter.requires_grad_(trained or name.startswith("classifier."))
    if args.method == "lora":
        from peft import LoraConfig, inject_adapter_in_model

        targets = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
        config = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=targets)
        torch.manual_seed(args.seed)
        inject_adapter_in_model(config, model)
        model.get_submodule("classifier").requires_grad_(True)
    return model


def task_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a task has to store if there is no mask: what is trained, and the statistics of norms."""
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    keep = {name for name, _ in model.named_buffers() if "running" in name}
    state = {name: one for name, one in model.state_dict().items() if name in trained | keep}
    return {name: one.detach().cpu().clone().contiguous() for name, one in state.items()}


def train(model: nn.Module, data: Dataset[Split], args: argparse.Namespace, epochs: int) -> dict[str, Any]:
    """Train with AdamW and a cosine schedule; validation accuracy of each epoch and time per step."""
    head = [one for name, one in model.named_parameters() if name.startswith("classifier.")]
    others = [one for name, one in model.named_parameters() if one.requires_grad and not name.startswith("classifier.")]
    groups = [{"params": others, "lr": args.lr}, {"params": head, "lr": args.head_lr}]
    groups = [group for group in groups if group["params"]]
    graph = {"capturable": True} if args.device.type == "cuda" else {}
    decay = 5e-4 if args.method == "base" else 0.0
    optimizer = torch.optim.AdamW(groups, weight_decay=decay, **graph)
    batch = min(args.batch, len(data.train))
    count = len(data.train) // batch
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, count * epochs)
    precision = torch.bfloat16 if args.device.type == "cuda" else None
    step = iterand.make_step(model, optimizer, F.cross_entropy, steppers=[schedule], precision=precision)
    generator = torch.Generator().manual_seed(args.seed)
    found: dict[str, Any] = {"epochs": [], "steps": count * epochs}
    timed, seconds, done = 0, 0.0, 0
    for epoch in range(epochs):
        model.train(args.method != "probe")
        order = torch.randperm(len(data.train), generator=generator)[: count * batch]
        augment = partial(philox.philox, draw=epoch, key=philox.key(args.seed, "augmentation"))
        losses = []
        start = now(args.device)
        for part in data.train.batches(order, batch, augment):
            images = part.inputs[0].contiguous(memory_format=torch.channels_last)
            losses.append(step(images, part.labels))
            done += 1
            if done == min(WARM_UP, count * epochs // 2):
                start, timed = now(args.device), -done
        seconds += now(args.device) - start
        accuracy = evaluate(model, data.validation, args)
        found["epochs"].append({"validation_accuracy": accuracy, "loss": torch.stack(losses).mean().item()})
    found["seconds_per_step"] = seconds / max(1, done + timed)
    found["captured"] = step.replays
    return found


@torch.no_grad()
def evaluate(model: nn.Module, split: Split, args: argparse.Namespace) -> float:
    """Accuracy in percent."""
    model.eval()
    right = 0
    with torch.autocast(args.device.type, torch.bfloat16, enabled=args.device.type == "cuda"):
        for part in split.batches(torch.arange(len(split)), 256):
            right += int((model(*part.inputs).argmax(1) == part.labels).sum())
    return 100 * right / len(split)


def store(model: nn.Module, fresh: Callable[[], nn.Module], path: Path, args: argparse.Namespace) -> nn.Module:
    """Write the task to a file, and read it back into a model that has not seen it."""
    if args.method == "mask":
        iterand.save_ticket(model, path, base="ResNet18, CIFAR-10")
        return iterand.load_ticket(path, fresh())
    safetensors.torch.save_file(task_tensors(model), path)
    copied = prepare(fresh(), args)
    copied.load_state_dict(safetensors.torch.load_file(path), strict=False)
    return copied


def switching(path: Path, fresh: Callable[[], nn.Module], args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds to switch between two tasks on one core of a CPU, after the first time; the median of 20."""
    torch.set_num_threads(1)
    found = {}
    for cached, name in ((1, "switch_ms"), (2, "switch_cached_ms")):
        tasks = iterand.TaskSet(fresh(), cached=cached)
        for task in ("one", "two"):
            tasks.add(task, path)
        found[name] = median([partial(tasks.activate, task) for task in ("one", "two")])
    return found


def main() -> None:
    """One run, and its record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the record to write")
    parser.add_argument("--base", type=Path, required=True, help="file of the base, written if there is none")
    parser.add_argument("--source", type=Path, help="folder of what the base is trained on")
    parser.add_argument("--source-name", choices=("cifar10", "image_folder"), default="cifar10")
    parser.add_argument("--data", type=Path, required=True, help="folder of images")
    parser.add_argument("--method", choices=METHODS, default="mask")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, help="learning rate of what the method trains (depends on the method)")
    parser.add_argument("--head-lr", type=float, default=1e-3, help="learning rate of the head (1e-3)")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--base-epochs", type=int, default=40)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--limit", type=int, help="images per split, for a dry run")
    parser.add_argument("--sparsity", type=float, default=0.1, help="of a mask")
    parser.add_argument("--ranking", choices=("layer", "global"), default="layer", help="of a mask")
    parser.add_argument("--scores", default="magnitude_rank", help="what scores start with: magnitude_rank, magnitude")
    parser.add_argument("--trainable", nargs="*", default=[], help="patterns: what is trained beside mask and head")
    parser.add_argument("--rank", type=int, default=4, help="of LoRA, in all convolutions")
    args = parser.parse_args()
    args.lr = RATES[args.method] if args.lr is None else args.lr
    args.head_lr = args.lr if args.method == "probe" else args.head_lr
    described = environment.describe(args.device)
    described["command"] = shlex.join(["python", "tools/fine_tuning_images.py", *sys.argv[1:]])
    base = load_base(args)
    data = load_data("image_folder", args.device, args.data, augmentation="crop", limit=args.limit,
                     image_size=args.image_size)  # fmt: skip

    def fresh(seed: int = args.seed + 1000) -> nn.Module:
        return network(seed, data.classes, base)

    model = prepare(fresh(args.seed), args).to(args.device, memory_format=torch.channels_last)
    trained = train(model, data, args, args.epochs)
    times: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "task"
        loaded = store(model, fresh, path, args).to(args.device, memory_format=torch.channels_last)
        test, size = evaluate(loaded, data.test, args), path.stat().st_size
        if args.method == "mask":
            times = switching(path, fresh, args)
    masked = sum(score.numel() for score in iterand.scores(model)) if args.method == "mask" else 0
    settings = {key: str(value) if isinstance(value, torch.device) else value for key, value in vars(args).items()
                if key not in ("out", "data", "base", "source")}  # fmt: skip
    record = {
        "benchmark": "fine-tuning-images",
        "environment": described,
        "settings": settings,
        "validation_accuracy": trained["epochs"][-1]["validation_accuracy"],
        "test_accuracy": test,
        "bytes": size,
        "masked_weights": masked,
        "trained_parameters": sum(one.numel() for one in model.parameters() if one.requires_grad) - masked,
        **times,
        **trained,
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{args.method}: test {test:.2f} %, {size / 1000:.1f} kB, {1000 * trained['seconds_per_step']:.1f} ms a step")


if __name__ == "__main__":
    main()
