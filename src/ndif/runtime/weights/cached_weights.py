"""A cache of weights in CPU memory: one weight owner fills it, and the next one loads from it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ndif.runtime.process.cuda import Cuda
from ndif.runtime.weights.transfer import to_memory
from ndif.runtime.weights.weights import distinct

_ALIGNED = 64


@dataclass(frozen=True, slots=True)
class _Place:
    """The position and form of one tensor in the cache."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype
    parameter: bool
    requires_grad: bool

    def view(self, memory: mmap.mmap) -> torch.Tensor:
        """Return the tensor in `memory`, without a copy."""
        count = self.shape.numel()
        if count == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(memory, dtype=self.dtype, count=count, offset=self.offset)
        return flat.view(self.shape)


@dataclass(frozen=True, slots=True)
class CachedWeights:
    """The layout of a cache: the position of each tensor in memory that processes share."""

    size: int
    """Bytes of the memory."""
    names: Mapping[str, int]
    """The index in `places` of each name; tied names share a place."""
    places: tuple[_Place, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> CachedWeights:
        """Return the layout of a cache for `tensors`."""
        unique, names = distinct(tensors)
        places: list[_Place] = []
        end = 0
        for tensor in unique:
            parameter = isinstance(tensor, torch.nn.Parameter)
            places.append(_Place(end, tensor.shape, tensor.dtype, parameter, tensor.requires_grad))
            end += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        return cls(max(end, 1), names, tuple(places))

    def fill(self, tensors: Mapping[str, torch.Tensor], driver: Cuda) -> int:
        """Copy `tensors` to a new memfd and return its descriptor."""
        fd = os.memfd_create("cached weights", os.MFD_CLOEXEC)
        os.ftruncate(fd, self.size)
        memory = mmap.mmap(fd, self.size)
        views = [place.view(memory) for place in self.places]
        with torch.no_grad():
            to_memory(zip(views, distinct(tensors)[0], strict=True), driver)
        return fd

    def tensors(self, fd: int) -> dict[str, torch.Tensor]:
        """Return the tensors by name, as views of the memory; they stay valid when `fd` is closed."""
        memory = mmap.mmap(fd, self.size)
        tensors = [
            torch.nn.Parameter(place.view(memory), requires_grad=place.requires_grad)
            if place.parameter
            else place.view(memory)
            for place in self.places
        ]
        return {name: tensors[place] for name, place in self.names.items()}
