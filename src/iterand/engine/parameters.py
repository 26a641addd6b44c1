"""The masked weights of a model as leaves of autograd: found, masked and differentiated outside of it.

Kernels do masks in one launch each for all layers. Sampled masks and binarized weights are cut by kernels, and take
torch's operations from there.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from iterand import backend
from iterand.backend import Cut
from iterand.mask_kinds import Factors
from iterand.surgery import MaskedLayer, by_ranking, masked_layers

_PARAMETRIZATIONS = ".parametrizations."


class MaskedWeights:
    """The masked weights of float32 layers; they take the place of θ ⊙ m in a forward pass.

    ``gradients`` turns the gradients of the masked weights into those of the scores. Other layers, such as float16
    ones, are left to plain autograd.
    """

    def __init__(self, model: nn.Module, precision: torch.dtype | None) -> None:
        groups = by_ranking(masked_layers(model).values())
        self._groups = [_group(layers, precision) for layers in groups if _fits(layers)]
        self.layers = [layer for group in self._groups for layer in group.layers]
        self.leaves = [leaf for group in self._groups for leaf in group.leaves]

    @property
    def has_kernels(self) -> bool:
        """Whether kernels can do all of it, ``update`` included."""
        return all(isinstance(group, _KernelGroup) for group in self._groups)

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """All tensors of the model by the names that they have without masks."""
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        plain = {name: tensor for name, tensor in named.items() if _PARAMETRIZATIONS not in name}
        return plain | {layer.name: leaf for layer, leaf in zip(self.layers, self.leaves)}

    def prepare(self) -> None:
        """Find the cuts of the current scores and write the masked weights."""
        for group in self._groups:
            group.prepare()

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
    def capturing(self) -> Iterator[list[Tensor]]:
        """While a graph is captured, addresses of gradients cannot come from the host: they are written afterwards.

        Gives the tables of addresses, which have to live as long as the graph. Gradients may go: their memory is the
        graph's.
        """
        groups = [group for group in self._groups if isinstance(group, _KernelGroup)]
        tables = [torch.zeros(len(one.layers), dtype=torch.int64, device=one.addresses.device) for one in groups]
        for group, table in zip(groups, tables):
            group.table = table
        try:
            yield tables
            for group in groups:
                group.write_table()
        finally:
            for group in groups:
                group.table = group.captured = None

    def gradients(self, gradients: Sequence[Tensor | None], *, add: bool) -> None:
        """Set the gradients of the scores from those of the masked weights, or ``add`` to what is there."""
        for group, mine in self._split(gradients):
            group.differentiate(mine, add=add)

    def update(
        self, gradients: Sequence[Tensor | None], learning_rate: Tensor, momentum: float, weight_decay: float
    ) -> None:
        """One step of SGD on the scores, from the gradients of the masked weights, if it ``has_kernels``."""
        for group, mine in self._split(gradients):
            kernels = cast(_KernelGroup, group)
            kernels.update.run(kernels.table_of(mine), learning_rate, momentum, weight_decay)

    def use_momentum(self, buffers: Sequence[Tensor]) -> None:
        """The momentum buffers that ``update`` uses, one for each layer."""
        for group, mine in self._split(buffers):
            cast(_KernelGroup, group).prepare_update([buffer for buffer in mine if buffer is not None])

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


class _Group(ABC):
    """Layers that share a ranking, their masked weights and the gradients of their scores."""

    def __init__(self, layers: list[MaskedLayer], precision: torch.dtype | None) -> None:
        self.layers = layers
        self.masks = [layer.parametrization for layer in layers]
        self.weights = [layer.weight.detach() for layer in layers]
        for mask, weight in zip(self.masks, self.weights):
            mask.match_layout_(weight)
        self.dtypes = [precision if precision and _is_cast(layer) else torch.float32 for layer in layers]
        self.leaves: list[Tensor] = [
            torch.zeros_like(weight, dtype=dtype).requires_grad_(layer.score.requires_grad)
            for layer, weight, dtype in zip(layers, self.weights, self.dtypes)
        ]
        self._score_gradients: list[Tensor] = []
        ranking = self.masks[0].ranking
        self._counts = ranking.kept_by_coats(self.masks)
        further = [
            ranking.prepare_cuts(self.masks, coat, kept.unbind()) for coat, kept in enumerate(self._counts) if coat
        ]
        self.cuts_by_coat = [ranking.prepare_cuts(self.masks), *further]
        """The cuts of each coat."""

    def find_cuts(self) -> None:
        """Find the cuts of the current scores."""
        if len(self.cuts_by_coat) > 1:
            self._counts.copy_(self.masks[0].ranking.kept_by_coats(self.masks))
        for cuts in self.cuts_by_coat:
            cuts.run()

    @abstractmethod
    def prepare(self) -> None:
        """Find the cuts of the current scores and write the masked weights."""

    def differentiate(self, gradients: Sequence[Tensor | None], *, add: bool) -> None:
        """Write the gradients of the scores, in buffers that stay where they are."""
        if not self._score_gradients:
            self._score_gradients = [torch.zeros_like(layer.score) for layer in self.layers]
        for layer, gradient, buffer in zip(self.layers, gradients, self._score_gradients):
            layer.score.grad = None if gradient is None else buffer


class _KernelGroup(_Group):
    """Masks that follow from the cuts: operations on all layers at once."""

    def __init__(self, layers: list[MaskedLayer], precision: torch.dtype | None) -> None:
        from iterand.backend.triton.layers import pointers
        from iterand.backend.triton.masks import ApplyMasks, ScoreGradients

        super().__init__(layers, precision)
        first, *further = self.cuts_by_coat
        kind = self.masks[0].settings.mask
        self.apply = ApplyMasks(
            first, self.weights, self.dtypes, coats=further, signed=kind == "signed", rounded=kind == "gem_miner"
        )
        self.addresses = pointers(self.leaves)
        self._magnitude = self.masks[0].differentiates_magnitude
        self._differentiate = ScoreGradients(first, self.weights, self.dtypes, magnitude=self._magnitude)
        self._gradient_addresses: Tensor | None = None
        self.table: Tensor | None = None
        """While a graph is captured: the table of addresses that its kernels read."""
        self.captured: list[Tensor | None] | None = None

    def prepare(self) -> None:
        """Find the cuts of the current scores and write the masked weights."""
        self.find_cuts()
        self.apply.run(self.addresses)

    def differentiate(self, gradients: Sequence[Tensor | None], *, add: bool) -> None:
        """Write the gradients of the scores, in buffers that stay where they are."""
        from iterand.backend.triton.layers import pointers

        super().differentiate(gradients, add=add)
        if self._gradient_addresses is None:
            self._gradient_addresses = pointers(self._score_gradients)
        self._differentiate.run(self.table_of(gradients), self._gradient_addresses, add=add)

    def prepare_update(self, buffers: Sequence[Tensor]) -> None:
        """Prepare SGD with these momentum buffers."""
        from iterand.backend.triton.masks import UpdateScores

        first = self.cuts_by_coat[0]
        self.update = UpdateScores(first, self.weights, buffers, self.dtypes, magnitude=self._magnitude)

    def write_table(self) -> None:
        """Write the addresses of the captured gradients to the table that the graph reads."""
        from iterand.backend.triton.layers import pointers

        if self.table is not None and self.captured is not None:
            self.table.copy_(pointers(self.captured))

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


class _TorchGroup(_Group):
    """Masks that are sampled, and weights that are binarized: the operations of torch, layer by layer."""

    def __init__(self, layers: list[MaskedLayer], precision: torch.dtype | None) -> None:
        super().__init__(layers, precision)
        self._factors: list[Factors] = []

    @torch.no_grad()
    def prepare(self) -> None:
        """Find the cuts of the current scores and write the masked weights."""
        self.find_cuts()
        for mask in self.masks:
            mask.count_pass_()
        self._factors = [
            mask.factors(weight, partial(self._cut, number))
            for number, (mask, weight) in enumerate(zip(self.masks, self.weights))
        ]
        for factors, leaf in zip(self._factors, self.leaves):
            leaf.copy_(factors.masked(leaf.dtype))

    def _cut(self, number: int, coat: int) -> Cut:
        cuts = self.cuts_by_coat[coat]
        return Cut(cuts.thresholds[number], cuts.lasts[number])

    @torch.no_grad()
    def differentiate(self, gradients: Sequence[Tensor | None], *, add: bool) -> None:
        """Write the gradients of the scores, in buffers that stay where they are."""
        super().differentiate(gradients, add=add)
        for mask, factors, gradient, buffer in zip(self.masks, self._factors, gradients, self._score_gradients):
            if gradient is None:
                continue
            found = factors.gradient(gradient)
            if mask.differentiates_magnitude:
                found *= mask.score.sign()
            buffer.add_(found) if add else buffer.copy_(found)
        self._factors = []


def _group(layers: list[MaskedLayer], precision: torch.dtype | None) -> _Group:
    settings = [layer.parametrization.settings for layer in layers]
    kernels = len({one.mask for one in settings}) == 1 and all(one.follows_from_cuts for one in settings)
    return (_KernelGroup if kernels else _TorchGroup)(layers, precision)


def _fits(layers: Sequence[MaskedLayer]) -> bool:
    masks = [layer.parametrization for layer in layers]
    return {*masks}.issuperset(masks[0].ranking.rivals(masks[0])) and backend.uses_triton(
        [mask.score.detach() for mask in masks], [layer.weight for layer in layers]
    )


# Modules that read their weights only in operations that autocast runs in low precision.
_CAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _is_cast(layer: MaskedLayer) -> bool:
    """Whether autocast would cast the weights wherever they are read. A subclass may read them in its own way."""
    forwards = [kind.forward for kind in _CAST]
    return all(attribute == "weight" and type(module).forward in forwards for module, attribute in layer.owners)
