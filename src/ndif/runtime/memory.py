"""The most memory that a run took."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

_KIB = 1024


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
