"""The record of jobs in a database, with journal files for records that wait to be stored."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from tempfile import mkstemp
from typing import TYPE_CHECKING

from ndif.runtime.typed_json import to_json
from ndif.schema.job_record import JobRecord
from ndif.stores.usage.history import Interval
from ndif.stores.usage.port import Group, UsageTotal, UsageUnavailableError
from ndif.tasks import end

if TYPE_CHECKING:
    from ndif.stores.usage.sql import UsageTables

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0
"""Seconds between two batches."""
_LONGEST_PAUSE_S = 30.0
_SWEEP_S = 3600.0
_MAX_BATCH = 500
"""Maximum records of a batch."""
_SUFFIX = ".jsonl"


class JournaledUsage:
    """The form of `UsageStore` in a database.

    A record is a line in a local file before it is a row, so that it survives its process and an outage of
    the database. A row has its job's id, so that a record stored twice counts once. A process locks its own
    files; at its start it takes over unlocked ones. Waiting records are stored once a second, while new
    records go to a new file.
    """

    def __init__(self, urls: Sequence[str], folder: Path, retention_s: float) -> None:
        """Store into the first of these databases that may be written; files are in `folder`.

        Records older than `retention_s` are deleted.
        """
        self._urls = urls
        self._retention_s = retention_s
        self._folder = folder
        self._journal: _File | None = None
        """File of the records that were noted after storing last began."""
        self._older: list[_File] = []
        """Files whose records were all waiting when storing last began."""
        self._waiting: list[JobRecord] = []
        self._noted = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._opened: UsageTables | None = None

    async def start(self) -> None:
        try:
            await asyncio.to_thread(self._open_journal)
        except OSError as error:
            logger.warning("The record of jobs is in memory until it is stored: %s", error)
        if self._waiting:
            self._noted.set()
        self._tasks = [
            asyncio.create_task(self._store_forever(), name="record of jobs"),
            asyncio.create_task(self._sweep_forever(), name="old records of jobs"),
        ]

    async def stop(self) -> None:
        await end(self._tasks)
        with contextlib.suppress(UsageUnavailableError):
            await self._store()
        for file in (*self._older, *([] if self._journal is None else [self._journal])):
            file.close(keep=bool(self._waiting))
        self._journal, self._older = None, []
        if self._opened is not None:
            await self._opened.close()

    def record(self, record: JobRecord) -> None:
        self._waiting.append(record)
        self._noted.set()
        if self._journal is not None:
            try:
                self._journal.add(record)
            except OSError as error:
                logger.warning("job %s is recorded in memory alone: %s", record.id, error)

    async def recent(self, user: str | None, limit: int) -> list[JobRecord]:
        await self._store()
        return await (await self._tables()).recent(user, limit)

    async def find(self, job_id: str) -> JobRecord | None:
        waiting = next((record for record in self._waiting if record.id == job_id), None)
        return waiting or await (await self._tables()).find(job_id)

    async def totals(
        self, by: Group, since: date | None = None, user: str | None = None
    ) -> list[UsageTotal]:
        await self._store()
        return await (await self._tables()).totals(by, since, user)

    async def history(self, since: float, step_s: float) -> list[Interval]:
        await self._store()
        return await (await self._tables()).history(since, step_s)

    async def sweep(self, before: float, *, dry: bool = False) -> int:
        return await (await self._tables()).sweep(before, dry=dry)

    async def _tables(self) -> UsageTables:
        if self._opened is None:
            # A thread imports SQLAlchemy, which takes longer than a client should wait.
            tables_type = await asyncio.to_thread(_import_tables)
            self._opened = self._opened or tables_type(self._urls)
        return self._opened

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            with contextlib.suppress(UsageUnavailableError):
                await self.sweep(time.time() - self._retention_s)

    async def _store_forever(self) -> None:
        pause_s = _INTERVAL_S
        while True:
            await self._noted.wait()
            await asyncio.sleep(pause_s)
            try:
                await self._store()
                pause_s = _INTERVAL_S
            except UsageUnavailableError as error:
                logger.warning("%s jobs are not recorded yet: %s", len(self._waiting), error)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            except Exception:
                logger.exception("%s jobs are not recorded yet", len(self._waiting))
                pause_s = _LONGEST_PAUSE_S

    async def _store(self) -> None:
        """Store all records that wait now, or raise a `UsageUnavailableError`."""
        if not self._waiting:
            return
        tables = await self._tables()
        waiting = [*self._waiting]  # records noted meanwhile are left for the next call
        if not self._older:
            self._rotate()
        older = [*self._older]
        for start in range(0, len(waiting), _MAX_BATCH):
            batch = waiting[start : start + _MAX_BATCH]
            await tables.add(batch)
            stored = {record.id for record in batch}
            # Another call may have stored some of these meanwhile.
            self._waiting = [record for record in self._waiting if record.id not in stored]
        for file in older:
            file.close(keep=False)
        self._older = [file for file in self._older if file not in older]
        if not self._waiting:
            self._noted.clear()

    def _rotate(self) -> None:
        """Begin a new file; if the disk refuses one, continue the old file."""
        if self._journal is not None:
            with contextlib.suppress(OSError):
                self._journal, last = _File.create(self._folder), self._journal
                self._older.append(last)

    def _open_journal(self) -> None:
        """Take over the files of processes that have ended, and begin a new file."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        left = []
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            with contextlib.suppress(OSError):
                file = _File.lock(path)
                left += _parse(path.read_bytes())
                self._older.append(file)
        self._journal = _File.create(self._folder)
        self._waiting = [*left, *self._waiting]


class _File:
    """A file of records, locked as long as this process has it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Lock an open file; raise an OSError if another process has it."""
        self._path = path
        self._descriptor = descriptor
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise

    @classmethod
    def create(cls, folder: Path) -> _File:
        descriptor, path = mkstemp(_SUFFIX, dir=folder)
        return cls(Path(path), descriptor)

    @classmethod
    def lock(cls, path: Path) -> _File:
        """Return the file of a process that has ended; raise an OSError if it has not."""
        return cls(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    def add(self, record: JobRecord) -> None:
        os.write(self._descriptor, to_json(record) + b"\n")

    def close(self, *, keep: bool) -> None:
        """Unlock the file; delete it unless `keep`, which leaves its records to the next process."""
        if self._descriptor >= 0:
            if not keep:
                self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def _import_tables() -> type[UsageTables]:
    from ndif.stores.usage.sql import UsageTables

    return UsageTables


def _parse(content: bytes) -> list[JobRecord]:
    """Return the records of a file, without lines that were cut off."""
    records = []
    for line in content.splitlines():
        with contextlib.suppress(ValueError, TypeError):
            records.append(JobRecord.of(json.loads(line)))
    return records
