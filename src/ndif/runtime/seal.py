"""Tells whether memory that others can write to is as it was.

A keyed checksum: every 32-bit word times a random one of 64, and the upper half of their sum. Who does not
know the key cannot write anything else with the same sum, but by chance.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import torch

_WORDS = 1 << 22
"""Of 32 bits, that are summed at once: 16 MiB."""
_PLACES = 1 << 12
_LOW = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Seal:
    """Sums of tensors, and the key to them, which must not leave this process."""

    keys: Mapping[torch.device, torch.Tensor]
    sums: Mapping[str, int]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Seal:
        """Remember how `tensors`, all of plain layouts, are now."""
        generator = torch.Generator().manual_seed(secrets.randbits(63))
        key = torch.randint(-(1 << 63), (1 << 63) - 1, (_WORDS + _PLACES,), generator=generator)
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
    """The keyed sum of a tensor's bytes; each stretch of so many words counts by its place.

    Words of 32 bits times keys of 64, of which sum the upper half counts: another word gives the same one
    in about 4 billion (multilinear hashing; Lemire and Kaser, "Strongly universal string hashing is fast").
    The lower bits would not do: of a word's highest bit an even key keeps nothing.
    """
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    whole = flat.numel() // 4 * 4
    # A storage may begin where no word does.
    aligned = flat[:whole] if flat.data_ptr() % 4 == 0 else flat[:whole].clone()
    total = 0
    for place, stretch in enumerate((flat[whole:], *aligned.view(torch.int32).split(_WORDS))):
        part = int((stretch.to(torch.int64) * key[: stretch.numel()]).sum())
        total += (part >> 32 & _LOW) * int(key[_WORDS + place % _PLACES])
    return total >> 32 & _LOW
