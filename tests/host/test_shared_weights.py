"""Memory for weights, handed to one process after the other."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from tests.on_loop import on_loop

from ndif.host.weights import Weights

SIZE = 1 << 20


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@on_loop
async def test_the_first_fills_and_the_second_finds_it_filled() -> None:
    weights = Weights()
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
async def test_a_second_waits_while_the_first_fills() -> None:
    weights = Weights()
    fd = await weights.of("first", "a model", SIZE)
    waiting = asyncio.create_task(weights.of("second", "a model", SIZE))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    weights.fill("a model", usable=True)
    assert await waiting == fd
    for user in ("first", "second"):
        weights.leave(user)


@on_loop
async def test_who_ends_while_it_fills_is_followed_by_the_next() -> None:
    weights = Weights()
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
async def test_where_the_first_could_not_nobody_is_asked_to() -> None:
    weights = Weights()
    await weights.of("first", "a model", SIZE)
    weights.fill("a model", usable=False)
    assert await weights.of("second", "a model", SIZE) is None
    weights.leave("first")
    weights.leave("second")


@on_loop
async def test_it_is_there_as_long_as_one_uses_it() -> None:
    before = descriptors()
    weights = Weights()
    fd = await weights.of("first", "a model", SIZE)
    weights.fill("a model", usable=True)
    assert fd is not None
    await weights.of("second", "a model", SIZE)
    weights.leave("first")
    os.fstat(fd)
    assert await weights.of("third", "a model", SIZE) == fd
    weights.leave("second")
    weights.leave("second")  # whoever ends may end twice
    os.fstat(fd)
    weights.leave("third")
    assert descriptors() == before
    again = await weights.of("fourth", "a model", SIZE)
    assert again is not None
    assert not weights.filled("a model")
    weights.leave("fourth")
    assert descriptors() == before


@on_loop
async def test_more_than_half_of_what_is_free_is_not_taken() -> None:
    weights = Weights()
    assert await weights.of("first", "a large model", 1 << 50) is None
    assert not weights.filled("a large model")
