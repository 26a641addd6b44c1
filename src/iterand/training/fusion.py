"""Which layers of a network the kernels compute in its place: narrow convolutions, and norms with what follows them."""

from itertools import pairwise

from torch import Tensor, nn

from iterand.kernels.convolution import narrow_
from iterand.kernels.normalization import FusedNorm, is_ordinary
from iterand.networks.resnet import ResidualBlock


def fuse_(network: nn.Module) -> None:
    """Let the kernels compute what they can of a network in bfloat16, channels last; its tensors keep their names."""
    narrow_(network)
    for module in network.modules():
        if is_ordinary(module):
            module.__class__ = FusedNorm
    for module in list(network.modules()):
        if type(module) is nn.Sequential:
            _rectify_norms_(module)
        if type(module) is ResidualBlock:
            norm = _last(module.branch)
            if isinstance(norm, FusedNorm):
                module.__class__ = _FusedBlock
                norm.rectified = True


class _FusedBlock(ResidualBlock):
    """A residual block whose last norm adds the shortcut and rectifies the sum."""

    def forward(self, images: Tensor) -> Tensor:
        """Branch plus shortcut, rectified."""
        seen, (*before, last) = images, self.branch
        for layer in before:
            seen = layer(seen)
        convolution, norm = last.children()
        rectified: Tensor = norm(convolution(seen), self.shortcut(images))
        return rectified


def _rectify_norms_(sequence: nn.Sequential) -> None:
    """Let norms that a ReLU follows do its work."""
    for index, (layer, following) in enumerate(pairwise(list(sequence))):
        norm = _last(layer)
        if isinstance(norm, FusedNorm) and type(following) is nn.ReLU:
            norm.rectified = True
            sequence[index + 1] = nn.Identity()


def _last(layer: nn.Module) -> nn.Module:
    """The layer that a layer ends in."""
    while type(layer) is nn.Sequential and len(layer):
        layer = layer[-1]
    return layer
