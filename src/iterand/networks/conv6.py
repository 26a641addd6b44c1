"""Conv6, the VGG-like network for 32×32 images (Appendix B)."""

from collections import OrderedDict

from torch import nn

from .layers import convolution_stage, scaled


def conv6(*, width_factor: float = 1.0, classes: int = 10) -> nn.Sequential:
    """Six convolutions 64ρ 64ρ M 128ρ 128ρ M 256ρ 256ρ M and three linear layers 256ρ, 256ρ, classes."""
    narrow, middle, wide = (scaled(width, width_factor) for width in (64, 128, 256))
    return nn.Sequential(
        OrderedDict(
            convolutions=nn.Sequential(
                convolution_stage(3, narrow), convolution_stage(narrow, middle), convolution_stage(middle, wide)
            ),
            flatten=nn.Flatten(),
            classifier=nn.Sequential(
                nn.Linear(4 * 4 * wide, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, classes)
            ),
        )
    )
