"""Cut views out of a batch of images and scale them to one size, on the device and exact to the bit.

The filter is a triangle, widened where the view shrinks, applied to columns and then to rows with 8-bit pixels in
between: what Pillow's ``BILINEAR`` does to one image. The weights are whole multiples of 2⁻²², so that sums of weights
times pixels are exact in float64 in whatever order a device adds them up; narrower products, which torch may run in
TF32 or bfloat16, would not be.
"""

import torch
from torch import Tensor

_ONE = 1 << 22


class Resampler:
    """Views of square images with ``side`` pixels in a black frame of ``padding``, scaled back to that side.

    There are few boxes in a small image, so the weights of all are tabled: [flip, start, extent, target, source].
    """

    def __init__(self, side: int, padding: int, device: torch.device) -> None:
        weights = box_weights(side, padding)
        self._table = torch.stack((weights, weights.flip(2))).to(device)

    def __call__(self, images: Tensor, views: Tensor) -> Tensor:
        """Views of uint8 images [batch, channel, side, side] as whole numbers from 0 to 255, in float32."""
        batch, channels, side, _ = images.shape
        top, left, height, width, flip = views.unbind(1)
        columns = self._table[flip, left, width - 1]
        rows = self._table[0, top, height - 1]
        pixels = images.reshape(batch, channels * side, side).double() @ columns.transpose(1, 2)
        pixels = _rounded(pixels).view(batch, channels, side, side).transpose(1, 2)
        pixels = _rounded(rows @ pixels.reshape(batch, side, channels * side))
        pixels = pixels.view(batch, side, channels, side).transpose(1, 2)
        return pixels.to(torch.float32, memory_format=torch.contiguous_format)


def box_weights(side: int, padding: int) -> Tensor:
    """What each of ``side`` pixels counts in each of the ``side`` pixels a box is scaled to, for every box.

    [start, extent - 1, target, source]; the pixels of the frame count too, but they are black. Distances between the
    centres of pixels are in units of 1 / (2 · side), so that they are whole numbers.
    """
    framed = side + 2 * padding
    start = torch.arange(framed).view(-1, 1, 1, 1)
    extent = torch.arange(1, framed + 1).view(-1, 1, 1)
    target = torch.arange(side).view(-1, 1)
    source = torch.arange(framed) - start
    distance = (2 * side * source + side - (2 * target + 1) * extent).abs()
    share = (2 * extent.clamp(min=side) - distance).clamp(min=0) * ((source >= 0) & (source < extent))
    total = share.sum(dim=-1, keepdim=True).clamp(min=1)
    weights = (share * (2 * _ONE) + total) // (2 * total)
    return weights[..., padding : padding + side].double() / _ONE


def _rounded(pixels: Tensor) -> Tensor:
    return pixels.add_(0.5).floor_()
