"""A keyed checksum of weights in memory that other processes can write to.

Each 32-bit word is multiplied by a random 64-bit word; the checksum is the upper half of the products'
sum. Without the key, other contents with the same checksum can be written only by chance.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

_WORDS = 1 << 21
"""Words of 32 bits per sum. With their keys and products they fit in a GPU's cache."""
_PLACES = 1 << 14
_LOW = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class WeightChecksum:
    """The checksums of tensors and their key, which must not leave this process."""

    keys: Mapping[torch.device, torch.Tensor]
    sums: Mapping[str, int]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> WeightChecksum:
        """Return the checksum of the present contents of `tensors`, which have plain layouts."""
        generator = torch.Generator().manual_seed(secrets.randbits(63))
        key = torch.randint(-(1 << 63), (1 << 63) - 1, (_WORDS + _PLACES,), generator=generator)
        keys = {device: key.to(device) for device in {t.device for t in tensors.values()}}
        return cls(keys, _sums(tensors, keys))

    def find_changed(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of the tensors whose contents have changed."""
        return [name for name, sum_ in _sums(tensors, self.keys).items() if sum_ != self.sums[name]]


def _sums(
    tensors: Mapping[str, torch.Tensor], keys: Mapping[torch.device, torch.Tensor]
) -> dict[str, int]:
    """Return the keyed sum of each tensor's bytes, with one synchronization per device."""
    sums: dict[str, int] = {}
    for device, key in keys.items():
        here = {name: tensor for name, tensor in tensors.items() if tensor.device == device}
        sums.update(zip(here, _sums_on_device(list(here.values()), key), strict=True))
    return sums


def _sums_on_device(tensors: Sequence[torch.Tensor], key: torch.Tensor) -> list[int]:
    """Return the keyed sums of tensors on the device of the key.

    This is multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast"): words of 32
    bits times keys of 64 bits, and the upper half of the sum. A changed word gives the same sum with a
    probability of about 1 in 4 billion. The lower half would not do: an even key drops a word's highest
    bit. A tensor's stretches are summed one by one, and their sums, each times a key for its position, in
    the same way.
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
    """Return a tensor's bytes: the last ones, which make no whole word, and the words in stretches."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    whole = flat.numel() // 4 * 4
    # A tensor's address may not be a multiple of a word's size.
    aligned = flat[:whole] if flat.data_ptr() % 4 == 0 else flat[:whole].clone()
    return flat[whole:], *aligned.view(torch.int32).split(_WORDS)
