"""The masked weights of a model as leaves of autograd: found, masked and differentiated in one launch each."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from iterand import backend
from iterand.parametrization import MaskedLayer, MaskedParametrization, masked_layers
from iterand.selection import Ranking

_PARAMETRIZATIONS = ".parametrizations."


class MaskedWeights:
    """The masked weights of the layers that kernels can do; they take the place of θ ⊙ m in a forward pass.

    ``gradients`` turns the gradients of the masked weights into those of the scores. The others, such as float16
    layers, are left to plain autograd.
    """

    def __init__(self, model: nn.Module, precision: torch.dtype | None) -> None:
        groups: dict[Ranking[MaskedParametrization], list[MaskedLayer]] = {}
        for layer in masked_layers(model).values():
            groups.setdefault(layer.parametrization.ranking, []).append(layer)
        self._groups = [_Group(layers, precision) for layers in groups.values() if _fits(layers)]
        self.layers = [layer for group in self._groups for layer in group.layers]
        self.leaves = [leaf for group in self._groups for leaf in group.leaves]

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """All tensors of the model by the names that they have without masks."""
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        plain = {name: tensor for name, tensor in named.items() if _PARAMETRIZATIONS not in name}
        return plain | {layer.name: leaf for layer, leaf in zip(self.layers, self.leaves)}

    def prepare(self) -> None:
        """Find the cuts of the current scores and write the masked weights."""
        for group in self._groups:
            group.cuts.run()
            group.apply.run(group.addresses)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Let the model read the prepared masked weights."""
        try:
            for layer, leaf in zip(self.layers, self.leaves):
                layer.parametrization.given = leaf
            yield
        finally:
            for layer in self.layers:
                layer.parametrization.given = None

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """While a graph is captured, addresses of gradients cannot come from the host: they are written afterwards."""
        for group in self._groups:
            group.table = torch.zeros(len(group.layers), dtype=torch.int64, device=group.addresses.device)
        try:
            yield
            for group in self._groups:
                group.write_table()
        finally:
            for group in self._groups:
                group.table = group.captured = None

    def gradients(self, gradients: Sequence[Tensor | None], *, add: bool) -> None:
        """Set the gradients of the scores from those of the masked weights, or ``add`` to what is there."""
        for group, mine in self._split(gradients):
            group.differentiate(mine, add=add)

    def update(
        self, gradients: Sequence[Tensor | None], learning_rate: Tensor, momentum: float, weight_decay: float
    ) -> None:
        """One step of SGD on the scores, from the gradients of the masked weights."""
        for group, mine in self._split(gradients):
            group.update.run(group.table_of(mine), learning_rate, momentum, weight_decay)

    def use_momentum(self, buffers: Sequence[Tensor]) -> None:
        """The momentum buffers that ``update`` uses, one for each layer."""
        for group, mine in self._split(buffers):
            group.prepare_update([buffer for buffer in mine if buffer is not None])

    def addresses(self) -> list[int]:
        """Where scores and weights are; the kernels have to be prepared again when they have moved."""
        return [
            tensor.data_ptr()
            for layer in self.layers
            for tensor in (layer.parametrization.score, layer.parametrization.attached_weight)
        ]

    def _split(self, tensors: Sequence[Tensor | None]) -> Iterator[tuple["_Group", Sequence[Tensor | None]]]:
        start = 0
        for group in self._groups:
            yield group, tensors[start : start + len(group.layers)]
            start += len(group.layers)


class _Group:
    """Layers that share a ranking, and the operations on all of them."""

    def __init__(self, layers: list[MaskedLayer], precision: torch.dtype | None) -> None:
        from iterand.backend.triton.layers import pointers
        from iterand.backend.triton.masks import ApplyMasks, ScoreGradients

        self.layers = layers
        masks = [layer.parametrization for layer in layers]
        self.weights = [layer.weight.detach() for layer in layers]
        for mask, weight in zip(masks, self.weights):
            mask.match_layout_(weight)
        self.dtypes = [precision if precision and _is_cast(layer) else torch.float32 for layer in layers]
        self.leaves: list[Tensor] = [
            torch.zeros_like(weight, dtype=dtype).requires_grad_(layer.score.requires_grad)
            for layer, weight, dtype in zip(layers, self.weights, self.dtypes)
        ]
        self.cuts = masks[0].ranking.prepare_cuts(masks)
        self.apply = ApplyMasks(self.cuts, self.weights, self.dtypes)
        self.addresses = pointers(self.leaves)
        self._differentiate = ScoreGradients(self.cuts, self.weights, self.dtypes)
        self._score_gradients: tuple[list[Tensor], Tensor] | None = None
        self.table: Tensor | None = None
        """While a graph is captured: the table of addresses that its kernels read."""
        self.captured: list[Tensor | None] | None = None
        self.kept: list[tuple[Tensor, list[Tensor | None]]] = []
        """What captured graphs read."""

    def differentiate(self, gradients: Sequence[Tensor | None], *, add: bool) -> None:
        """Write the gradients of the scores, in buffers that stay where they are."""
        from iterand.backend.triton.layers import pointers

        if self._score_gradients is None:
            buffers = [torch.zeros_like(layer.score) for layer in self.layers]
            self._score_gradients = buffers, pointers(buffers)
        buffers, addresses = self._score_gradients
        for layer, gradient, buffer in zip(self.layers, gradients, buffers):
            layer.score.grad = None if gradient is None else buffer
        self._differentiate.run(self.table_of(gradients), addresses, add=add)

    def prepare_update(self, buffers: Sequence[Tensor]) -> None:
        """Prepare SGD with these momentum buffers."""
        from iterand.backend.triton.masks import UpdateScores

        self.update = UpdateScores(self.cuts, self.weights, buffers, self.dtypes)

    def write_table(self) -> None:
        """Write the addresses of the captured gradients to the table that the graph reads, and keep both."""
        from iterand.backend.triton.layers import pointers

        if self.table is not None and self.captured is not None:
            self.table.copy_(pointers(self.captured))
            self.kept.append((self.table, self.captured))

    def table_of(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """The addresses of gradients in the layout of the leaves; 0 where there is none."""
        from iterand.backend.triton.layers import pointers, same_order

        laid_out = [
            gradient if gradient is None or same_order(gradient, leaf) else torch.empty_like(leaf).copy_(gradient)
            for gradient, leaf in zip(gradients, self.leaves)
        ]
        if self.table is None:
            return pointers(laid_out)
        self.captured = laid_out
        return self.table


def _fits(layers: Sequence[MaskedLayer]) -> bool:
    masks = [layer.parametrization for layer in layers]
    return (
        {*masks}.issuperset(masks[0].ranking.rivals(masks[0]))
        and all(mask.is_plain for mask in masks)
        and backend.uses_triton([mask.score.detach() for mask in masks], [layer.weight for layer in layers])
    )


# Modules that read their weights only in operations that autocast runs in low precision.
_CAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _is_cast(layer: MaskedLayer) -> bool:
    """Whether autocast would cast the weights wherever they are read. A subclass may read them in its own way."""
    forwards = [kind.forward for kind in _CAST]
    return all(attribute == "weight" and type(module).forward in forwards for module, attribute in layer.owners)
