"""A keyed checksum of weights."""

from __future__ import annotations

import pytest
import torch

from ndif.runtime.weights.checksum import WeightChecksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000, (1 << 23) + 5])
def test_one_changed_byte_is_detected(dtype: torch.dtype, count: int) -> None:
    tensor = torch.zeros(count, dtype=dtype)
    tensors = {"other": torch.ones(3), "it": tensor}
    checksum = WeightChecksum.of(tensors)
    assert checksum.find_changed(tensors) == []
    for place in {0, count // 2, count - 1} if count else set():
        before = tensor[place].clone()
        tensor[place] = 1
        assert checksum.find_changed(tensors) == ["it"]
        tensor[place] = before
        assert checksum.find_changed(tensors) == []


def test_changed_signs_are_detected_with_any_key() -> None:
    for _ in range(30):
        tensor = torch.randn(64)
        checksum = WeightChecksum.of({"it": tensor})
        for places in ([1], [0, 1], [1, 3], [60, 61, 62, 63]):
            tensor[places] *= -1
            assert checksum.find_changed({"it": tensor}) == ["it"]
            tensor[places] *= -1


def test_swapped_words_are_detected() -> None:
    tensor = torch.randn(1 << 20)
    checksum = WeightChecksum.of({"it": tensor})
    tensor[:] = tensor.flip(0)
    assert checksum.find_changed({"it": tensor}) == ["it"]


def test_swapped_stretches_are_detected() -> None:
    stretch = (1 << 22) * 8
    tensor = torch.randint(0, 255, (2 * stretch,), dtype=torch.uint8)
    checksum = WeightChecksum.of({"it": tensor})
    tensor[:] = torch.cat([tensor[stretch:], tensor[:stretch]])
    assert checksum.find_changed({"it": tensor}) == ["it"]


def test_change_in_unaligned_view_is_detected() -> None:
    whole = torch.arange(100, dtype=torch.uint8)
    checksum = WeightChecksum.of({"part": whole[3:90]})
    assert checksum.find_changed({"part": whole[3:90]}) == []
    whole[89] = 0
    assert checksum.find_changed({"part": whole[3:90]}) == ["part"]
    assert checksum.find_changed({"part": whole[3:90].t()}) == ["part"]


@pytest.mark.parametrize("start", [0, 1, 4, 16])
def test_rolled_rows_are_detected_at_any_start(start: int) -> None:
    whole = torch.randint(0, 255, (1 << 20,), dtype=torch.uint8)
    tensors = {"rows": whole[start:]}
    checksum = WeightChecksum.of(tensors)
    assert checksum.find_changed(tensors) == []
    whole[start + 8192 : start + 3 * 8192] = whole[start + 8192 : start + 3 * 8192].roll(8192)
    assert checksum.find_changed(tensors) == ["rows"]


def test_empty_dictionary_has_no_changed_tensors() -> None:
    assert WeightChecksum.of({"it": torch.ones(64)}).find_changed({}) == []


def test_every_checksum_has_a_key_of_its_own() -> None:
    tensors = {"it": torch.ones(64)}
    assert WeightChecksum.of(tensors).sums != WeightChecksum.of(tensors).sums
