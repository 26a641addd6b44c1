"""Which layers of a network the kernels compute: narrow convolutions, norms, pooling, and the ReLUs beside them."""

from typing import Any, cast

from torch import Tensor, nn

from iterand.engine.convolution import narrow_
from iterand.engine.normalization import FusedNorm, is_ordinary
from iterand.engine.pooling import FusedPool, is_two_by_two
from iterand.surgery import is_frozen


def fuse_(network: nn.Module, residual: type[nn.Module] | None = None) -> None:
    """Let the kernels compute what they can of a network in bfloat16, channels last; its tensors keep their names.

    ``residual`` is a class of blocks that compute ReLU(branch(x) + shortcut(x)) from two parts of these names.
    """
    for module in list(network.modules()):
        if isinstance(module, nn.Conv2d) and is_frozen(module, "bias"):
            module.bias = None  # it is zero
        if is_ordinary(module):
            module.__class__ = FusedNorm
        if is_two_by_two(module):
            module.__class__ = FusedPool
    narrow_(network)
    for module in list(network.modules()):
        if type(module) is nn.Sequential:
            _take_over_rectifiers_(module)
        if type(module) is residual:
            norm = _last(cast(nn.Sequential, module.branch))
            if isinstance(norm, FusedNorm):
                module.__class__ = type(residual.__name__, (residual,), {"forward": _fused_block})
                norm.rectified = True


def _fused_block(self: Any, images: Tensor) -> Tensor:
    """The forward pass of a residual block whose last norm adds the shortcut and rectifies the sum."""
    seen, (*before, last) = images, self.branch
    for layer in before:
        seen = layer(seen)
    convolution, norm = last.children()
    rectified: Tensor = norm(convolution(seen), self.shortcut(images))
    return rectified


def _take_over_rectifiers_(sequence: nn.Sequential) -> None:
    """Let norms do the work of a ReLU that follows them, and pooling that of one before it."""
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
    """The layer that a layer ends in."""
    while type(layer) is nn.Sequential and len(layer):
        layer = layer[-1]
    return layer
