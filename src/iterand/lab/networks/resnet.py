"""Residual networks for 32×32 images and for ImageNet (Appendix B, C.3 and C.5)."""

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional

from iterand.lab.networks.convolutional import average_classifier, normalized_convolution, scaled

Stage = tuple[tuple[int, ...], int]
"""The widths of the convolutions of a block at ρ = 1, and the number of such blocks: a cell of Appendix B."""

RESNET18: tuple[Stage, ...] = (((64, 64), 2), ((128, 128), 2), ((256, 256), 2), ((512, 512), 2))
RESNET34: tuple[Stage, ...] = (((64, 64), 3), ((128, 128), 4), ((256, 256), 6), ((512, 512), 3))
RESNET50: tuple[Stage, ...] = (((64, 64, 256), 3), ((128, 128, 512), 4), ((256, 256, 1024), 6), ((512, 512, 2048), 3))
RESNET101: tuple[Stage, ...] = (*RESNET50[:2], ((256, 256, 1024), 23), *RESNET50[3:])
WIDE_RESNET50_2: tuple[Stage, ...] = (
    ((128, 128, 256), 3),
    ((256, 256, 512), 4),
    ((512, 512, 1024), 6),
    ((1024, 1024, 2048), 3),
)
RESNET20: tuple[Stage, ...] = (((16, 16), 3), ((32, 32), 3), ((64, 64), 3))

STEM_CHANNELS = 64  # whatever ρ is


class ResidualBlock(nn.Module):
    """A basic block for two widths, a bottleneck block for three; where the shape changes, a 1×1 shortcut."""

    def __init__(self, inputs: int, widths: tuple[int, ...], stride: int) -> None:
        super().__init__()
        # Appendix B does not say which convolution of a bottleneck has the stride; a 1×1 would skip positions.
        kernels, strides = ((3, 3), (stride, 1)) if len(widths) == 2 else ((1, 3, 1), (1, stride, 1))
        layers: list[nn.Module] = []
        for before, width, kernel, step in zip((inputs, *widths), widths, kernels, strides):
            layers += [normalized_convolution(before, width, kernel, step), nn.ReLU()]
        self.branch = nn.Sequential(*layers[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if (inputs, stride) != (widths[-1], 1):
            self.shortcut = normalized_convolution(inputs, widths[-1], 1, stride)

    def forward(self, images: Tensor) -> Tensor:
        """ReLU of the sum of branch and shortcut."""
        return functional.relu(self.branch(images) + self.shortcut(images))


def cifar_resnet(
    stages: tuple[Stage, ...], stem_channels: int = STEM_CHANNELS, *, width_factor: float = 1.0, classes: int = 10
) -> nn.Sequential:
    """A residual network for 32×32 images; the stem is a 3×3 convolution."""
    stem = nn.Sequential(normalized_convolution(3, stem_channels, 3), nn.ReLU())
    return _residual_network(stem, stem_channels, stages, width_factor, classes)


def resnet20(*, width_factor: float = 1.0, classes: int = 10) -> nn.Sequential:
    """ResNet20 as in OpenLTH: the stem is as wide as the first stage, shortcuts are 1×1 convolutions."""
    return cifar_resnet(RESNET20, scaled(16, width_factor), width_factor=width_factor, classes=classes)


def imagenet_resnet(stages: tuple[Stage, ...], *, width_factor: float = 1.0, classes: int = 1000) -> nn.Sequential:
    """A residual network for 224×224 images; the stem is a 7×7 convolution and max pooling, which give 56×56."""
    stem = nn.Sequential(
        normalized_convolution(3, STEM_CHANNELS, 7, 2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)
    )
    return _residual_network(stem, STEM_CHANNELS, stages, width_factor, classes)


def _residual_network(
    stem: nn.Module, channels: int, stages: tuple[Stage, ...], width_factor: float, classes: int
) -> nn.Sequential:
    """Stem, stages, average pooling, linear layer; each stage after the first halves height and width."""
    bodies = []
    for index, (widths, blocks) in enumerate(stages):
        body = nn.Sequential()
        for block in range(blocks):
            block_widths = tuple(scaled(width, width_factor) for width in widths)
            body.append(ResidualBlock(channels, block_widths, stride=2 if index > 0 and block == 0 else 1))
            channels = block_widths[-1]
        bodies.append(body)
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=stem, stages=nn.Sequential(*bodies))
    return nn.Sequential(layers | average_classifier(channels, classes))
