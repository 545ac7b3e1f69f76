"""The device of a replica's weights: a GPU, or the CPU with an owner and a zygote as on a GPU."""

from __future__ import annotations

from pathlib import Path

from ndif.host.model_actor import ReplicaDevices
from ndif.host.runtimes import Runtime
from tests.runtime.replica import HERE, pretending

GIB = 1 << 30


def where(device: str, folder: Path, memory: int) -> tuple[Runtime, ReplicaDevices]:
    """Return a replica's runtime and its devices: `memory` bytes of the first GPU, or a stand-in."""
    if device == "cpu":
        return pretending(folder), ReplicaDevices()
    return HERE, ReplicaDevices({0: memory})
