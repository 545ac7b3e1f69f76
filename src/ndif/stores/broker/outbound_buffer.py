"""Updates that a client has not read yet, up to a limit of bytes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sized
from typing import TypeVar

T = TypeVar("T", bound=Sized)


class OutboundBuffer(asyncio.Queue[T]):
    """A queue with a limit of bytes; a put while the limit is exceeded closes the queue.

    The item that exceeds the limit is still accepted, so that a job's last update fits behind its output.
    """

    def __init__(self) -> None:
        super().__init__()
        self._bytes = 0
        self._limit = sys.maxsize
        self._give_up: Callable[[], None] = lambda: None
        self._is_over = asyncio.Event()
        self._was_read = asyncio.Event()

    def bound(self, limit: int, give_up: Callable[[], None]) -> None:
        """Set the limit: a put while more than `limit` bytes wait drops all items and calls `give_up`."""
        self._limit, self._give_up = limit, give_up

    def close(self) -> None:
        """Drop all items, and every item that is put later."""
        self._is_over.set()
        self._was_read.set()
        self._queue.clear()  # type: ignore[attr-defined]
        self._bytes = 0

    async def until_takes(self, size: int) -> None:
        """Return once `size` more bytes are within the limit, or the queue is empty or closed."""
        while self._bytes and self._bytes + size > self._limit and not self._is_over.is_set():
            self._was_read.clear()
            await self._was_read.wait()

    def put_nowait(self, item: T) -> None:
        if self._is_over.is_set():
            return
        if self._bytes > self._limit:
            self.close()
            self._give_up()
            return
        self._bytes += len(item)
        super().put_nowait(item)

    async def get(self) -> T:
        item: T = await super().get()
        self._bytes -= len(item)
        self._was_read.set()
        return item
