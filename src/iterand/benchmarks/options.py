"""What may be chosen about a benchmark."""

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Options:
    """Where to measure, and what; whatever is left open is the benchmark's own choice for the device."""

    device: torch.device
    networks: tuple[str, ...] = ()
    executions: tuple[str, ...] = ()
    batch_size: int | None = None
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

    @property
    def little(self) -> bool:
        """Whether to measure small things only."""
        return self.short and not self.on_gpu

    @property
    def batch(self) -> int:
        """Examples a step."""
        return self.batch_size or (32 if self.little else 128)

    @property
    def settings(self) -> tuple[str, ...]:
        """Batch size and precision for a recipe; bfloat16 is what GPUs are fast with, not most processors."""
        precision = self.precision or (None if self.on_gpu else "float32")
        return (f"batch_size={self.batch}", *([f"precision={precision}"] if precision else []))

    def count(self, *, gpu: int, cpu: int, short: int) -> int:
        """How often to measure."""
        return self.repeats or (short if self.short else gpu if self.on_gpu else cpu)
