"""Slots for measurements: concurrency, order, and interruption of long work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from ndif.host.measurement_slots import MeasurementSlots
from ndif.tasks import end
from tests.on_loop import on_virtual_loop
from tests.waiting import virtual_time_passes

LONG_S = 0.3
"""Seconds of work that is interrupted if other work waits."""
FIRST_S = 0.05


class Bench:
    """Work that records its order and its concurrency."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.running = 0
        self.most = 0

    def work(self, name: str, seconds: float) -> Callable[[], Coroutine[Any, Any, str]]:
        async def take() -> str:
            self.began.append(name)
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                await virtual_time_passes(seconds)
            finally:
                self.running -= 1
            return name

        return take


@on_virtual_loop
async def test_concurrency_is_limited_and_all_work_ends() -> None:
    bench, turns = Bench(), MeasurementSlots(3, 10)
    names = [str(number) for number in range(20)]
    ended = await asyncio.gather(*(turns.run("a", bench.work(name, 0.001)) for name in names))
    assert (ended, bench.began, bench.most) == (names, names, 3)


@on_virtual_loop
async def test_owner_with_many_tasks_does_not_starve_another() -> None:
    bench, turns = Bench(), MeasurementSlots(2, 10)
    many = [
        asyncio.create_task(turns.run("many", bench.work(f"many {number}", 0.01)))
        for number in range(20)
    ]
    await asyncio.sleep(0)
    assert await turns.run("one", bench.work("one", 0.001)) == "one"
    assert bench.began.index("one") <= 4
    await asyncio.gather(*many)


@on_virtual_loop
async def test_long_work_yields_to_waiting_work_and_still_completes() -> None:
    bench, turns = Bench(), MeasurementSlots(2, FIRST_S)
    long = [
        asyncio.create_task(turns.run(f"long {number}", bench.work("long", LONG_S)))
        for number in range(4)
    ]
    await asyncio.sleep(0)
    started = asyncio.get_running_loop().time()
    await turns.run("short", bench.work("short", 0.001))
    # Two before it, once each.
    assert asyncio.get_running_loop().time() - started < LONG_S
    assert await asyncio.gather(*long) == ["long"] * 4
    assert bench.most == 2
    assert turns._running.total() == 0


@on_virtual_loop
async def test_long_work_is_not_interrupted_while_no_work_waits() -> None:
    bench, turns = Bench(), MeasurementSlots(2, FIRST_S)
    both = [turns.run("a", bench.work(name, LONG_S)) for name in ("one", "two")]
    assert await asyncio.gather(*both) == ["one", "two"]
    assert bench.began == ["one", "two"]


@on_virtual_loop
async def test_failed_and_cancelled_work_frees_its_slot() -> None:
    bench, turns = Bench(), MeasurementSlots(1, 10)

    async def fail() -> None:
        raise ValueError("a reason")

    with pytest.raises(ValueError, match="a reason"):
        await turns.run("a", fail)
    running = asyncio.create_task(turns.run("a", bench.work("first", 60)))
    waiting = [asyncio.create_task(turns.run("b", bench.work("never", 60))) for _ in range(3)]
    await asyncio.sleep(0.01)
    # The next caller leaves at the moment when it gets the slot.
    running.cancel()
    await end(waiting)
    await end([running])
    assert await turns.run("c", bench.work("last", 0)) == "last"
    assert "never" not in bench.began[:1]
    assert turns._running.total() == 0
