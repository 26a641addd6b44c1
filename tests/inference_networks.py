"""Networks for the tests of inference: each operation and each fold, networks made up at random, exported programs."""

import random
import subprocess

import torch
import torch.nn.functional as F
from torch import nn


class Wired(nn.Module):
    """A module with these layers, and a function as its forward."""

    def __init__(self, wiring, **layers):
        super().__init__()
        self.wiring = wiring
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, images):
        return self.wiring(self, images)


@torch.no_grad()
def scramble_(model, seed=0):
    """Random statistics, factors and shifts for all batch norms, of both signs; other biases too."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_(0, 0.5, generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
            if module.affine:
                module.weight.copy_(torch.empty_like(module.weight).uniform_(0.5, 1.5, generator=generator))
                module.weight[::3] *= -1
        if isinstance(getattr(module, "bias", None), nn.Parameter):
            module.bias.normal_(0, 0.5, generator=generator)
    return model


RELU = nn.ReLU()


def norm(channels=4, **options):
    return nn.BatchNorm2d(channels, **options)


def conv(inputs=4, outputs=4, kernel=3, **options):
    return nn.Conv2d(inputs, outputs, kernel, **{"padding": kernel // 2} | options)


CASES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 4), RELU, nn.Linear(4, 3, bias=False)), (5,), "Linear Linear"),
    "linear, norm": (lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), RELU), (5,), "Linear"),
    "bias and norm": (lambda: nn.Sequential(conv(), norm()), (4, 5, 5), "Convolution"),
    "norm without factors": (lambda: nn.Sequential(conv(), norm(affine=False)), (4, 5, 5), "Convolution"),
    "two norms": (lambda: nn.Sequential(conv(), norm(), norm(eps=0.1)), (4, 5, 5), "Convolution"),
    "norm first": (lambda: nn.Sequential(norm(), RELU, conv()), (4, 5, 5), "Affine Convolution"),
    "norm after ReLU": (lambda: nn.Sequential(conv(), RELU, norm(), RELU), (4, 5, 5), "Convolution Affine"),
    "norm of features": (lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12)), (3, 2, 2), "Flatten Affine"),
    "output of a convolution": (lambda: conv(stride=2, bias=False), (4, 5, 6), "Convolution"),
    "kernel and stride of two sizes": (
        lambda: nn.Conv2d(2, 3, (1, 4), (2, 1), (0, 1), (1, 2)),
        (2, 5, 9),
        "Convolution",
    ),
    "groups": (lambda: conv(4, 8, groups=4, stride=2), (4, 6, 6), "Convolution"),
    "dilation": (lambda: conv(dilation=2, padding=3), (4, 6, 6), "Convolution"),
    "same and valid": (
        lambda: nn.Sequential(conv(kernel=5, padding="same", dilation=2), conv(padding="valid")),
        (4, 6, 6),
        "Convolution Convolution",
    ),
    "even kernel, dilated": (lambda: conv(kernel=2, padding="same", dilation=2), (4, 6, 6), "Convolution"),
    "the input itself": (lambda: nn.Sequential(), (3, 4), ""),
    "only ReLU": (lambda: RELU, (3, 4), "Affine"),
    "ReLU twice": (lambda: nn.Sequential(conv(), RELU, RELU), (4, 5, 5), "Convolution"),
    "ReLU in place": (
        lambda: nn.Sequential(conv(), norm(), nn.ReLU(inplace=True), nn.Dropout2d(0.5, inplace=True), conv()),
        (4, 5, 5),
        "Convolution Convolution",
    ),
    "ReLU after pooling": (
        lambda: Wired(lambda m, x: F.relu(F.max_pool2d(m.conv(x), 2)).flatten(1).relu(), conv=conv()),
        (4, 6, 6),
        "Convolution MaxPool Flatten",
    ),
    "ReLU after average pooling": (
        lambda: nn.Sequential(conv(), nn.AvgPool2d(2), RELU, nn.Flatten()),
        (4, 6, 6),
        "Convolution AveragePool Affine Flatten",
    ),
    "ReLU after pooling that is read twice": (
        lambda: Wired(lambda m, x: F.relu(y := F.max_pool2d(m.conv(x), 2)) + y, conv=conv()),
        (4, 6, 6),
        "Convolution MaxPool Affine Add",
    ),
    "a convolution that is read twice": (
        lambda: Wired(lambda m, x: F.relu(m.norm(y := m.conv(x))) + y, conv=conv(), norm=norm()),
        (4, 5, 5),
        "Convolution Affine Add",
    ),
    "a convolution read by its sum and the output": (
        lambda: Wired(lambda m, x: (y := m.conv(x)) + m.conv(y), conv=conv()),
        (4, 5, 5),
        "Convolution Convolution",
    ),
    "residual of two convolutions": (
        lambda: Wired(lambda m, x: F.relu(m.n(m.a(x)) + m.b(x)), a=conv(), b=conv(), n=norm()),
        (4, 5, 5),
        "Convolution Convolution",
    ),
    "residual that is computed later": (
        lambda: Wired(lambda m, x: F.relu(m.a(x) + F.relu(m.b(x))), a=conv(), b=conv()),
        (4, 5, 5),
        "Convolution Convolution",
    ),
    "residuals in a chain": (
        lambda: Wired(lambda m, x: m.a(x) + m.b(x) + m.c(x), a=conv(), b=conv(), c=conv()),
        (4, 5, 5),
        "Convolution Convolution Convolution",
    ),
    "residual of linear layers": (
        lambda: Wired(lambda m, x: F.relu(x + m.a(x)), a=nn.Linear(6, 6)),
        (6,),
        "Linear",
    ),
    "norm after a sum": (
        lambda: Wired(lambda m, x: F.relu(m.n(m.a(x) + x)), a=conv(), n=norm()),
        (4, 5, 5),
        "Convolution Affine",
    ),
    "twice itself": (
        lambda: Wired(lambda m, x: F.relu((y := m.a(x)) + y), a=conv()),
        (4, 5, 5),
        "Convolution Add",
    ),
    "sum of the input": (lambda: Wired(lambda m, x: x + x), (4,), "Add"),
    "sums in place": (
        lambda: Wired(lambda m, x: F.relu_(m.a(x).add_(m.b(x)).add_(x)), a=conv(), b=conv()),
        (4, 5, 5),
        "Convolution Convolution Add",
    ),
    "sum without a layer": (
        lambda: Wired(lambda m, x: F.relu(F.relu(m.a(x)) + x), a=conv()),
        (4, 5, 5),
        "Convolution Add",
    ),
    "shared layers": (
        lambda: Wired(lambda m, x: m.a(F.relu(m.n(m.a(F.relu(m.n(m.a(x))))))), a=conv(), n=norm()),
        (4, 5, 5),
        "Convolution Convolution Convolution",
    ),
    "unused layers": (
        lambda: Wired(lambda m, x: (F.silu(m.a(x)), m.b(x))[1], a=conv(), b=conv()),
        (4, 5, 5),
        "Convolution",
    ),
    "concatenation": (
        lambda: Wired(lambda m, x: m.b(torch.cat([m.a(x), x, x], -3)), a=conv(4, 2), b=conv(10, 3)),
        (4, 5, 5),
        "Convolution Concatenate Convolution",
    ),
    "concatenation of features": (
        lambda: Wired(lambda m, x: torch.concat([torch.cat([x], 1), m.a(x)], dim=1), a=nn.Linear(4, 2)),
        (4,),
        "Linear Concatenate",
    ),
    "max pooling": (
        lambda: nn.Sequential(nn.MaxPool2d((3, 2), (2, 1), (1, 0)), nn.MaxPool2d(2)),
        (4, 7, 6),
        "MaxPool MaxPool",
    ),
    "ceil_mode without a difference": (
        lambda: nn.Sequential(nn.MaxPool2d(2, ceil_mode=True), nn.AvgPool2d(3, ceil_mode=True)),
        (4, 6, 6),
        "MaxPool AveragePool",
    ),
    "average pooling": (
        lambda: nn.Sequential(nn.AvgPool2d(3, 2, 1), nn.AvgPool2d((2, 3), 1, 1, count_include_pad=False)),
        (4, 7, 6),
        "AveragePool AveragePool",
    ),
    "adaptive average pooling": (
        lambda: nn.Sequential(nn.AdaptiveAvgPool2d((None, 2)), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        (4, 3, 6),
        "AveragePool AveragePool Flatten",
    ),
    "mean": (lambda: Wired(lambda m, x: x.mean((2, 3))), (4, 3, 5), "AveragePool Flatten"),
    "mean from the end": (lambda: Wired(lambda m, x: x.mean((-1, -2), keepdim=True)), (4, 3, 5), "AveragePool"),
    "mean of rows": (lambda: Wired(lambda m, x: x.mean(3, keepdim=True)), (4, 3, 5), "AveragePool"),
    "mean of a sequence": (lambda: Wired(lambda m, x: x.mean(-1)), (4, 5), "AveragePool Flatten"),
    "view": (lambda: Wired(lambda m, x: x.view(x.size(0), -1)), (4, 3, 5), "Flatten"),
    "views": (lambda: Wired(lambda m, x: x.reshape(-1, 60).view(len(x), 60)), (4, 3, 5), "Flatten"),
    "squeeze": (
        lambda: Wired(lambda m, x: F.adaptive_avg_pool2d(x, 1).squeeze(-1).squeeze(-1)),
        (4, 3, 5),
        "AveragePool Flatten",
    ),
    "squeeze of everything": (
        lambda: Wired(lambda m, x: F.avg_pool2d(x, 3).squeeze()),
        (4, 3, 3),
        "AveragePool Flatten",
    ),
    "there and back": (
        lambda: Wired(lambda m, x: m.a(m.a(x).unsqueeze(1).squeeze(1)), a=conv()),
        (4, 3, 3),
        "Convolution Convolution",
    ),
    "no operation": (
        lambda: Wired(lambda m, x: m.d(m.i(x)).contiguous().clone().float().detach(), d=nn.Dropout(), i=nn.Identity()),
        (4, 3),
        "",
    ),
    "1d": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 4, 3, 2, 1, bias=False),
            nn.BatchNorm1d(4),
            RELU,
            nn.MaxPool1d(3, 2, 1),
            nn.Conv1d(4, 6, 3, padding="same", dilation=2, groups=2),
            RELU,
            nn.AvgPool1d(2),
            nn.AdaptiveAvgPool1d(2),
            nn.Flatten(),
            nn.Linear(12, 3),
        ),
        (3, 33),
        "Convolution MaxPool Convolution AveragePool AveragePool Flatten Linear",
    ),
    "1d norm": (lambda: nn.Sequential(nn.BatchNorm1d(3), RELU), (3, 5), "Affine"),
    "no_grad in forward": (lambda: Wired(lambda m, x: torch.no_grad()(m.a)(x), a=conv()), (4, 5, 5), "Convolution"),
    "weight norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        (4,),
        "Linear",
    ),
    "counting its calls": (
        lambda: Wired(lambda m, x: (m.calls.add_(1), m.a(x))[1], a=nn.Linear(4, 3), calls=nn.Buffer(torch.zeros(()))),
        (4,),
        "Linear",
    ),
}


class MadeUp(nn.Module):
    """Random layers that read random earlier results, in 1 or 2 dimensions."""

    def __init__(self, seed):
        super().__init__()
        self.choose = choose = random.Random(seed)
        torch.manual_seed(seed)
        self.dimensions = dimensions = choose.choice([1, 2])
        self.conv, self.norm = (getattr(nn, f"{name}{dimensions}d") for name in ("Conv", "BatchNorm"))
        self.pools = [getattr(nn, f"{name}{dimensions}d") for name in ("MaxPool", "AvgPool")]
        self.shape = (choose.choice([1, 3, 4]), *(choose.randint(6, 11) for _ in range(dimensions)))
        self.layers, self.steps = nn.ModuleList(), []
        values = [torch.zeros(2, *self.shape)]
        for _ in range(choose.randint(6, 14)):
            step = self.step(values)
            if step is not None:
                self.steps.append(step)
                values.append(self.run(step, values))
        layer = nn.Linear(values[-1].shape[1], 5) if choose.random() < 0.7 else None
        self.head = layer
        scramble_(self, seed)

    def step(self, values):
        """A kind of step, the results it reads, and its layer."""
        choose, read = self.choose, self.choose.choice([-1, -1, -1, self.choose.randrange(len(values))])
        kind = choose.choice([*["conv"] * 4, *["norm"] * 2, *["relu"] * 2, "relu_", "pool", *["add"] * 3, "cat"])
        read = len(values) - 1 if kind == "add" else read
        shape = values[read].shape
        if kind in ("add", "cat"):
            cut = 1 if kind == "add" else 2
            others = [n for n, value in enumerate(values) if value.shape[cut:] == shape[cut:]]
            return kind, (read, choose.choice(others)), None
        layer = None
        if kind == "conv":
            groups = choose.choice([n for n in range(1, shape[1] + 1) if shape[1] % n == 0])
            kernel, dilation = choose.choice([1, 2, 3]), choose.choice([1, 1, 2])
            keep = choose.random() < 0.7 and kernel != 2
            layer = self.conv(
                shape[1],
                shape[1] if keep else groups * choose.randint(1, 3),
                kernel,
                stride=1 if keep else choose.choice([1, 2]),
                padding=dilation * (kernel - 1) // 2 if keep else choose.choice([1, 2]),
                dilation=dilation,
                groups=groups,
                bias=choose.random() < 0.5,
            )
            if min(shape[2:]) < 3:
                return None
        if kind == "norm":
            layer = self.norm(shape[1], affine=choose.random() < 0.7)
        if kind == "pool":
            if min(shape[2:]) < 3:
                return None
            layer = choose.choice(self.pools)(3, choose.choice([1, 2]), choose.choice([0, 1]))
        self.layers.append(layer or nn.Identity())
        return kind, (read,), len(self.layers) - 1

    def run(self, step, values):
        kind, reads, number = step
        first, *others = (values[read] for read in reads)
        if kind in ("relu", "relu_"):
            return F.relu(first, inplace=kind == "relu_")
        if kind == "add":
            return first + others[0]
        return torch.cat([first, *others], 1) if kind == "cat" else self.layers[number](first)

    def forward(self, images):
        values = [images]
        for step in self.steps:
            values.append(self.run(step, values))
        output = values[-1]
        return output if self.head is None else self.head(output.mean(tuple(range(2, output.ndim))))


BATCH = """
#include <stdio.h>
#include "network.h"
static float arena[(NETWORK_ARENA + 3) / 4], input[NETWORK_INPUTS], output[NETWORK_OUTPUTS];
int main(void) {
#ifdef NETWORK_WEIGHTS
    if (network_init(arena)) return 2;
#endif
    while (fread(input, sizeof input, 1, stdin)) {
        network_run(input, output, arena);
        fwrite(output, sizeof output, 1, stdout);
    }
    return 0;
}
"""


def run_program(folder, inputs, *compiler, emulator=()):
    """Build the network of a folder, and run it for some inputs: its outputs as bytes."""
    (folder / "batch.c").write_text(BATCH)
    command = [*compiler, "-std=c99", "-ffp-contract=off", "-o", "batch", "batch.c", "network.c"]
    subprocess.run(command, cwd=folder, check=True)
    return subprocess.run([*emulator, folder / "batch"], input=inputs, capture_output=True, check=True).stdout
