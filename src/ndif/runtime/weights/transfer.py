"""Copies of weights between devices and memory, by way of two pinned buffers.

A device copies to and from ordinary memory at a fraction of its link's rate, because the driver first
copies to a small pinned buffer of its own. Here one buffer is on the link while the other is copied by
this process's threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ndif.runtime.driver import Driver, Event

BUFFER = 64 << 20
"""Bytes of a buffer: long enough on the link for what is done around each copy not to count."""


def to_memory(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], driver: Driver, buffer: int = BUFFER
) -> None:
    """Fill tensors in memory from others on devices.

    Args:
        pairs: A contiguous tensor in memory, and the one that it becomes a copy of.
    """
    slots = [driver.pinned(buffer) for _ in range(2)]
    stored: list[Future[None]] = []

    def store(target: torch.Tensor, staged: torch.Tensor, arrived: Event) -> None:
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
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], driver: Driver, buffer: int = BUFFER
) -> None:
    """Fill tensors on devices from others in memory.

    Args:
        pairs: A contiguous tensor on a device, and the one that it becomes a copy of.
    """
    slots = [driver.pinned(buffer) for _ in range(2)]
    left: list[Event] = []
    for number, (target, source) in enumerate(_pieces(pairs, buffer)):
        if number >= len(slots):
            left[number - len(slots)].synchronize()
        staged = slots[number % len(slots)][: source.numel()]
        # By torch's threads, while the device still copies out of the other buffer.
        staged.copy_(source)
        target.copy_(staged, non_blocking=True)
        left.append(driver.mark(target.device))
    driver.synchronize()


def _pieces(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the bytes of each pair, so many at a time."""
    for target, source in pairs:
        flat = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in (target, source)]
        yield from zip(*(tensor.split(size) for tensor in flat), strict=True)
