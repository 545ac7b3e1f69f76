"""Tasks of the event loop: cancellation and deadlines."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Collection, Coroutine
from typing import Any, TypeVar

# `asyncio.wait_for` may lose a cancellation before Python 3.12, and the canceller then waits for ever.
if sys.version_info >= (3, 11):
    from asyncio import timeout as timeout
else:
    from async_timeout import timeout as timeout

T = TypeVar("T")


async def end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until all have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def start(work: Coroutine[Any, Any, T], tasks: set[asyncio.Task[T]], name: str) -> asyncio.Task[T]:
    """Start a task, which `tasks` holds until it ends."""
    task = asyncio.create_task(work, name=name)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def within(work: Awaitable[T], seconds: float) -> T:
    """Return the result of `work`, which is cancelled after so many seconds."""
    async with timeout(seconds):
        return await work
