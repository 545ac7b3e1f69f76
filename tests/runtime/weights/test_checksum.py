"""A keyed checksum of weights."""

from __future__ import annotations

import pytest
import torch

from ndif.runtime.seal import Seal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000, (1 << 23) + 5])
def test_one_changed_byte_is_seen(dtype: torch.dtype, count: int) -> None:
    tensor = torch.zeros(count, dtype=dtype)
    tensors = {"other": torch.ones(3), "it": tensor}
    seal = Seal.of(tensors)
    assert seal.broken(tensors) == []
    for place in {0, count // 2, count - 1} if count else set():
        before = tensor[place].clone()
        tensor[place] = 1
        assert seal.broken(tensors) == ["it"]
        tensor[place] = before
        assert seal.broken(tensors) == []


def test_signs_are_seen_whatever_the_key() -> None:
    for _ in range(30):
        tensor = torch.randn(64)
        seal = Seal.of({"it": tensor})
        for places in ([1], [0, 1], [1, 3], [60, 61, 62, 63]):
            tensor[places] *= -1
            assert seal.broken({"it": tensor}) == ["it"]
            tensor[places] *= -1


def test_numbers_that_change_places_are_seen() -> None:
    tensor = torch.randn(1 << 20)
    seal = Seal.of({"it": tensor})
    tensor[:] = tensor.flip(0)
    assert seal.broken({"it": tensor}) == ["it"]


def test_stretches_that_change_places_are_seen() -> None:
    stretch = (1 << 22) * 8
    tensor = torch.randint(0, 255, (2 * stretch,), dtype=torch.uint8)
    seal = Seal.of({"it": tensor})
    tensor[:] = torch.cat([tensor[stretch:], tensor[:stretch]])
    assert seal.broken({"it": tensor}) == ["it"]


def test_a_view_from_the_middle_of_a_word() -> None:
    whole = torch.arange(100, dtype=torch.uint8)
    seal = Seal.of({"part": whole[3:90]})
    assert seal.broken({"part": whole[3:90]}) == []
    whole[89] = 0
    assert seal.broken({"part": whole[3:90]}) == ["part"]
    assert seal.broken({"part": whole[3:90].t()}) == ["part"]


def test_every_seal_has_a_key_of_its_own() -> None:
    tensors = {"it": torch.ones(64)}
    assert Seal.of(tensors).sums != Seal.of(tensors).sums
