"""Waits of tests: for an event, with one bound for all waits, or for a duration that a test is about.

A wait for an event ends when the event occurs: a busy machine makes a test slower, but never fail.
This is the only file of tests that may sleep for long; `tests/test_waits.py` enforces that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import TypeVar

from ndif.simulation.virtual_time import VirtualLoop

T = TypeVar("T")

PATIENCE_S = 300.0
"""Bound of every wait, in seconds: far above each limit under test on a machine with four busy loops."""
POLL_S = 0.02
_SLOWEST_S, _FACTOR = 0.1, 1.1
"""Polls become rarer with time: the polled process runs on the same cores."""


def until(condition: Callable[[], T | None], explain: Callable[[], str] = str) -> T:
    """Wait until `condition` returns something true, and return it; fail with `explain` otherwise."""
    deadline, pause_s = time.monotonic() + PATIENCE_S, POLL_S
    while not (value := condition()):
        assert time.monotonic() < deadline, explain()
        time.sleep(pause_s)
        pause_s = min(_FACTOR * pause_s, _SLOWEST_S)
    return value


async def eventually(
    condition: Callable[[], T | Awaitable[T | None] | None], explain: Callable[[], str] = str
) -> T:
    """Wait until `condition`, a function or a coroutine function, returns something true; return it."""
    loop = asyncio.get_running_loop()
    deadline, pause_s = loop.time() + PATIENCE_S, POLL_S
    while True:
        value = condition()
        if isawaitable(value):
            value = await value
        if value:
            return value
        assert loop.time() < deadline, explain()
        await asyncio.sleep(pause_s)
        pause_s = min(_FACTOR * pause_s, _SLOWEST_S)


def time_passes(seconds: float) -> None:
    """Let real time pass, for a test about time or a test that nothing happens.

    A longer sleep must never make the test fail.
    """
    time.sleep(seconds)


async def time_passes_async(seconds: float) -> None:
    """Let real time pass on an event loop, as `time_passes` does."""
    assert not isinstance(asyncio.get_running_loop(), VirtualLoop)
    await asyncio.sleep(seconds)


async def virtual_time_passes(seconds: float) -> None:
    """Let virtual time pass on a `VirtualLoop`; this takes no real time."""
    assert isinstance(asyncio.get_running_loop(), VirtualLoop)
    await asyncio.sleep(seconds)
