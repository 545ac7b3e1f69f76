"""Weights that wait in the CPU's memory for their next stay on a device, handed from owner to owner."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ndif.runtime.driver import Driver
from ndif.runtime.transfer import to_memory

_ALIGNED = 64


@dataclass(frozen=True, slots=True)
class _Place:
    """One tensor in the memory."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype
    parameter: bool
    requires_grad: bool

    @property
    def size(self) -> int:
        """Bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def view(self, memory: mmap.mmap) -> torch.Tensor:
        """The tensor, without a copy."""
        if self.size == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        raw = torch.frombuffer(memory, dtype=torch.uint8, count=self.size, offset=self.offset)
        return raw.view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Cached:
    """Where each tensor lies in a memory that two processes have a descriptor of."""

    size: int
    """Bytes of the memory."""
    names: Mapping[str, int]
    """Which of the places a name has; those of one tensor share it."""
    places: tuple[_Place, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Cached:
        """The layout of a memory for `tensors`."""
        different = {id(tensor): tensor for tensor in tensors.values()}
        number = {key: place for place, key in enumerate(different)}
        places: list[_Place] = []
        end = 0
        for tensor in different.values():
            parameter = isinstance(tensor, torch.nn.Parameter)
            place = _Place(end, tensor.shape, tensor.dtype, parameter, tensor.requires_grad)
            places.append(place)
            end += -(-place.size // _ALIGNED) * _ALIGNED
        names = {name: number[id(tensor)] for name, tensor in tensors.items()}
        return cls(max(end, 1), names, tuple(places))

    def fill(self, tensors: Mapping[str, torch.Tensor], driver: Driver) -> int:
        """Return a descriptor of memory with the contents of `tensors`.

        Raises:
            OSError: if there is no such memory.
        """
        fd = os.memfd_create("cached weights", os.MFD_CLOEXEC)
        os.ftruncate(fd, self.size)
        memory = mmap.mmap(fd, self.size)
        by_place = {self.names[name]: tensor for name, tensor in tensors.items()}
        with torch.no_grad():
            pairs = ((place.view(memory), by_place[at]) for at, place in enumerate(self.places))
            to_memory(pairs, driver)
        return fd

    def tensors(self, fd: int) -> dict[str, torch.Tensor]:
        """The tensors by name, in the memory itself; they keep it when `fd` is closed."""
        memory = mmap.mmap(fd, self.size)
        made = [
            torch.nn.Parameter(place.view(memory), requires_grad=place.requires_grad)
            if place.parameter
            else place.view(memory)
            for place in self.places
        ]
        return {name: made[place] for name, place in self.names.items()}
