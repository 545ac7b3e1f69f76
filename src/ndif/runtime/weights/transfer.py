"""Copies of weights between devices and memory, through two pinned buffers.

A device copies to and from ordinary memory at a fraction of its link's rate, because the driver uses a
small pinned buffer of its own. Here the device transfers one buffer while this process's threads copy the
other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ndif.runtime.process.cuda import Cuda

BUFFER = 64 << 20
"""Bytes of a buffer, large enough for the overhead of each copy to be negligible."""


def to_memory(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], driver: Cuda, buffer: int = BUFFER
) -> None:
    """Copy tensors to memory; `pairs` are a contiguous target and its source on a device."""
    slots = [driver.pinned(buffer) for _ in range(2)]
    stored: list[Future[None]] = []

    def store(target: torch.Tensor, staged: torch.Tensor, arrived: torch.cuda.Event) -> None:
        arrived.synchronize()
        target.copy_(staged)

    with ThreadPoolExecutor(1) as copier:
        for number, (target, source) in enumerate(_pieces(pairs, buffer)):
            if number >= len(slots):
                stored[number - len(slots)].result()
            staged = slots[number % len(slots)][: source.numel()]
            staged.copy_(source, non_blocking=True)
            stored.append(copier.submit(store, target, staged, driver.mark(source.device)))
        for future in stored:
            future.result()


def to_devices(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], driver: Cuda, buffer: int = BUFFER
) -> None:
    """Copy tensors to devices; `pairs` are a contiguous target and its source in memory."""
    slots = [driver.pinned(buffer) for _ in range(2)]
    transferred: list[torch.cuda.Event] = []
    for number, (target, source) in enumerate(_pieces(pairs, buffer)):
        if number >= len(slots):
            transferred[number - len(slots)].synchronize()
        staged = slots[number % len(slots)][: source.numel()]
        # torch's threads copy into this buffer while the device still reads the other.
        staged.copy_(source)
        target.copy_(staged, non_blocking=True)
        transferred.append(driver.mark(target.device))
    driver.synchronize()


def _pieces(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the bytes of each pair in pieces of at most `size`."""
    for target, source in pairs:
        flat = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in (target, source)]
        yield from zip(*(tensor.split(size) for tensor in flat), strict=True)
