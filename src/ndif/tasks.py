"""Tasks of the event loop: ended together, or given a time."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Collection
from typing import Any, TypeVar

# `asyncio.wait_for` may lose a cancellation until Python 3.12, and whoever ends a task then waits for ever.
if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout

T = TypeVar("T")


async def end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel them, and return when nothing of them runs."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def within(work: Awaitable[T], seconds: float) -> T:
    """What `work` comes to; after so many seconds it is cancelled.

    Raises:
        asyncio.TimeoutError: then.
    """
    async with timeout(seconds):
        return await work


__all__ = ["end", "timeout", "within"]
