"""Shared memory for weights: one process fills it, and others map it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from ndif.host.shared_weights import SharedWeights
from tests.on_loop import on_loop

SIZE = 1 << 20


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@on_loop
async def test_first_process_fills_memory_and_second_finds_it_filled() -> None:
    weights = SharedWeights()
    fd = await weights.of("first", "a model", SIZE)
    assert fd is not None
    assert not weights.filled("a model")
    os.write(fd, b"weights")
    weights.fill("a model", usable=True)
    second = await weights.of("second", "a model", SIZE)
    assert second is not None
    assert weights.filled("a model")
    assert os.pread(second, 7, 0) == b"weights"
    other = await weights.of("second", "another model", SIZE)
    assert other not in (None, fd)
    assert not weights.filled("another model")
    for user in ("first", "second"):
        weights.leave(user)


@on_loop
async def test_second_process_waits_while_first_fills_memory() -> None:
    weights = SharedWeights()
    fd = await weights.of("first", "a model", SIZE)
    waiting = asyncio.create_task(weights.of("second", "a model", SIZE))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    weights.fill("a model", usable=True)
    assert await waiting == fd
    for user in ("first", "second"):
        weights.leave(user)


@on_loop
async def test_next_process_fills_memory_if_first_ends() -> None:
    weights = SharedWeights()
    await weights.of("first", "a model", SIZE)
    waiting = [asyncio.create_task(weights.of(n, "a model", SIZE)) for n in ("second", "third")]
    await asyncio.sleep(0.05)
    weights.leave("first")
    fd = await waiting[0]
    assert fd is not None
    assert not weights.filled("a model")
    assert not waiting[1].done()
    weights.fill("a model", usable=True)
    assert await waiting[1] == fd
    for user in ("second", "third"):
        weights.leave(user)


@on_loop
async def test_memory_is_not_shared_if_first_process_could_not_fill_it() -> None:
    weights = SharedWeights()
    await weights.of("first", "a model", SIZE)
    weights.fill("a model", usable=False)
    assert await weights.of("second", "a model", SIZE) is None
    weights.leave("first")
    weights.leave("second")


@on_loop
async def test_memory_is_freed_after_its_last_process() -> None:
    before = descriptors()
    weights = SharedWeights()
    fd = await weights.of("first", "a model", SIZE)
    weights.fill("a model", usable=True)
    assert fd is not None
    await weights.of("second", "a model", SIZE)
    weights.leave("first")
    os.fstat(fd)
    assert await weights.of("third", "a model", SIZE) == fd
    weights.leave("second")
    weights.leave("second")  # leaving twice is no error
    os.fstat(fd)
    weights.leave("third")
    assert descriptors() == before
    again = await weights.of("fourth", "a model", SIZE)
    assert again is not None
    assert not weights.filled("a model")
    weights.leave("fourth")
    assert descriptors() == before


@on_loop
async def test_too_large_model_is_not_shared() -> None:
    weights = SharedWeights()
    assert await weights.of("first", "a large model", 1 << 50) is None
    assert not weights.filled("a large model")
