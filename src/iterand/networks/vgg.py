"""VGG11 with batch normalization for 32×32 images, as in OpenLTH (Appendix C.3)."""

from collections import OrderedDict

from torch import nn

from .layers import average_classifier, normalized_convolution, scaled

STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))


def vgg11(*, width_factor: float = 1.0, classes: int = 10) -> nn.Sequential:
    """Eight 3×3 convolutions, max pooling between the stages, average pooling after the last, a linear layer."""
    layers: list[nn.Module] = []
    inputs = 3
    for stage in STAGES:
        if layers:
            layers.append(nn.MaxPool2d(2))
        for width in stage:
            outputs = scaled(width, width_factor)
            layers += [normalized_convolution(inputs, outputs, 3), nn.ReLU()]
            inputs = outputs
    return nn.Sequential(OrderedDict(convolutions=nn.Sequential(*layers)) | average_classifier(inputs, classes))
