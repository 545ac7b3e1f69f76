"""Tells whether memory that others can write to is as it was.

A keyed checksum: every 64-bit word times a random one, summed modulo 2**64. Who does not know the key
cannot write anything else with the same sum, but by chance. It costs little more than reading the memory.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import torch

_WORDS = 1 << 22
"""Of a key, and of what is summed at once: 32 MiB."""


@dataclass(frozen=True, slots=True)
class Seal:
    """Sums of tensors, and the key to them, which must not leave this process."""

    keys: Mapping[torch.device, torch.Tensor]
    sums: Mapping[str, int]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Seal:
        """Remember how `tensors`, all of plain layouts, are now."""
        generator = torch.Generator().manual_seed(secrets.randbits(63))
        key = torch.randint(-(1 << 63), (1 << 63) - 1, (_WORDS,), generator=generator)
        keys = {device: key.to(device) for device in {t.device for t in tensors.values()}}
        sums = {name: _sum(tensor, keys[tensor.device]) for name, tensor in tensors.items()}
        return cls(keys, sums)

    def broken(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """The names of those that are not as they were."""
        return [
            name
            for name, tensor in tensors.items()
            if _sum(tensor, self.keys[tensor.device]) != self.sums[name]
        ]


def _sum(tensor: torch.Tensor, key: torch.Tensor) -> int:
    """The keyed sum of a tensor's bytes; each stretch of a key's length counts by its place."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    whole = flat.numel() // 8 * 8
    # A storage may begin where no 64-bit word does.
    aligned = flat[:whole] if flat.data_ptr() % 8 == 0 else flat[:whole].clone()
    words = aligned.view(torch.int64)
    total = int((flat[whole:].to(torch.int64) * key[: flat.numel() - whole]).sum())
    for place, stretch in enumerate(words.split(_WORDS), start=1):
        part = int((stretch * key[: stretch.numel()]).sum())
        total += part * (int(key[place % _WORDS]) | 1)
    return total & ((1 << 64) - 1)
