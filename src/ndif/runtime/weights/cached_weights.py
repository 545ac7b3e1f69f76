"""A cache of weights in the CPU's memory, which one weight owner fills and the next one loads from."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ndif.runtime.process.driver import Driver
from ndif.runtime.weights.transfer import to_memory

_ALIGNED = 64


@dataclass(frozen=True, slots=True)
class _Place:
    """The position and form of one tensor in the cache."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype
    parameter: bool
    requires_grad: bool

    @property
    def size(self) -> int:
        """Return the tensor's bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def view(self, memory: mmap.mmap) -> torch.Tensor:
        """Return the tensor in `memory`, without a copy."""
        if self.size == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        raw = torch.frombuffer(memory, dtype=torch.uint8, count=self.size, offset=self.offset)
        return raw.view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class CachedWeights:
    """The layout of a cache: the position of each tensor in memory that two processes have open."""

    size: int
    """Bytes of the memory."""
    names: Mapping[str, int]
    """The index of each name's place; names of one tensor share a place."""
    places: tuple[_Place, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> CachedWeights:
        """Return the layout of a cache for `tensors`."""
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
        """Copy `tensors` to new memory and return its descriptor.

        Raises:
            OSError: if the memory cannot be allocated.
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
        """Return the tensors by name, as views of the memory; they keep it when `fd` is closed."""
        memory = mmap.mmap(fd, self.size)
        made = [
            torch.nn.Parameter(place.view(memory), requires_grad=place.requires_grad)
            if place.parameter
            else place.view(memory)
            for place in self.places
        ]
        return {name: made[place] for name, place in self.names.items()}
