"""Convolutions with few channels on a GPU: our kernels beside the library's, microseconds a call.

python tools/convolution.py [OUT.json]     batch 128, bfloat16, channels last; both gradients at once
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

from iterand.engine import convolution
from iterand.lab.benchmarks.timing import spread
from iterand.lab.training import environment

# Inputs, outputs, kernel, stride, side: those of ResNet20, and the first of the other networks.
SHAPES = [
    (3, 16, 3, 1, 32), (16, 16, 3, 1, 32), (16, 32, 3, 2, 32), (16, 32, 1, 2, 32), (32, 32, 3, 1, 16),
    (32, 64, 3, 2, 16), (32, 64, 1, 2, 16), (64, 64, 3, 1, 8), (3, 64, 3, 1, 32), (64, 64, 3, 1, 32),
]  # fmt: skip
CALLS = 20


def microseconds(work: Callable[[], object]) -> float:
    """The median time of a call in a CUDA graph of many."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            work()
    times = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end) / CALLS)
    return spread(times).median


def row(inputs: int, outputs: int, kernel: int, stride: int, side: int) -> dict[str, float | str]:
    """One shape."""
    half, layout = {"device": "cuda", "dtype": torch.bfloat16}, torch.channels_last
    images = torch.randn(128, inputs, side, side, **half).to(memory_format=layout)
    weight = torch.randn(outputs, inputs, kernel, kernel, **half).to(memory_format=layout)
    gradient = torch.randn_like(convolution.convolve(images, weight, stride))
    pad = kernel // 2

    def library(*wanted: bool) -> Callable[[], object]:
        return lambda: torch.ops.aten.convolution_backward(
            gradient, images, weight, None, [stride] * 2, [pad] * 2, [1, 1], False, [0, 0], 1, [*wanted, False]
        )

    images_too = inputs > 3  # nobody asks for the gradient of the data
    works = {
        "forward": lambda: convolution.convolve(images, weight, stride),
        "forward, cuDNN": lambda: functional.conv2d(images, weight, stride=stride, padding=pad),
        "backward": lambda: convolution.convolve_backward(gradient, images, weight, stride, images_too),
        "backward, cuDNN": library(images_too, True),
    }
    shape = f"{inputs} → {outputs}, {kernel}×{kernel} / {stride}, {side}×{side}"
    return {"shape": shape} | {name: round(microseconds(work), 2) for name, work in works.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    out = parser.parse_args().out
    rows = [row(*shape) for shape in SHAPES]
    for each in rows:
        print(" | ".join(str(value) for value in each.values()))
    if out:
        record = {"environment": environment.describe(torch.device("cuda")), "microseconds": rows}
        out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
