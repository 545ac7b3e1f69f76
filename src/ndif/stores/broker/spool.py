"""Polled requests on the server's disk, from their acceptance until their end is stored.

The client of a polled request fetches the end later, so a server that was killed must run the request after
a restart. One SQLite file holds the requests and small payloads; a larger payload has its own file.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ndif.schema.payload import MAX_IN_MEMORY, Payload, PayloadFile
from ndif.schema.request import Request
from ndif.stores.broker.encoding import decode_request, encode_request
from ndif.stores.broker.port import BrokerError
from ndif.stores.disk import disk_problem, sync
from ndif.stores.objects.port import ObjectStore, ObjectStoreError, end_key, result_key
from ndif.stores.sqlite import SqliteFile
from ndif.tasks import end, start

logger = logging.getLogger(__name__)

SPOOL = "spool"
"""Name of the spool's folder, beside the results."""
_FILE = "spool.sqlite"
_INLINE_BYTES = 64 * 1024
"""Largest payload that is stored in the SQLite file, which never shrinks while it is in use."""
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
    """The spool's disk cannot store or return a request; the message is a clause."""


class SpooledRequest(NamedTuple):
    """An unfinished request, and the bytes that it counts for."""

    request: Request
    size: int


class Spool:
    """The polled requests of one server that have no stored end yet.

    If `add` returns, the disk has the request and its payload. No second process can open the spool.
    """

    def __init__(
        self, folder: Path, objects: ObjectStore, present: Mapping[str, Any] | None = None
    ) -> None:
        """Open the spool in `folder`, or raise a `SpoolError`.

        `objects` stores the ends of its requests. `present` replaces fields of the requests that an earlier
        process accepted.
        """
        self.folder = folder
        self._objects = objects
        self._present = present or {}
        self._file = SqliteFile(folder / _FILE, _SCHEMA, "job", "jobs", SpoolError)
        self._ended: list[str] = []
        self._removing: asyncio.Task[None] | None = None
        self._notes: set[asyncio.Task[None]] = set()

    async def unfinished(self) -> list[SpooledRequest]:
        """Return the unfinished requests of earlier processes, the oldest first."""
        entries, damaged = await asyncio.to_thread(self._decoded, await self._file.read(_ALL))
        for request_id in damaged:
            self.remove(request_id)
        unfinished = []
        for entry in entries:
            if await self._objects.get(end_key(entry.request.id)):
                self.remove(entry.request.id)  # its process ended before the removal
            else:
                unfinished.append(entry)
        await asyncio.to_thread(self._delete_strays, {entry.request.id for entry in unfinished})
        return unfinished

    async def add(self, request: Request) -> None:
        """Return once the disk has a request and its payload, or raise a `SpoolError`.

        If the caller is cancelled, the request is removed, since its client has no acceptance.
        """
        payload: Payload | None = request.payload
        try:
            if len(request.payload) > _INLINE_BYTES:
                await asyncio.to_thread(self._write_payload, request)
                payload = None
            values = (request.id, encode_request(request), len(request.payload), payload)
            await self._file.write((_ADD, values))
        except SpoolError:
            self._path(request.id).unlink(missing_ok=True)
            raise
        except asyncio.CancelledError:
            self.remove(request.id)  # it is queued behind the pending write
            raise

    async def payload(self, request_id: str) -> bytes | PayloadFile:
        """Return the payload of a request that has not been removed."""
        rows = await self._file.read(_PAYLOAD, (request_id,))
        if not rows:
            raise SpoolError("the payload of this request is no longer stored; send it again")
        if rows[0][0] is not None:
            return bytes(rows[0][0])
        try:
            file = PayloadFile(self._path(request_id))
            return file if len(file) > MAX_IN_MEMORY else await asyncio.to_thread(file.read)
        except OSError as error:
            raise SpoolError(disk_problem(error)) from error

    def note_attempts(self, request_id: str, attempts: int) -> None:
        """Start to store how many runs of a request are cut short if this process ends now."""
        start(self._store_attempts(request_id, attempts), self._notes, f"attempts of {request_id}")

    def remove(self, request_id: str) -> None:
        """Remove a request in the background, once the disk has its end and its result."""
        self._ended.append(request_id)
        if self._removing is None or self._removing.done():
            self._removing = asyncio.create_task(self._remove_all(), name="ended requests")

    async def close(self) -> None:
        """Finish pending writes, for a limited time, and let another process open the spool."""
        tasks = {*self._notes, *([self._removing] if self._removing is not None else [])}
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_S)
        await end(tasks)
        await self._file.close()

    async def _store_attempts(self, request_id: str, attempts: int) -> None:
        try:
            await self._file.write((_ATTEMPTS, (attempts, request_id)))
        except SpoolError as error:
            logger.warning("request %s: its attempts are not stored: %s", request_id, error)

    async def _remove_all(self) -> None:
        while self._ended:
            ids, self._ended = self._ended, []
            try:
                await self._objects.settle(*map(end_key, ids), *map(result_key, ids))
                await self._file.write(*((_REMOVE, (request_id,)) for request_id in ids))
            except (SpoolError, ObjectStoreError) as error:
                # If this process dies first, the next one finds their ends and removes them.
                logger.warning("%d requests cannot be removed yet: %s", len(ids), error)
                self._ended += ids
                await asyncio.sleep(_RETRY_S)
                continue
            for request_id in ids:
                self._path(request_id).unlink(missing_ok=True)

    # In threads

    def _decoded(self, rows: Iterable[Any]) -> tuple[list[SpooledRequest], list[str]]:
        """Return the stored requests, and the ids of unreadable ones."""
        entries, damaged = [], []
        for request_id, content, size, attempts in rows:
            try:
                request = decode_request(content, attempts=attempts, **self._present)
            except (ValueError, KeyError, TypeError):
                logger.exception("request %s of the spool cannot be read", request_id)
                damaged.append(request_id)
            else:
                entries.append(SpooledRequest(request, size))
        return entries, damaged

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

    def _delete_strays(self, request_ids: set[str]) -> None:
        """Delete the payloads of requests that were never accepted, or are removed."""
        for path in self.folder.iterdir():
            if not path.name.startswith(_FILE) and path.name not in request_ids:
                path.unlink(missing_ok=True)

    def _path(self, request_id: str) -> Path:
        return self.folder / request_id
