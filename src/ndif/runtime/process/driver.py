"""The port to the driver of GPUs: every use of a GPU by a model process goes through a `Driver`.

`ndif.runtime.process.cuda` implements the port for NVIDIA's; the tests implement it without GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from ndif.runtime.spec import ModelSpec
from ndif.runtime.tracebacks import UserFacingError
from ndif.sandbox.confinement.confinement import DriverFiles

Handle = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]
"""A function and its arguments that rebuild a tensor in another process."""

_OVERHEAD_BYTES = 256 << 20
"""Bytes that torch takes beside a model of any size: cached blocks, workspaces, a checksum's key."""


class DeviceError(UserFacingError):
    """A GPU does not answer, or its state in this process is lost: "CUDA error on GPU 2: …"."""


class Event(Protocol):
    """A point in a device's work."""

    def synchronize(self) -> None:
        """Wait until the device has reached that point."""
        ...


class Driver(Protocol):
    """The devices of a model process; its weight owner and its runners start them, its zygote never."""

    def uses_devices(self, spec: ModelSpec) -> bool:
        """Return True if the weights belong on devices, which this process then never starts.

        Raises:
            ValueError: if they do and there is no such device.
        """
        ...

    def select(self, spec: ModelSpec) -> ModelSpec:
        """Restrict this process and its forks to the devices of `spec`, numbered from 0.

        Returns:
            The same model, with its devices by their new numbers.
        """
        ...

    def node_device(self, device: str) -> str:
        """Return the node's name of a selected device: the inverse of `select`."""
        ...

    def find_early_start(self) -> str | None:
        """Return a sentence if something has started the driver in this process already, else None."""
        ...

    def prepare_owner(self) -> None:
        """Set the allocator up for memory that other processes map; called before `start`."""
        ...

    def start(self, device: str, shares: Mapping[int, int]) -> None:
        """Start the driver in this process and make `device` the default.

        Args:
            device: A torch device.
            shares: Bytes that this process may allocate, by device; the others have no limit.
        """
        ...

    def export(self, tensors: Iterable[torch.Tensor]) -> list[Handle]:
        """Share tensors with other processes; the tensors' contents are complete when this returns."""
        ...

    def files(self, tensors: Iterable[torch.Tensor], handles: Iterable[Handle]) -> DriverFiles:
        """Return the files that a process needs to map these tensors and compute with them."""
        ...

    def private_memory(self) -> AbstractContextManager[None]:
        """Allocate apart from exported memory while the context lasts."""
        ...

    def check(self, deadline_s: float) -> None:
        """Give every device a little work and wait for it.

        Raises:
            DeviceError: if a device fails, or does not finish within the deadline.
        """
        ...

    def synchronize(self) -> None:
        """Wait for all work of this process.

        Raises:
            DeviceError: if a device has lost this process's state.
        """
        ...

    def pinned(self, size: int) -> torch.Tensor:
        """Return a buffer of `size` bytes that devices copy to and from directly."""
        ...

    def mark(self, device: torch.device) -> Event:
        """Return the end of the work that a device has been given so far."""
        ...

    def release_memory(self) -> None:
        """Return memory that the allocator caches to the device."""
        ...

    def random_states(self) -> list[torch.Tensor]:
        """Return the states of the devices' random generators."""
        ...

    def set_random_states(self, states: Sequence[torch.Tensor]) -> None:
        """Set the devices' random generators to states that `random_states` returned."""
        ...

    def reset_peak(self) -> None:
        """Begin to measure the peak of allocated memory anew."""
        ...

    def peak_bytes(self) -> int:
        """Return the peak of allocated memory on any one device since `reset_peak`."""
        ...


def bytes_by_device(tensors: Mapping[str, Any]) -> dict[int, int]:
    """Return the bytes of distinct tensors by the index of their device."""
    found: dict[int, int] = {}
    for tensor in {id(tensor): tensor for tensor in tensors.values()}.values():
        index = tensor.device.index or 0
        found[index] = found.get(index, 0) + tensor.nbytes
    return found


def owner_shares(max_memory: Mapping[int, int] | None) -> dict[int, int]:
    """Return the bytes of each device that the weight owner may allocate."""
    return {device: size + _OVERHEAD_BYTES for device, size in (max_memory or {}).items()}


def runner_shares(
    max_memory: Mapping[int, int] | None, weights: Mapping[int, int]
) -> dict[int, int]:
    """Return the bytes of each device that a runner may allocate: those that the weights leave.

    Args:
        max_memory: Bytes of each device that the model was given.
        weights: Bytes of each device that its weights take; runners map them and allocate nothing for them.
    """
    return {
        device: max(0, size - weights.get(device, 0)) + _OVERHEAD_BYTES
        for device, size in (max_memory or {}).items()
    }
