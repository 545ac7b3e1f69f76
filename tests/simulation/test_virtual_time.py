"""Virtual time: asyncio without real waiting."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndif.simulation.virtual_time import DeadlockError, VirtualLoop, run
from tests.waiting import virtual_time_passes as elapse

pytestmark = pytest.mark.process

DAY_S = 86400.0


def now() -> float:
    return asyncio.get_running_loop().time()


# Time


def test_thousand_years_elapse_at_once() -> None:
    async def main() -> float:
        await elapse(1000 * 365 * DAY_S)
        return now()

    assert run(main()) == pytest.approx(1000 * 365 * DAY_S, rel=1e-12)


def test_virtual_clock_starts_at_zero_and_stands_still_while_code_runs() -> None:
    async def main() -> tuple[float, float]:
        before = now()
        for _ in range(1000):
            await asyncio.sleep(0)
        return before, now()

    assert run(main()) == (0.0, 0.0)


@given(st.lists(st.floats(0, 1e7), min_size=1, max_size=40))
def test_timers_fire_in_order_of_time(delays: list[float]) -> None:
    """Each timer finds the clock at its own time."""
    came: list[tuple[float, int]] = []

    async def sleeper(number: int, delay: float) -> None:
        await elapse(delay)
        came.append((delay, number))
        assert now() == pytest.approx(delay, rel=1e-12, abs=1e-8)

    async def main() -> float:
        await asyncio.gather(*(sleeper(number, delay) for number, delay in enumerate(delays)))
        return now()

    assert run(main()) == pytest.approx(max(delays), rel=1e-12, abs=1e-8)
    # Times closer together than the clock's resolution are equal.
    assert [delay for delay, _ in came] == pytest.approx(sorted(delays), abs=1e-8)
    if len({round(delay, 6) for delay in delays}) == len(delays):
        assert came == sorted(came)


def test_equal_timers_all_fire() -> None:
    came: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in range(20):
            loop.call_at(5.0, came.append, number)
        await elapse(5.1)

    run(main())
    assert sorted(came) == list(range(20))


def test_a_cancelled_timer_does_not_move_the_clock() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        timers = [loop.call_later(delay, pytest.fail, "cancelled") for delay in range(1, 400)]
        for timer in timers:
            timer.cancel()
        await elapse(0.5)
        return now()

    assert run(main()) == 0.5


def test_ready_tasks_run_in_turn_before_time_passes() -> None:
    came: list[str] = []

    async def chatter(name: str) -> None:
        for _ in range(3):
            came.append(name)
            await asyncio.sleep(0)

    async def main() -> None:
        asyncio.get_running_loop().call_later(1e-6, came.append, "timer")
        await asyncio.gather(chatter("a"), chatter("b"))
        await elapse(1)

    run(main())
    assert came == ["a", "b", "a", "b", "a", "b", "timer"]


# asyncio's tools


def test_wait_for_times_out_at_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 7)
        return now()

    assert run(main()) == 7.0


def test_wait_for_returns_before_timeout() -> None:
    async def works() -> str:
        await elapse(3)
        return "done"

    async def main() -> tuple[str, float]:
        return await asyncio.wait_for(works(), 7), now()

    assert run(main()) == ("done", 3.0)


def test_events_queues_and_locks_work_without_time_passing() -> None:
    heard: list[tuple[int, float]] = []

    async def main() -> None:
        queue: asyncio.Queue[int] = asyncio.Queue(1)
        lock, over = asyncio.Lock(), asyncio.Event()

        async def listen() -> None:
            while not over.is_set():
                number = await queue.get()
                async with lock:
                    heard.append((number, now()))

        listening = asyncio.create_task(listen())
        for number in range(3):
            await elapse(2)
            await queue.put(number)
        over.set()
        await listening

    run(main())
    assert heard == [(0, 2.0), (1, 4.0), (2, 6.0)]


def test_exception_propagates_from_run() -> None:
    async def main() -> None:
        await elapse(1)
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        run(main())


# The end


def test_deadlock_error_names_waiting_task() -> None:
    async def main() -> None:
        await elapse(12)
        task = asyncio.create_task(asyncio.Event().wait(), name="the one that waits")
        await task

    with pytest.raises(DeadlockError, match=r"At 12s .* the one that waits"):
        run(main())


def test_tasks_waiting_for_each_other_are_a_deadlock() -> None:
    async def main() -> None:
        locks = asyncio.Lock(), asyncio.Lock()

        async def take(first: asyncio.Lock, second: asyncio.Lock) -> None:
            async with first:
                await elapse(1)
                async with second:
                    pass

        await asyncio.gather(take(*locks), take(*locks[::-1]))

    with pytest.raises(DeadlockError):
        run(main())


def test_remaining_tasks_are_cancelled_and_may_clean_up() -> None:
    events: list[str] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            events.append("closed")

    async def stays() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await elapse(60)
            events.append("cleaned up")

    async def main() -> AsyncIterator[int]:
        asyncio.create_task(stays())  # noqa: RUF006 - left behind on purpose
        await elapse(1)
        left = numbers()
        assert await anext(left) == 1
        return left

    assert run(main()) is not None
    assert events == ["cleaned up", "closed"]


def test_tasks_are_cancelled_after_deadlock() -> None:
    events: list[str] = []

    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            events.append("cleaned up")

    with pytest.raises(DeadlockError):
        run(main())
    assert events == ["cleaned up"]


# Operations in real time


def test_threads_are_refused() -> None:
    async def main() -> None:
        await asyncio.to_thread(time.sleep, 0)

    with pytest.raises(RuntimeError, match="no threads"):
        run(main())


def test_sockets_are_refused() -> None:
    ours, theirs = socket.socketpair()
    with contextlib.closing(ours), contextlib.closing(theirs):
        ours.setblocking(False)

        async def main() -> None:
            await asyncio.get_running_loop().sock_recv(ours, 1)

        with pytest.raises(RuntimeError, match="no input or output"):
            run(main())


def test_processes_are_refused() -> None:
    async def main() -> None:
        await asyncio.create_subprocess_exec(sys.executable, "-c", "", stdout=-1)

    with pytest.raises(RuntimeError, match="no processes"):
        run(main())


def test_closed_loop_refuses_calls() -> None:
    loop = VirtualLoop()
    loop.close()
    assert loop.is_closed()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon(print)
