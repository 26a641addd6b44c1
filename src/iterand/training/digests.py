"""A number for each tensor of a model, cheap to compute on its device and to send: equal tensors have equal ones."""

import torch
from torch import Tensor, nn

from iterand import philox
from iterand.masking import masked_layers


def digests(model: nn.Module) -> tuple[list[str], Tensor]:
    """What a model holds, in words, and the digest of each as int64 on the CPU."""
    held: dict[str, Tensor] = {}
    for name, layer in masked_layers(model).items():
        parts = {"scores": layer.score, "weights": layer.weight, "draws": layer.draw}
        held |= {f"the {kind} of {name!r}": tensor for kind, tensor in parts.items()}
    known = {tensor.data_ptr() for tensor in held.values()}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in known:
            held[f"the values of {name!r}"] = tensor
    return list(held), torch.stack([digest(tensor).cpu() for tensor in held.values()])


def digest(tensor: Tensor) -> Tensor:
    """The sum of all words, each times an odd number of its own, modulo 2⁶⁴: no single change leaves it as it is."""
    values = tensor.detach().reshape(-1)
    words = values.view(torch.int32 if values.element_size() % 4 == 0 else torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for part in philox.chunks(len(words), words.device):
        total += (words[part].long() * (2 * philox.indices(part, words.device) + 1)).sum()
    return total
