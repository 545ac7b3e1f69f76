"""Polled requests on the server's disk, from their acceptance until their end is stored.

The client of such a request has gone away and comes back for its end, so a server that was killed has to
run it when it starts again. One SQLite file holds the requests and small payloads; a larger payload has a
file of its own beside it.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ndif.schema.payload import MAX_IN_MEMORY, Payload, PayloadFile
from ndif.schema.request import Request
from ndif.stores.broker.encoding import decode_request, encode_request
from ndif.stores.broker.port import BrokerError
from ndif.stores.disk import disk_problem, sync
from ndif.stores.objects.port import ObjectStore, ObjectStoreError, end_key, result_key
from ndif.stores.sqlite import disk_reason, open_database
from ndif.tasks import end, start

logger = logging.getLogger(__name__)

SPOOL = "spool"
"""Name of its folder, among the results."""
_FILE = "spool.sqlite"
_INLINE_BYTES = 64 * 1024
"""Largest payload that lies in the file of all requests, which never shrinks while it is in use."""
_RETRY_S = 5.0
_CLOSE_S = 2.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS job (
    number INTEGER PRIMARY KEY,
    id TEXT UNIQUE NOT NULL,
    request BLOB NOT NULL,
    size INTEGER NOT NULL,
    payload BLOB,
    attempts INTEGER NOT NULL DEFAULT 0
)
"""
_ADD = "INSERT OR REPLACE INTO job (id, request, size, payload) VALUES (?, ?, ?, ?)"
_ATTEMPTS = "UPDATE job SET attempts = ? WHERE id = ?"
_REMOVE = "DELETE FROM job WHERE id = ?"
_PAYLOAD = "SELECT payload FROM job WHERE id = ?"
_ALL = "SELECT id, request, size, attempts FROM job ORDER BY number"


class SpoolError(BrokerError):
    """The spool's disk does not take a request, or does not give it back; the message is a clause."""


class Unfinished(NamedTuple):
    """A request without its payload, and how large that is."""

    request: Request
    size: int


class _Write(NamedTuple):
    statement: str
    rows: tuple[tuple[Any, ...], ...]
    done: asyncio.Future[None]


class Spool:
    """The polled requests of one server that have no stored end yet.

    Owns the file and the one thread that uses it. Writes that come while the disk is busy are one
    transaction, which the disk has before any of them returns. No second process can open the spool.
    """

    def __init__(
        self, folder: Path, objects: ObjectStore, present: Mapping[str, Any] | None = None
    ) -> None:
        """Open the spool in `folder`, or raise a `SpoolError`.

        `objects` has the ends of its requests. `present` replaces fields of the requests that an earlier
        process accepted.
        """
        self.folder = folder
        self._objects = objects
        self._present = present or {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool")
        self._waiting: list[_Write] = []
        self._writing: asyncio.Task[None] | None = None
        self._ended: list[str] = []
        self._removing: asyncio.Task[None] | None = None
        self._notes: set[asyncio.Task[None]] = set()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._connection = open_database(folder / _FILE, _SCHEMA, "job")
        except OSError as error:
            raise SpoolError(f"{disk_problem(error)}: {folder}") from error
        except sqlite3.Error as error:
            if "locked" in str(error):
                raise SpoolError(f"another server has the jobs in {folder}") from error
            raise SpoolError(f"{disk_reason(error)}: {folder}") from error

    async def unfinished(self) -> list[Unfinished]:
        """Return the requests that earlier processes accepted and that have no end, the oldest first."""
        found, damaged = await self._in_thread(self._read)
        for request_id in damaged:
            self.remove(request_id)
        unfinished = []
        for each in found:
            if await self._objects.get(end_key(each.request.id)):
                self.remove(each.request.id)  # the process ended between the two
            else:
                unfinished.append(each)
        await self._in_thread(self._delete_strays, {each.request.id for each in unfinished})
        return unfinished

    async def add(self, request: Request) -> None:
        """Return once the disk has a request and its payload, or raise a `SpoolError`.

        If the caller is cancelled, the disk does not keep the request: nobody was told that it is accepted.
        """
        payload: Payload | None = request.payload
        try:
            if len(request.payload) > _INLINE_BYTES:
                await asyncio.to_thread(self._write_payload, request)
                payload = None
            values = (request.id, encode_request(request), len(request.payload), payload)
            await self._write(_ADD, values)
        except SpoolError:
            self._path(request.id).unlink(missing_ok=True)
            raise
        except asyncio.CancelledError:
            self.remove(request.id)  # which comes after the write that is under way
            raise

    async def payload(self, request_id: str) -> bytes | PayloadFile:
        """Return the payload of a request that has not been removed."""
        row = await self._in_thread(self._fetch, request_id)
        if row is None:
            raise SpoolError("what was sent with this request is there no longer; send it again")
        if row[0] is not None:
            return bytes(row[0])
        try:
            file = PayloadFile(self._path(request_id))
            return file if len(file) > MAX_IN_MEMORY else await asyncio.to_thread(file.read)
        except OSError as error:
            raise SpoolError(disk_problem(error)) from error

    def note_attempts(self, request_id: str, attempts: int) -> None:
        """Store soon how many runs of a request have been cut short if this process ends now."""
        start(self._note(request_id, attempts), self._notes, f"attempts of {request_id}")

    def remove(self, request_id: str) -> None:
        """Forget a request, once the disk has its end and its result."""
        self._ended.append(request_id)
        if self._removing is None or self._removing.done():
            self._removing = asyncio.create_task(self._remove_all(), name="ended requests")

    async def close(self) -> None:
        """Finish what is under way, and let another process open the spool."""
        tasks = {*self._notes, *([self._removing] if self._removing is not None else [])}
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_S)
        await end(tasks)
        if self._writing is not None:
            await self._writing
        await self._in_thread(self._connection.close)
        self._thread.shutdown()

    # Writes, of which many are one transaction

    async def _write(self, statement: str, *rows: tuple[Any, ...]) -> None:
        write = _Write(statement, rows, asyncio.get_running_loop().create_future())
        self._waiting.append(write)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all(), name="spool")
        await write.done

    async def _write_all(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            failure: Exception | None = None
            try:
                await self._in_thread(self._commit, group)
            except Exception as error:
                failure = error
            for write in group:
                if write.done.cancelled():
                    continue
                if failure is None:
                    write.done.set_result(None)
                else:
                    write.done.set_exception(failure)

    async def _in_thread(self, work: Any, *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, work, *arguments)
        except sqlite3.Error as error:
            raise SpoolError(disk_reason(error)) from error

    async def _note(self, request_id: str, attempts: int) -> None:
        try:
            await self._write(_ATTEMPTS, (attempts, request_id))
        except SpoolError as error:
            logger.warning("request %s: that it runs is not noted: %s", request_id, error)

    async def _remove_all(self) -> None:
        while self._ended:
            ids, self._ended = self._ended, []
            try:
                await self._objects.settle(*map(end_key, ids), *map(result_key, ids))
                await self._write(_REMOVE, *((each,) for each in ids))
            except (SpoolError, ObjectStoreError) as error:
                # Should this process end first, the next one finds their ends and removes them.
                logger.warning("%d requests cannot be forgotten yet: %s", len(ids), error)
                self._ended += ids
                await asyncio.sleep(_RETRY_S)
                continue
            for each in ids:
                self._path(each).unlink(missing_ok=True)

    # In the thread

    def _commit(self, group: list[_Write]) -> None:
        with self._connection:
            for write in group:
                self._connection.executemany(write.statement, write.rows)

    def _fetch(self, request_id: str) -> Any:
        return self._connection.execute(_PAYLOAD, (request_id,)).fetchone()

    def _read(self) -> tuple[list[Unfinished], list[str]]:
        """Return the stored requests, and the ids of those that cannot be read."""
        found, damaged = [], []
        for request_id, content, size, attempts in self._connection.execute(_ALL):
            try:
                request = decode_request(content, attempts=attempts, **self._present)
            except (ValueError, KeyError, TypeError):
                logger.exception("request %s of the spool cannot be read", request_id)
                damaged.append(request_id)
            else:
                found.append(Unfinished(request, size))
        return found, damaged

    def _write_payload(self, request: Request) -> None:
        path = self._path(request.id)
        try:
            if isinstance(request.payload, PayloadFile):
                request.payload.link(path)
                request.payload.discard()
            else:
                path.write_bytes(request.payload)
            sync(path, self.folder)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise SpoolError(disk_problem(error)) from error

    def _delete_strays(self, known: set[str]) -> None:
        """Delete the payloads of requests that were never accepted, or have been forgotten."""
        for path in self.folder.iterdir():
            if not path.name.startswith(_FILE) and path.name not in known:
                path.unlink(missing_ok=True)

    def _path(self, request_id: str) -> Path:
        return self.folder / request_id
