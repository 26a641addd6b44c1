"""Batches of small images: how many a second, by augmentation."""

from functools import partial

import torch

from iterand import philox
from iterand.benchmarks.options import Options
from iterand.benchmarks.subjects import Subject, subject
from iterand.benchmarks.table import Notify, Row, Table, attempt
from iterand.benchmarks.timing import Spread, burst, spread
from iterand.data import AUGMENTATIONS
from iterand.data.images import ImageSplit
from iterand.data.normalization import Normalizer


def measure(options: Options, notify: Notify) -> Table:
    """Images a second for every augmentation."""
    table = Table("augment", ["Normalised float32 batches of random 32×32 images, in the order of an epoch."])
    for augmentation in AUGMENTATIONS:
        notify(f"augment: {augmentation}")
        work = partial(_row, augmentation, subject("conv6"), options)
        table.rows.append(attempt({"augmentation": augmentation}, work, options.device))
    return table


def _row(augmentation: str, chosen: Subject, options: Options) -> Row:
    device = options.device
    count = options.examples or (45_000 if options.on_gpu else 1024 if options.short else 8192)
    images, labels = chosen.images(count, torch.Generator(device).manual_seed(0))
    split = ImageSplit(images, labels, Normalizer("cifar10", device), augmentation)
    key = philox.key(0, "augmentation")
    order = philox.permutation(count, philox.key(0, "data order"), 0, device)

    def epoch() -> None:
        for _ in split.batches(order, options.batch, lambda index: philox.philox(index, 0, key, philox.DATA)):
            pass

    burst(epoch, 1, device)
    milliseconds = spread([burst(epoch, 1, device) for _ in range(options.count(gpu=21, cpu=5, short=3))])
    seconds = milliseconds.scaled(1e-3)
    return {
        "images": count,
        "batch": options.batch,
        "epoch_milliseconds": milliseconds,
        "images_a_second": Spread(count / seconds.median, count / seconds.p90, count / seconds.p10, seconds.n),
    }
