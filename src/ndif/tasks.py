"""Helpers for asyncio tasks and child processes: start, deadline, cancellation and end."""

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
"""Longest wait for the end of a killed process."""


async def end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until all have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def start(work: Coroutine[Any, Any, T], tasks: set[asyncio.Task[T]], name: str) -> asyncio.Task[T]:
    """Start a task; `tasks` references it until it ends, because the event loop's reference is weak."""
    task = asyncio.create_task(work, name=name)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def within(work: Awaitable[T], seconds: float | None) -> T:
    """Return the result of `work`; after `seconds`, cancel it and raise an `asyncio.TimeoutError`."""
    async with timeout(seconds):
        return await work


async def in_own_task(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a library's `work`, run as its own task.

    If the caller is cancelled, cancel `work`, wait for its end and raise `CancelledError`, even if the
    library's `asyncio.wait_for` loses the cancellation.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task])
    finally:
        await end([task])
    return task.result()


def in_daemon_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run `work` in a daemon thread, which does not delay the exit of the process; return its future."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a cancelled caller does not stop the thread

    def do() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=do, name="aside", daemon=True).start()
    return asyncio.wrap_future(future)


async def reap(process: asyncio.subprocess.Process) -> None:
    """Wait for the end of a killed process, and drain its pipes.

    `Process.wait` alone does not return while unread output fills a pipe. The wait has a limit, because a
    child of the killed process may hold the pipes open.
    """
    with contextlib.suppress(asyncio.TimeoutError):
        await within(process.communicate(), _REAP_S)
