"""A ticket written on one machine must give the same network, bit for bit, on another.

    python tools/ticket_across_devices.py make DIR --device cuda    on one machine
    python tools/ticket_across_devices.py check DIR --device cpu    on the other, with DIR copied there

``make`` searches a little (scores trained, weights redrawn in many rounds), writes a ticket a case, and notes the
SHA-256 of the masked model's tensors. ``check`` loads the tickets and compares.
"""

import argparse
import hashlib
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import iterand
from iterand.lab.networks import build_network
from iterand.lab.training.environment import choose_device, describe

CASES = {
    "conv6-kaiming_uniform": ("conv6", "kaiming_uniform", 0.5, "layer"),
    "conv6-kaiming_normal-global": ("conv6", "kaiming_normal", 0.9, "global"),
    "resnet18-signed_constant": ("resnet18_cifar", "signed_constant", 0.6, "layer"),
}
STEPS, PERIOD, BATCH = 12, 1, 4


def main() -> None:
    """Parse the arguments; make or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("make", "check"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    if arguments.verb == "make":
        make(arguments.folder, device)
    else:
        check(arguments.folder, device)


def make(folder: Path, device: torch.device) -> None:
    """Write a ticket a case, and what it must give."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {"environment": describe(device), "cases": {}}
    for name, (network, weights, sparsity, ranking) in CASES.items():
        model = build_network(network, seed=0).to(device)
        iterand.prune_(model, sparsity, weights=weights, seed=7, ranking=ranking)
        search(model, device)
        path = folder / f"{name}.ticket"
        iterand.save_ticket(model, path, recipe={"network": {"name": network}})
        accounts = iterand.summary(model)
        made["cases"][name] = {
            "sha256": fingerprint(iterand.fold_(model)),
            "bytes": path.stat().st_size,
            "weights": accounts.total,
            "kept": accounts.kept,
            "rounds": accounts.rounds,
        }
    (folder / "made.json").write_text(json.dumps(made, indent=2) + "\n")


def search(model: nn.Module, device: torch.device) -> None:
    """A short search on random images: enough to move the masks and redraw weights."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(iterand.scores(model), lr=0.1, momentum=0.9)
    randomizer = iterand.IterativeRandomization(model, period=PERIOD, rate=0.1)
    for _ in range(STEPS):
        images = torch.randn(BATCH, 3, 32, 32, generator=generator).to(device)
        labels = torch.randint(10, (BATCH,), generator=generator).to(device)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        randomizer.step()


def check(folder: Path, device: torch.device) -> None:
    """Load every ticket and compare its tensors with the masked model's."""
    made = json.loads((folder / "made.json").read_text())
    checked = {"made_on": made["environment"], "checked_on": describe(device), "cases": {}}
    for name, expected in made["cases"].items():
        found = fingerprint(iterand.load_ticket(folder / f"{name}.ticket").to(device))
        checked["cases"][name] = {**expected, "equal": found == expected["sha256"]}
    print(json.dumps(checked, indent=2))
    if not all(case["equal"] for case in checked["cases"].values()):
        raise SystemExit("a ticket gives another network here")


def fingerprint(model: nn.Module) -> str:
    """SHA-256 over all tensors of an ordinary model."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + _bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


if __name__ == "__main__":
    main()
