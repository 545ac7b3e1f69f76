"""SQLite files of a server of one process: exclusive to it, durable, and replaced if damaged."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ndif.stores.disk import FULL, disk_problem

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOCK_S = 0.5

Change = tuple[str, Sequence[Any]]
"""A statement that changes rows, and its values."""


class _Write(NamedTuple):
    changes: Sequence[Change]
    outcome: asyncio.Future[None]


class SqliteFile:
    """Rows that outlive their process.

    If `write` returns, the disk has the changes; writes that arrive while it is busy share a transaction.
    Owns the file and the only thread that uses it. No second process can open the file. All methods raise
    an error of the owner's class if they fail; its message is a clause.
    """

    def __init__(
        self, path: Path, schema: str, table: str, holds: str, error: type[Exception]
    ) -> None:
        """Open the file at `path`, or a new one if it is damaged, and execute `schema`.

        If `table` is empty, the file is vacuumed. If another process has the file, the error names its
        content, `holds`.
        """
        self._error = error
        folder = path.parent
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._connection = _opened(path, schema, table)
        except OSError as failure:
            raise error(f"{disk_problem(failure)}: {folder}") from failure
        except sqlite3.Error as failure:
            if "locked" in str(failure):
                raise error(f"another server has the {holds} in {folder}") from failure
            raise error(f"{_reason(failure)}: {folder}") from failure
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=path.stem)
        self._waiting: list[_Write] = []
        self._writing: asyncio.Task[None] | None = None

    async def read(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        """Return the rows of a query."""
        return await self._in_thread(lambda: self._connection.execute(query, values).fetchall())

    async def write(self, *changes: Change) -> None:
        """Return once the disk has all of these changes."""
        write = _Write(changes, asyncio.get_running_loop().create_future())
        self._waiting.append(write)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all(), name="writes to the disk")
        await write.outcome

    async def close(self) -> None:
        """Finish pending writes, and let another process open the file."""
        if self._writing is not None:
            await self._writing
        await self._in_thread(self._connection.close)
        self._thread.shutdown()

    async def _write_all(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            failure: Exception | None = None
            try:
                await self._in_thread(partial(self._commit, group))
            except Exception as error:
                failure = error
            for write in group:
                if write.outcome.cancelled():
                    continue
                if failure is None:
                    write.outcome.set_result(None)
                else:
                    write.outcome.set_exception(failure)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            raise self._error(_reason(error)) from error

    def _commit(self, group: list[_Write]) -> None:
        with self._connection:
            for write in group:
                for statement, values in write.changes:
                    self._connection.execute(statement, values)


def _reason(error: sqlite3.Error) -> str:
    return FULL if "full" in str(error) else f"the server's disk failed ({error})"


def _opened(path: Path, schema: str, table: str) -> sqlite3.Connection:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    try:
        return _connected(path, schema, table)
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError as error:
        aside = path.with_name(f"{path.name}.damaged-{int(time.time())}")
        logger.error("%s is damaged (%s) and is put aside as %s", path, error, aside.name)  # noqa: TRY400
        path.rename(aside)
        path.with_name(f"{path.name}-wal").unlink(missing_ok=True)
        return _opened(path, schema, table)


def _connected(path: Path, schema: str, table: str) -> sqlite3.Connection:
    # The timeout waits for a process that has the file and is about to end.
    connection = sqlite3.connect(path, timeout=_LOCK_S, check_same_thread=False)
    try:
        for setting in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=FULL"):
            connection.execute(f"PRAGMA {setting}")
        with connection:
            connection.executescript(schema)
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
        if not connection.execute(f"SELECT 1 FROM {table}").fetchone():  # noqa: S608 - a constant
            with contextlib.suppress(sqlite3.OperationalError):  # a full disk
                connection.execute("VACUUM")
    except sqlite3.Error:
        connection.close()
        raise
    return connection
