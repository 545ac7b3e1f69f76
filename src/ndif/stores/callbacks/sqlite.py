"""The queue of call-backs of a server of one process: one SQLite file beside the results."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from ndif.schema.callback import Callback
from ndif.stores.callbacks.port import (
    MAX_DEAD,
    MAX_OF_USER,
    MAX_WAITING,
    CallbackQueueError,
    require_room,
)
from ndif.stores.disk import disk_problem
from ndif.stores.sqlite import disk_reason, open_database
from ndif.tasks import within

logger = logging.getLogger(__name__)

T = TypeVar("T")

CALLBACKS = "callbacks"
"""Name of its folder, among the results."""
_FILE = "callbacks.sqlite"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS callback (
    id TEXT PRIMARY KEY,
    host TEXT NOT NULL,
    user TEXT NOT NULL,
    due REAL NOT NULL,
    dead INTEGER NOT NULL,
    content BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS callback_due ON callback (dead, due);
CREATE INDEX IF NOT EXISTS callback_user ON callback (user, dead);
"""
_PUT = (
    "INSERT OR REPLACE INTO callback (id, host, user, due, dead, content) VALUES (?, ?, ?, ?, ?, ?)"
)
_REMOVE = "DELETE FROM callback WHERE id = ?"
_DUE = "SELECT id, content FROM callback WHERE dead = 0 AND due <= ? {} ORDER BY due LIMIT ?"
_ALL = "SELECT id, content FROM callback ORDER BY dead DESC, due LIMIT ?"
_FIND = "SELECT id, content FROM callback WHERE substr(id, 1, length(?1)) = ?1"
_COUNT = "SELECT count(*) FROM callback WHERE dead = ?"
_COUNT_OF = "SELECT count(*) FROM callback WHERE user = ? AND dead = 0"
_FORGET = "DELETE FROM callback WHERE dead = 1 AND due < ?"
_TRIM = (
    "DELETE FROM callback WHERE dead = 1 AND id NOT IN "
    "(SELECT id FROM callback WHERE dead = 1 ORDER BY due DESC LIMIT ?)"
)


class SqliteCallbacks:
    """A `CallbackQueue` in a file of one process. Owns the file and the one thread that uses it."""

    def __init__(
        self,
        folder: Path,
        *,
        max_waiting: int = MAX_WAITING,
        max_of_user: int = MAX_OF_USER,
        max_dead: int = MAX_DEAD,
    ) -> None:
        """Open the queue in `folder`, or raise a `CallbackQueueError`."""
        self._max_waiting = max_waiting
        self._max_of_user = max_of_user
        self._max_dead = max_dead
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="callbacks")
        self._came = asyncio.Event()
        self.left = 0
        """Call-backs that waited when the queue was stopped."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._connection = open_database(folder / _FILE, _SCHEMA, "callback")
        except OSError as error:
            raise CallbackQueueError(f"{disk_problem(error)}: {folder}") from error
        except sqlite3.Error as error:
            if "locked" in str(error):
                raise CallbackQueueError(
                    f"another server has the call-backs in {folder}"
                ) from error
            raise CallbackQueueError(f"{disk_reason(error)}: {folder}") from error

    async def stop(self) -> None:
        """See `CallbackQueue.stop`."""
        with contextlib.suppress(CallbackQueueError):
            self.left, _ = await self.counts()
        await self._in_thread(self._connection.close)
        self._thread.shutdown()

    async def add(self, callback: Callback) -> None:
        """See `CallbackQueue.add`."""
        await require_room(self, callback.user, self._max_waiting, self._max_of_user)
        await self.update(callback)

    async def update(self, callback: Callback) -> None:
        """See `CallbackQueue.update`."""
        await self._in_thread(self._put, callback)
        self._came.set()

    async def remove(self, callback_id: str) -> None:
        """See `CallbackQueue.remove`."""
        await self._in_thread(self._execute, _REMOVE, (callback_id,))

    async def due(self, now: float, limit: int, busy: Collection[str] = ()) -> list[Callback]:
        """See `CallbackQueue.due`."""
        others = f"AND host NOT IN ({', '.join('?' * len(busy))})" if busy else ""
        return await self._read(_DUE.format(others), (now, *busy, limit))

    async def wait(self, seconds: float) -> None:
        """See `CallbackQueue.wait`."""
        with contextlib.suppress(asyncio.TimeoutError):
            await within(self._came.wait(), seconds)
        self._came.clear()

    async def all(self, limit: int) -> list[Callback]:
        """See `CallbackQueue.all`."""
        return await self._read(_ALL, (limit,))

    async def find(self, request_id: str) -> list[Callback]:
        """See `CallbackQueue.find`."""
        return await self._read(_FIND, (request_id,))

    async def waiting_of(self, user: str) -> int:
        """See `CallbackQueue.waiting_of`."""
        [(number,)] = await self._in_thread(self._fetch, _COUNT_OF, (user,))
        return int(number)

    async def counts(self) -> tuple[int, int]:
        """See `CallbackQueue.counts`."""
        return await self._in_thread(self._counts)

    async def forget_dead(self, before: float) -> None:
        """See `CallbackQueue.forget_dead`."""
        await self._in_thread(self._execute, _FORGET, (before,))

    async def _read(self, statement: str, values: Sequence[Any]) -> list[Callback]:
        found = []
        for callback_id, content in await self._in_thread(self._fetch, statement, values):
            try:
                found.append(Callback.decode(content))
            except (ValueError, TypeError) as error:
                logger.warning("the call-back %s cannot be read: %s", callback_id, error)
                await self.remove(callback_id)
        return found

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, work, *arguments)
        except sqlite3.Error as error:
            raise CallbackQueueError(disk_reason(error)) from error

    # In the thread

    def _put(self, callback: Callback) -> None:
        values = (callback.user, callback.due, callback.dead, callback.encode())
        with self._connection:
            self._connection.execute(_PUT, (callback.id, callback.host, *values))
            if callback.dead:
                self._connection.execute(_TRIM, (self._max_dead,))

    def _execute(self, statement: str, values: Sequence[Any]) -> None:
        with self._connection:
            self._connection.execute(statement, values)

    def _fetch(self, statement: str, values: Sequence[Any]) -> list[Any]:
        return self._connection.execute(statement, values).fetchall()

    def _counts(self) -> tuple[int, int]:
        waiting, dead = (self._fetch(_COUNT, (dead,))[0][0] for dead in (0, 1))
        return waiting, dead
