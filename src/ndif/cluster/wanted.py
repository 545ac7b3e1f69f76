"""What somebody wants to be served."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Device(str, Enum):
    """What a model is to run on."""

    CPU = "cpu"
    GPU = "gpu"
    AUTO = "auto"
    """GPUs, even where others have to go for it; a CPU where no GPU can be had."""


_ON_CPU = {Device.GPU: (False,), Device.CPU: (True,), Device.AUTO: (False, True)}


@dataclass(frozen=True, slots=True)
class Wanted:
    """So many replicas of one model."""

    model_key: str
    size_bytes: int
    """What one replica needs, padding and all."""
    replicas: int = 1
    """How many there are to be altogether. Fewer than there are is no wish to end any."""
    dedicated: bool = False
    """Nobody displaces it, and it may displace what is young."""
    device: Device = Device.AUTO

    def __post_init__(self) -> None:
        if self.size_bytes < 1:
            raise ValueError(f"{self.model_key} must need at least one byte.")
        if self.replicas < 0:
            raise ValueError(f"{self.model_key} cannot have {self.replicas} replicas.")

    @property
    def on_cpu(self) -> tuple[bool, ...]:
        """Whether it goes on a CPU: each answer that will do, best first."""
        return _ON_CPU[self.device]
