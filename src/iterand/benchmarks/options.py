"""What may be chosen about a benchmark."""

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Options:
    """Where to measure, and what; whatever is left open is the benchmark's own choice for the device."""

    device: torch.device
    networks: tuple[str, ...] = ()
    batch_size: int = 128
    precision: str | None = None
    repeats: int | None = None
    sizes: tuple[int, ...] = ()
    examples: int | None = None
    data_dir: Path | None = None
    short: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def count(self, *, gpu: int, cpu: int, short: int) -> int:
        """How often to measure."""
        return self.repeats or (short if self.short else gpu if self.on_gpu else cpu)
