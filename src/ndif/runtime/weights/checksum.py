"""A keyed checksum of weights in memory that other processes can write to.

Rows of bytes are multiplied by random rows, which a GPU's matrix units do about as fast as they read. Each
32-bit word of the result is multiplied by a random 64-bit word; the checksum is the upper half of the sum
of the products. Without the keys, different contents have the same checksum only by chance.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

_WORDS = 1 << 21
"""Words of 32 bits per sum. The words, keys and products fit in a GPU's cache."""
_PLACES = 1 << 14
_LOW = (1 << 32) - 1
_ROW_BYTES = 1 << 13
_DIGESTS = 16
"""Digests of each row, each under its own key."""
_MIN_ROWS = 17
_ALIGNMENT = 16
"""Fewest rows, and alignment of their address, for which CUDA's libraries multiply bytes."""


@dataclass(frozen=True, slots=True)
class _Key:
    """The random keys for the checksums on one device, and buffers for intermediate results."""

    words: torch.Tensor
    rows: torch.Tensor
    digests: torch.Tensor
    products: torch.Tensor

    @classmethod
    def of(cls, device: torch.device, seed: int) -> _Key:
        generator = torch.Generator().manual_seed(seed)
        words = torch.randint(-(1 << 63), (1 << 63) - 1, (_WORDS + _PLACES,), generator=generator)
        rows = torch.randint(
            -128, 128, (_DIGESTS, _ROW_BYTES), generator=generator, dtype=torch.int8
        )
        words = words.to(device)
        digests = words.new_empty(_WORDS // _DIGESTS, _DIGESTS, dtype=torch.int32)
        # The libraries need a column-major matrix for bytes.
        return cls(words, rows.to(device).t(), digests, words.new_empty(_WORDS))


@dataclass(frozen=True, slots=True)
class WeightChecksum:
    """The checksums of tensors and their keys; the keys must not leave this process."""

    keys: Mapping[torch.device, _Key]
    sums: Mapping[str, int]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> WeightChecksum:
        """Return the checksums of the present contents of `tensors`."""
        seed = secrets.randbits(63)
        keys = {device: _Key.of(device, seed) for device in {t.device for t in tensors.values()}}
        return cls(keys, _sums(tensors, keys))

    def find_changed(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of tensors whose contents differ from their checksums."""
        return [name for name, sum_ in _sums(tensors, self.keys).items() if sum_ != self.sums[name]]


def _sums(tensors: Mapping[str, torch.Tensor], keys: Mapping[torch.device, _Key]) -> dict[str, int]:
    """Return the keyed sum of each tensor's bytes, with one synchronization per device."""
    sums: dict[str, int] = {}
    for device, key in keys.items():
        on_device = {name: tensor for name, tensor in tensors.items() if tensor.device == device}
        sums.update(zip(on_device, _sums_on_device(list(on_device.values()), key), strict=True))
    return sums


def _sums_on_device(tensors: Sequence[torch.Tensor], key: _Key) -> list[int]:
    """Return the keyed sums of tensors on the device of the key.

    This is multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast"): the upper
    half of a sum of 32-bit words times 64-bit keys. A changed word gives the same sum with a probability of
    about 1 in 4 billion. The lower half is unsuitable: an even key drops a word's highest bit. Each stretch
    of a tensor is summed this way; so are the sums, with a key for each stretch's position.
    """
    parts, places, owners = [], [], []
    for owner, tensor in enumerate(tensors):
        for place, stretch in enumerate(_stretches(tensor, key)):
            count = stretch.numel()
            torch.mul(stretch, key.words[:count], out=key.products[:count])
            parts.append(key.products[:count].sum(0))
            places.append(_WORDS + place % _PLACES)
            owners.append(owner)
    totals = key.words.new_zeros(len(tensors))
    if parts:
        device = key.words.device
        weighted = (torch.stack(parts) >> 32 & _LOW) * key.words[_indices(places, device)]
        totals.index_add_(0, _indices(owners, device), weighted)
    sums: list[int] = (totals >> 32 & _LOW).tolist()
    return sums


def _indices(numbers: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.long, device=device)


def _stretches(tensor: torch.Tensor, key: _Key) -> Iterator[torch.Tensor]:
    """Yield stretches that represent a tensor's bytes: the bytes after the last whole word, then words.

    Whole rows are represented by digests: sums of a row's bytes times the bytes of a key. A changed row
    keeps a digest with a probability of at most 1 in 256, because for a changed byte only one key byte in
    256 compensates the other changes. Use each stretch before the next one, which may overwrite it.
    """
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    word_bytes = flat.numel() // 4 * 4
    # A tensor's address need not be a multiple of the word size.
    aligned = flat[:word_bytes] if flat.data_ptr() % 4 == 0 else flat[:word_bytes].clone()
    yield flat[word_bytes:]
    digested = 0
    if aligned.data_ptr() % _ALIGNMENT == 0:
        rows = (
            aligned[: word_bytes // _ROW_BYTES * _ROW_BYTES].view(torch.int8).view(-1, _ROW_BYTES)
        )
        for batch in rows.split(len(key.digests)):
            if len(batch) >= _MIN_ROWS:
                digests = key.digests[: len(batch)]
                torch._int_mm(batch, key.rows, out=digests)
                digested += batch.numel()
                yield digests.flatten()
    yield from aligned[digested:].view(torch.int32).split(_WORDS)
