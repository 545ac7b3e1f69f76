"""The most memory that a run took, and may take."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path

import torch

_KIB = 1024
_BESIDE = 256 << 20
"""What torch takes beside a model of any size: memory by the piece, workspaces, a seal's key."""


def reset_peak() -> None:
    """Begin to measure anew."""
    if torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)
        return
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Peak bytes since `reset_peak`: device memory on CUDA, else resident memory of this process."""
    if torch.cuda.is_initialized():
        return max(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))
    # Not from /proc, which a confined process cannot read.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB


def limit(max_memory: Mapping[int, int] | None) -> None:
    """Have torch take no more of a GPU than a model was given, where that is a part of one GPU.

    CUDA is started for it.
    """
    if max_memory is None or len(max_memory) != 1 or not torch.cuda.is_available():
        return
    ((device, size),) = max_memory.items()
    fraction = part_of(torch.cuda.get_device_properties(device).total_memory, size)
    if fraction is not None:
        torch.cuda.set_per_process_memory_fraction(fraction, device)


def part_of(total: int, size: int) -> float | None:
    """Which part of a GPU of `total` bytes a process gets of a model that was given `size`; None: all."""
    fraction = (size + _BESIDE) / total
    return fraction if fraction < 1 else None
