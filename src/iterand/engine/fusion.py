"""Replace layers of a network by fused ones: narrow convolutions, norms and pooling, with the ReLUs next to them."""

from typing import Any, cast

from torch import Tensor, nn

from iterand.engine.convolution import narrow_
from iterand.engine.normalization import FusedNorm, can_fuse
from iterand.engine.pooling import FusedPool, is_two_by_two
from iterand.freezing import is_frozen


def fuse_(network: nn.Module, residual: type[nn.Module]) -> None:
    """Replace layers of a bfloat16, channels-last network by fused ones. The names of its tensors stay the same.

    ``residual`` is a block class with the submodules ``branch`` and ``shortcut`` that computes
    ReLU(branch(x) + shortcut(x)).
    """
    for module in list(network.modules()):
        if isinstance(module, nn.Conv2d) and is_frozen(module, "bias"):
            module.bias = None  # a frozen bias is zero
        if can_fuse(module):
            module.__class__ = FusedNorm
        if is_two_by_two(module):
            module.__class__ = FusedPool
    narrow_(network)
    for module in list(network.modules()):
        if type(module) is nn.Sequential:
            _fuse_relus_(module)
        if type(module) is residual:
            norm = _last(cast(nn.Sequential, module.branch))
            if isinstance(norm, FusedNorm):
                module.__class__ = type(residual.__name__, (residual,), {"forward": _fused_block})
                norm.rectified = True


def _fused_block(self: Any, images: Tensor) -> Tensor:
    """Forward pass of a residual block whose last norm also adds the shortcut and applies the ReLU."""
    hidden, (*before, last) = images, self.branch
    for layer in before:
        hidden = layer(hidden)
    convolution, norm = last.children()
    output: Tensor = norm(convolution(hidden), self.shortcut(images))
    return output


def _fuse_relus_(sequence: nn.Sequential) -> None:
    """Fuse a ReLU into the norm before it, or into the pooling after it."""
    layers = [nn.Identity(), *sequence, nn.Identity()]
    for index, (before, layer, after) in enumerate(zip(layers, layers[1:], layers[2:])):
        if type(layer) is not nn.ReLU:
            continue
        for neighbour, kind in ((_last(before), FusedNorm), (after, FusedPool)):
            if isinstance(neighbour, kind):
                neighbour.rectified = True
                sequence[index] = nn.Identity()
                break


def _last(layer: nn.Module) -> nn.Module:
    """The last layer of nested ``nn.Sequential``."""
    while type(layer) is nn.Sequential and len(layer):
        layer = layer[-1]
    return layer
