"""Tells whether memory that others can write to is as it was.

A keyed checksum: every 32-bit word times a random one of 64, and the upper half of their sum. Who does not
know the key cannot write anything else with the same sum, but by chance.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

_WORDS = 1 << 21
"""Words of 32 bits that are summed at once. With their keys and products they stay in a GPU's cache."""
_PLACES = 1 << 14
_LOW = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Seal:
    """Sums of tensors, and the key to them, which must not leave this process."""

    keys: Mapping[torch.device, torch.Tensor]
    sums: Mapping[str, int]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Seal:
        """Return the seal of `tensors`, all of plain layouts, as they are now."""
        generator = torch.Generator().manual_seed(secrets.randbits(63))
        key = torch.randint(-(1 << 63), (1 << 63) - 1, (_WORDS + _PLACES,), generator=generator)
        keys = {device: key.to(device) for device in {t.device for t in tensors.values()}}
        return cls(keys, _sums(tensors, keys))

    def broken(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of those of `tensors` that are not as they were."""
        return [name for name, sum_ in _sums(tensors, self.keys).items() if sum_ != self.sums[name]]


def _sums(
    tensors: Mapping[str, torch.Tensor], keys: Mapping[torch.device, torch.Tensor]
) -> dict[str, int]:
    """Return the keyed sum of each tensor's bytes; each device is waited for once."""
    sums: dict[str, int] = {}
    for device, key in keys.items():
        here = {name: tensor for name, tensor in tensors.items() if tensor.device == device}
        sums.update(zip(here, _sums_on_device(list(here.values()), key), strict=True))
    return sums


def _sums_on_device(tensors: Sequence[torch.Tensor], key: torch.Tensor) -> list[int]:
    """Return the keyed sums of tensors on the device of the key.

    Words of 32 bits times keys of 64, of which sum the upper half counts: another word gives the same one
    in about 4 billion (multilinear hashing; Lemire and Kaser, "Strongly universal string hashing is fast").
    The lower bits would not do: of a word's highest bit an even key keeps nothing. The sums of a tensor's
    stretches, each times a key by its place, are summed in the same way.
    """
    stretches = [_stretches(tensor) for tensor in tensors]
    parts = key.new_empty(sum(map(len, stretches)))
    products = key.new_empty(_WORDS)
    for part, stretch in zip(parts, itertools.chain(*stretches), strict=True):
        count = stretch.numel()
        torch.mul(stretch, key[:count], out=products[:count])
        torch.sum(products[:count], 0, out=part)
    places = [_WORDS + place % _PLACES for found in stretches for place in range(len(found))]
    owners = [number for number, found in enumerate(stretches) for _ in found]
    weighted = (parts >> 32 & _LOW) * key[_indices(places, key.device)]
    totals = key.new_zeros(len(stretches))
    totals.index_add_(0, _indices(owners, key.device), weighted)
    sums: list[int] = (totals >> 32 & _LOW).tolist()
    return sums


def _indices(numbers: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.long, device=device)


def _stretches(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a tensor's bytes: those that make no whole word, and the words in stretches."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    whole = flat.numel() // 4 * 4
    # A storage may begin where no word does.
    aligned = flat[:whole] if flat.data_ptr() % 4 == 0 else flat[:whole].clone()
    return flat[whole:], *aligned.view(torch.int32).split(_WORDS)
