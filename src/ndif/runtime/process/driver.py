"""The port to the driver of GPUs: every use of one by a model process goes through a `Driver`.

`ndif.runtime.cuda` has the form for NVIDIA's; the tests have one for machines without GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from ndif.runtime.spec import ModelSpec
from ndif.runtime.tracebacks import SaidError
from ndif.runtime.weights import Handle
from ndif.sandbox.confinement import DriverFiles


class DeviceError(SaidError):
    """A GPU that does not answer, or whose state in this process is lost: "CUDA error on GPU 2: …"."""


class Event(Protocol):
    """A point in a device's work."""

    def synchronize(self) -> None:
        """Wait until the device has come to that point."""
        ...


class Driver(Protocol):
    """Devices as a model process uses them: in its zygote not at all, in its owner and its runners."""

    def wanted(self, spec: ModelSpec) -> bool:
        """Return True if the weights belong on devices, which this process then never starts.

        Raises:
            ValueError: if they do and there is no such device.
        """
        ...

    def select(self, spec: ModelSpec) -> ModelSpec:
        """Restrict this process and its forks to the devices of `spec`, numbered from 0.

        Returns:
            The same model, its devices by their new numbers.
        """
        ...

    def node_device(self, device: str) -> str:
        """Return the name that the node has for a selected device: `select`, undone."""
        ...

    def reached(self) -> str | None:
        """Return a sentence on what of the driver is in this process already; None if nothing is."""
        ...

    def prepare_owner(self) -> None:
        """Set the allocator up for memory that other processes map; before `start`."""
        ...

    def start(self, device: str, shares: Mapping[int, int]) -> None:
        """Start the driver in this process and put on `device` what is put on none by name.

        Args:
            device: A torch device.
            shares: Bytes that this process may allocate, by device; no limit for others.
        """
        ...

    def export(self, tensors: Iterable[torch.Tensor]) -> list[Handle]:
        """Share tensors, whose contents are complete when this returns, with other processes."""
        ...

    def files(self, tensors: Iterable[torch.Tensor], handles: Iterable[Handle]) -> DriverFiles:
        """Return the files that a process needs to map these tensors and compute with them."""
        ...

    def private_memory(self) -> AbstractContextManager[None]:
        """Allocate apart from the memory that is exported, while the context lasts."""
        ...

    def check(self, deadline_s: float) -> None:
        """Give every device a little work and wait for it.

        Raises:
            DeviceError: if one cannot, or does not within the deadline.
        """
        ...

    def synchronize(self) -> None:
        """Wait for all work of this process.

        Raises:
            DeviceError: if a device has lost this process's state.
        """
        ...

    def pinned(self, size: int) -> torch.Tensor:
        """Return a buffer of so many bytes that devices copy to and from directly."""
        ...

    def mark(self, device: torch.device) -> Event:
        """Return the end of the work that a device has been given until now."""
        ...

    def release_memory(self) -> None:
        """Give back memory that the allocator keeps for later."""
        ...

    def random_states(self) -> list[torch.Tensor]:
        """Return the states of the devices' random generators."""
        ...

    def set_random_states(self, states: Sequence[torch.Tensor]) -> None:
        """Set the devices' random generators to states that `random_states` returned."""
        ...

    def reset_peak(self) -> None:
        """Begin to measure allocated memory anew."""
        ...

    def peak_bytes(self) -> int:
        """Return the most that was allocated on any one device since `reset_peak`."""
        ...


def bytes_by_device(tensors: Mapping[str, Any]) -> dict[int, int]:
    """Return the bytes of different tensors by the index of their device."""
    found: dict[int, int] = {}
    for tensor in {id(tensor): tensor for tensor in tensors.values()}.values():
        index = tensor.device.index or 0
        found[index] = found.get(index, 0) + tensor.nbytes
    return found
