"""The queue of callbacks of a server of one process: one SQLite file beside the results."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ndif.schema.callback import Callback
from ndif.stores.callbacks.port import CallbackLimits, CallbackQueueError, require_room
from ndif.stores.sqlite import SqliteFile
from ndif.tasks import within

logger = logging.getLogger(__name__)

CALLBACKS = "callbacks"
"""Name of the queue's folder, beside the results."""
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
_COUNTS = "SELECT dead, count(*) FROM callback GROUP BY dead"
_COUNT_OF = "SELECT count(*) FROM callback WHERE user = ? AND dead = 0"
_FORGET = "DELETE FROM callback WHERE dead = 1 AND due < ?"
_TRIM = (
    "DELETE FROM callback WHERE dead = 1 AND id NOT IN "
    "(SELECT id FROM callback WHERE dead = 1 ORDER BY due DESC LIMIT ?)"
)


class SqliteCallbacks:
    """A `CallbackQueue` in a file of one process."""

    def __init__(
        self,
        folder: Path,
        limits: CallbackLimits = CallbackLimits(),  # noqa: B008 - it is immutable
    ) -> None:
        """Open the queue in `folder`, or raise a `CallbackQueueError`."""
        self._limits = limits
        self._added = asyncio.Event()
        self._file = SqliteFile(
            folder / _FILE, _SCHEMA, "callback", "webhooks and mails", CallbackQueueError
        )

    async def stop(self) -> None:
        await self._file.close()

    async def add(self, callback: Callback) -> None:
        await require_room(self, callback.user, self._limits)
        await self.update(callback)

    async def update(self, callback: Callback) -> None:
        values = (callback.user, callback.due, callback.dead, callback.encode())
        trim = [(_TRIM, (self._limits.dead,))] if callback.dead else []
        await self._file.write((_PUT, (callback.id, callback.host, *values)), *trim)
        self._added.set()

    async def remove(self, callback_id: str) -> None:
        await self._file.write((_REMOVE, (callback_id,)))

    async def due(self, now: float, limit: int, busy: Collection[str] = ()) -> list[Callback]:
        others = f"AND host NOT IN ({', '.join('?' * len(busy))})" if busy else ""
        return await self._read(_DUE.format(others), (now, *busy, limit))

    async def wait(self, seconds: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await within(self._added.wait(), seconds)
        self._added.clear()

    async def all(self, limit: int) -> list[Callback]:
        return await self._read(_ALL, (limit,))

    async def find(self, request_id: str) -> list[Callback]:
        return await self._read(_FIND, (request_id,))

    async def waiting_of(self, user: str) -> int:
        [(number,)] = await self._file.read(_COUNT_OF, (user,))
        return int(number)

    async def counts(self) -> tuple[int, int]:
        counts = dict(await self._file.read(_COUNTS))
        return counts.get(False, 0), counts.get(True, 0)

    async def forget_dead(self, before: float) -> None:
        await self._file.write((_FORGET, (before,)))

    async def _read(self, statement: str, values: Sequence[Any]) -> list[Callback]:
        callbacks = []
        for callback_id, content in await self._file.read(statement, values):
            try:
                callbacks.append(Callback.decode(content))
            except (ValueError, TypeError) as error:
                logger.warning("the webhook or mail %s cannot be read: %s", callback_id, error)
                await self.remove(callback_id)
        return callbacks
