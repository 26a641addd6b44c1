"""Pixels from 0-255 to numbers of about mean 0 and deviation 1, by channel."""

import torch
from torch import Tensor

Statistics = tuple[tuple[float, float, float], tuple[float, float, float]]

NORMALIZATIONS: dict[str, Statistics] = {  # mean and deviation of the channels, of pixels from 0 to 1
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}


class Normalizer:
    """Normalises images by the statistics of a data set, which wait on the device."""

    def __init__(self, name: str, device: torch.device) -> None:
        mean, deviation = torch.tensor(NORMALIZATIONS[name], dtype=torch.float64).mul(255).float().to(device)
        self.mean: Tensor = mean.view(-1, 1, 1)
        self.deviation: Tensor = deviation.view(-1, 1, 1)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Pixels [batch, channel, height, width] of any type as normalised float32."""
        return pixels.float().sub(self.mean).div_(self.deviation)
