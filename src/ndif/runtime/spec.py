"""What a model process is told to load, and what it says it loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model in one runtime."""

    checkpoint: str
    """A repo id, or a local folder."""
    generation: str
    """The nnsight generation that must load it: "0.8"."""
    revision: str | None = None
    task: str | None = None
    """The transformers task; None: what the checkpoint's architecture says."""
    dtype: str = "auto"
    device: str | None = None
    """A torch device, "auto" to spread over GPUs, None for CUDA where there is one."""
    threads: int = 0
    """Threads of a runner's tensor operations; 0: one a core."""

    def header(self) -> dict[str, Any]:
        """As a frame header's value."""
        return asdict(self)

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> ModelSpec:
        """Back from a frame header's value."""
        return cls(**header)
