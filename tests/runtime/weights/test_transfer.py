"""Copies through two buffers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ndif.runtime.weights.transfer import to_devices, to_memory
from tests.runtime.process.pretend_driver import PretendDriver


class Late(PretendDriver):
    """A driver that records its pinned buffers and counts synchronizations."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.buffers: list[torch.Tensor] = []
        self.waited = 0

    def pinned(self, size: int) -> torch.Tensor:
        self.buffers.append(torch.empty(size, dtype=torch.uint8))
        return self.buffers[-1]

    def mark(self, device: torch.device) -> Any:
        return _Mark(self)


class _Mark:
    def __init__(self, driver: Late) -> None:
        self._driver = driver
        self._lock = threading.Lock()

    def synchronize(self) -> None:
        with self._lock:
            self._driver.waited += 1


SHAPES = [(3, 5), (0, 7), (), (1000,), (64,), (65,)]
BUFFER = 64


@pytest.mark.parametrize("copy", [to_memory, to_devices])
def test_every_byte_is_copied(tmp_path: Path, copy: Callable[..., None]) -> None:
    torch.manual_seed(0)
    driver = Late(tmp_path)
    sources = [
        torch.randn(shape).to(dtype) for shape in SHAPES for dtype in (torch.float32, torch.int8)
    ]
    targets = [torch.zeros_like(source) for source in sources]
    copy(zip(targets, sources, strict=True), driver, BUFFER)
    assert all(torch.equal(*pair) for pair in zip(targets, sources, strict=True))
    assert [buffer.numel() for buffer in driver.buffers] == [BUFFER] * 2
    # A buffer is reused only after its previous content was transferred.
    pieces = sum(max(1, -(-source.nbytes // BUFFER)) for source in sources)
    assert driver.waited == pieces - (2 if copy is to_devices else 0)


def test_source_with_other_layout_is_copied(tmp_path: Path) -> None:
    source = torch.randn(6, 4).t()
    target = torch.empty(4, 6)
    to_memory([(target, source)], PretendDriver(tmp_path), BUFFER)
    assert torch.equal(target, source)
