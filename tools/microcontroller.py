"""Flash, memory and instructions of tickets on a microcontroller, measured with examples/microcontroller in qemu.

    python tools/microcontroller.py TICKET ... [--cpu cortex-m4] [--optimize=-Os] [--inputs FILE] [-- EXPORT ...]

Flash is the code, the constants and the initial values of variables in the linked program; memory is its variables and
the stack that it used. Both count the whole program, with the code that reads inputs and writes outputs. Instructions
are those of one run of the network for one input. EXPORT are options of `iterand export`, such as --input-shape
1,3,32,32, which needs no data set. It needs the Debian packages gcc-arm-none-eabi, libnewlib-arm-none-eabi and
qemu-system-arm. The record is results/records/benchmarks/microcontroller.json.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from iterand.lab.training import environment

EXAMPLE = Path(__file__).parents[1] / "examples" / "microcontroller"
CPUS = ("cortex-m4", "cortex-m7")
INSTRUCTIONS_PER_TICK = 40  # qemu -icount shift=0: 1 ns each; the timer of its boards has 25 MHz
_PACKAGES = {
    "make": "make",
    "arm-none-eabi-gcc": "gcc-arm-none-eabi libnewlib-arm-none-eabi",
    "qemu-system-arm": "qemu-system-arm",
}


def missing() -> str | None:
    """A sentence about the first program that is not installed."""
    for program, package in _PACKAGES.items():
        if not shutil.which(program):
            return f"{program} is not found; apt-get install {package}"
    specs = _run(["arm-none-eabi-gcc", "-print-file-name=nano.specs"]).strip()
    return None if Path(specs).is_absolute() else "newlib is not found; apt-get install libnewlib-arm-none-eabi"


def measure(
    network: Path, inputs: bytes, build: Path, *, cpu: str = CPUS[0], optimize: str = "-Os"
) -> tuple[dict[str, int], bytes]:
    """Build and run an exported folder: measurements, and the outputs as float32 numbers."""
    build.mkdir(parents=True, exist_ok=True)
    (build / "inputs").write_bytes(inputs)
    settings = [
        f"NETWORK={network}",
        f"BUILD={build}",
        f"INPUT={build / 'inputs'}",
        f"CPU={cpu}",
        f"OPTIMIZE={optimize}",
    ]
    printed = _run(["make", "-s", "-C", str(EXAMPLE), *settings, "run", "size"])
    found = {name: int(number) for name, number in re.findall(r"^(ticks|stack|init) (\d+)$", printed, re.MULTILINE)}
    text, data, bss = map(
        int, re.search(r"^ *(\d+)\s+(\d+)\s+(\d+)\s+\d+\s+\w+\s.*elf$", printed, re.MULTILINE).groups()
    )
    results = {
        "flash": text + data,
        "memory": data + bss + found["stack"],
        "stack": found["stack"],
        "instructions": found["ticks"] * INSTRUCTIONS_PER_TICK,
    }
    if "init" in found:
        results["instructions_init"] = found["init"] * INSTRUCTIONS_PER_TICK
    return results, (build / "output.f32").read_bytes()


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def _constants(folder: Path) -> dict[str, int]:
    """The numbers of network.h."""
    text = (folder / "network.h").read_text(encoding="utf-8")
    return {name.lower(): int(number) for name, number in re.findall(r"#define NETWORK_([A-Z]+) (\d+)", text)}


def _measure_ticket(ticket: Path, cpu: str, optimize: str, export: list[str], inputs: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        network = Path(temporary) / "network"
        command = [sys.executable, "-m", "iterand.cli.main", "export", str(ticket), "--format", "c", "-o", str(network)]
        _run([*command, *export])
        constants = _constants(network)
        data = inputs.read_bytes() if inputs else bytes(4 * constants["inputs"])
        measured, _ = measure(network, data, Path(temporary) / "build", cpu=cpu, optimize=optimize)
    chosen = {"ticket": ticket.name, "cpu": cpu, "optimize": optimize, "ticket_bytes": ticket.stat().st_size}
    forms = {name: _option(export, f"--{name}", default) for name, default in _FORMS.items()}
    return constants | chosen | forms | measured


_FORMS = {"activations": "float32", "weights": "offsets"}


def _option(arguments: list[str], name: str, default: str) -> str:
    return arguments[arguments.index(name) + 1] if name in arguments else default


def main() -> None:
    """Print a JSON object with a row for each ticket."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tickets", nargs="+", type=Path, metavar="TICKET")
    parser.add_argument("--cpu", choices=CPUS, default=CPUS[0])
    parser.add_argument("--optimize", default="-Os")
    parser.add_argument("--inputs", type=Path, help="float32 inputs; zeros otherwise")
    own = sys.argv[1:]
    export = own[own.index("--") + 1 :] if "--" in own else []
    options = parser.parse_args(own[: own.index("--")] if "--" in own else own)
    if reason := missing():
        sys.exit(reason)
    arguments = (options.cpu, options.optimize, export, options.inputs)
    tools = {name: _run([name, "--version"]).splitlines()[0] for name in ("arm-none-eabi-gcc", "qemu-system-arm")}
    rows = [_measure_ticket(ticket, *arguments) for ticket in options.tickets]
    print(json.dumps({"environment": environment.describe(torch.device("cpu")) | tools, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
