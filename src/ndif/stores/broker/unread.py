"""Updates that a client has yet to read: as many bytes as it is allowed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sized
from typing import TypeVar

T = TypeVar("T", bound=Sized)


class Unread(asyncio.Queue[T]):
    """A queue that counts its bytes, and is given up once it has more of them than it may.

    One item more is always taken, so that the last update of a job finds room behind what the job printed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._bytes = 0
        self._limit = sys.maxsize
        self._give_up: Callable[[], None] = lambda: None
        self._is_over = asyncio.Event()
        self._was_read = asyncio.Event()

    def bound(self, limit: int, give_up: Callable[[], None]) -> None:
        """Call `give_up` once something is put where more than `limit` bytes wait; drop it and the rest."""
        self._limit, self._give_up = limit, give_up

    def close(self) -> None:
        """Drop everything, now and from now on."""
        self._is_over.set()
        self._was_read.set()
        self._queue.clear()  # type: ignore[attr-defined]
        self._bytes = 0

    async def until_takes(self, size: int) -> None:
        """Return once `size` more bytes are within the limit, or it is empty, or given up."""
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
