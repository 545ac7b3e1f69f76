"""The most memory that a run took, and may take."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path

_KIB = 1024
_BESIDE = 256 << 20
"""Bytes that torch takes beside a model of any size: memory by the piece, workspaces, a seal's key."""


def reset_peak() -> None:
    """Begin to measure the resident memory of this process anew."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return the peak of resident memory since `reset_peak`."""
    # Not from /proc, which a confined process cannot read.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB


def owner_shares(max_memory: Mapping[int, int] | None) -> dict[int, int]:
    """Return the bytes of each device that the process with the weights may allocate."""
    return {device: size + _BESIDE for device, size in (max_memory or {}).items()}


def runner_shares(
    max_memory: Mapping[int, int] | None, weights: Mapping[int, int]
) -> dict[int, int]:
    """Return the bytes of each device that a runner may allocate: those that the weights leave.

    Args:
        max_memory: Bytes that the model was given of each device.
        weights: Bytes that its weights take there, which are mapped and count for no runner.
    """
    return {
        device: max(0, size - weights.get(device, 0)) + _BESIDE
        for device, size in (max_memory or {}).items()
    }
