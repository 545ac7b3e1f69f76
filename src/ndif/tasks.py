"""Tasks and child processes of the event loop: cancellation, deadlines and ends."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

# `asyncio.wait_for` may lose a cancellation before Python 3.12, and the canceller then waits for ever.
if sys.version_info >= (3, 11):
    from asyncio import timeout as timeout
else:
    from async_timeout import timeout as timeout

T = TypeVar("T")

_REAP_S = 10.0
"""Seconds in which a killed process is gone."""


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


async def within(work: Awaitable[T], seconds: float | None) -> T:
    """Return the result of `work`, which is cancelled after so many seconds; None: never."""
    async with timeout(seconds):
        return await work


async def apart(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a library's `work`, whose own `asyncio.wait_for` may lose a cancellation.

    The caller's cancellation then arrives all the same, once the work has ended.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task])
    finally:
        await end([task])
    return task.result()


def aside(work: Callable[[], T]) -> asyncio.Future[T]:
    """Return the result of `work`, done in a thread that does not delay the end of the process."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a caller that is cancelled leaves the thread to itself

    def do() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=do, name="aside", daemon=True).start()
    return asyncio.wrap_future(future)


async def reap(process: asyncio.subprocess.Process) -> None:
    """Wait for the end of a killed process, whose pipes nobody reads any more.

    `Process.wait` alone does not return while more lies in a pipe than its reader takes. A process that the
    killed one started may hold the pipes: it is not waited for.
    """
    with contextlib.suppress(asyncio.TimeoutError):
        await within(process.communicate(), _REAP_S)
