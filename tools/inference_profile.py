"""Where the time of an image goes in the C of a ticket: microseconds of every operation, one core.

python tools/inference_profile.py OUT TICKET... [--activations int8]

A clock is read after every operation, which takes about 50 ns.
The record is results/records/benchmarks/inference-profile.json.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import iterand
from iterand.inference.c.emitter import emit
from iterand.inference.c.library import NATIVE, find_compiler
from iterand.inference.graph import trace
from iterand.inference.quantization import calibrate
from iterand.lab.training import environment

SHAPE = (3, 32, 32)
CLOCK = """
#include <stdio.h>
#include <time.h>
static double spent[1000], before;
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e6 * (double)t.tv_sec + 1e-3 * (double)t.tv_nsec;
}
static void tick(int number) {
    const double time = now();
    spent[number] += time - before;
    before = time;
}
"""
MAIN = """
int main(void) {
    static float input[NETWORK_INPUTS], output[NETWORK_OUTPUTS];
    static double arena[NETWORK_ARENA / 8 + 1];
    int i, k;
    for (i = 0; i < NETWORK_INPUTS; i++) input[i] = (float)(i % 17) / 8 - 1;
    for (i = 0; i < 1200; i++) {
        if (i == 200)
            for (k = 0; k < 1000; k++) spent[k] = 0;
        before = now();
        network_run(input, output, arena);
    }
    for (k = 0; k < COUNT; k++) printf("%.3f\\n", spent[k] / 1000);
    return 0;
}
"""


def profile(ticket: Path, activations: str) -> list[tuple[str, float]]:
    """Operations with their microseconds, the fastest of five programs."""
    graph = trace(iterand.load_ticket(ticket).eval(), torch.zeros(1, *SHAPE))
    sample = torch.randn(64, *SHAPE, generator=torch.Generator().manual_seed(0))
    source = emit(graph, activations=calibrate(graph, sample) if activations == "int8" else None)
    before, start, rest = source.code.partition("void network_run(")
    body, _, _ = rest.partition("void network_run_batch")
    names: list[str] = []

    def timed(call: re.Match[str]) -> str:
        names.append(call[2])
        return f"{call[1]}\n    tick({len(names) - 1});"

    body = re.sub(
        r"^(    (from_floats|to_floats|convolve|gather|pool|combine|clear_border)\(.*\);)$", timed, body, flags=re.M
    )
    code = "#define _POSIX_C_SOURCE 199309L\n" + before + CLOCK + start + body + MAIN.replace("COUNT", str(len(names)))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "network.h").write_text(source.header)
        Path(folder, "profile.c").write_text(code)
        command = [
            *(find_compiler() or ["cc"]),
            "-std=c99",
            "-O3",
            NATIVE,
            "-ffp-contract=off",
            "profile.c",
            "-o",
            "profile",
        ]
        subprocess.run(command, cwd=folder, check=True)
        runs = [subprocess.run(["./profile"], cwd=folder, check=True, capture_output=True).stdout for _ in range(5)]
    times = min(([float(time) for time in printed.split()] for printed in runs), key=sum)
    return list(zip(names, times))


def row(ticket: Path, activations: str) -> dict[str, Any]:
    """The sums of an operation, and all of them in order."""
    operations = profile(ticket, activations)
    sums = {name: round(sum(time for one, time in operations if one == name), 2) for name, _ in operations}
    found = {"ticket": ticket.name, "activations": activations, "total": round(sum(sums.values()), 1), "sums": sums}
    print(json.dumps(found), flush=True)
    return found | {"operations": operations}


def main() -> None:
    """One row for each ticket."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("tickets", type=Path, nargs="+")
    parser.add_argument("--activations", choices=("float32", "int8"), default="int8")
    arguments = parser.parse_args()
    rows = [row(path, arguments.activations) for path in arguments.tickets]
    described = environment.describe(torch.device("cpu"))
    described["command"] = shlex.join(["python", "tools/inference_profile.py", *sys.argv[1:]])
    arguments.out.write_text(json.dumps({"environment": described, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
