"""The rows of ended jobs and of their sums, in a database."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from datetime import date
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Integer,
    Row,
    Table,
    case,
    cast,
    delete,
    func,
    literal_column,
    null,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from ndif.schema.job_record import NO_ERRORS, JobRecord
from ndif.stores.accounts.port import AccountsUnavailableError, KeysError
from ndif.stores.accounts.sql.database import Database
from ndif.stores.accounts.sql.tables import JOBS, USAGE
from ndif.stores.usage.history import BOUNDS_S, Interval
from ndif.stores.usage.port import (
    Group,
    UsageTotal,
    UsageUnavailableError,
    added,
    day_of,
    in_order,
    total_of,
)

_FIELDS = tuple(field.name for field in fields(JobRecord))
_LISTED = tuple(name for name in _FIELDS if name not in ("steps", "traceparent"))
_SUMMED = ("jobs", "errors", "execution_s", "result_bytes")


class UsageTables:
    """The tables of jobs and their sums. Every method raises a `UsageUnavailableError` if it fails."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Use the first of these databases that may be written."""
        self._urls = urls
        self._database: Database | None = None

    async def add(self, batch: Sequence[JobRecord]) -> None:
        """Add the jobs that are not stored yet, and add their cost to the sums."""
        # One statement with several rows must not change the same row twice.
        records = {record.id: record for record in batch}
        rows = [record.as_fields() for record in records.values()]
        async with self._writing() as connection:
            insertion = _insert(connection, JOBS).on_conflict_do_nothing(index_elements=["id"])
            new = (await connection.execute(insertion.returning(JOBS.c.id), rows)).scalars().all()
            if new:
                upsert = _insert(connection, USAGE)
                changed = {name: USAGE.c[name] + upsert.excluded[name] for name in _SUMMED}
                place = ["user", "model", "day"]
                await connection.execute(
                    upsert.on_conflict_do_update(index_elements=place, set_=changed),
                    _sums(records[id_] for id_ in new),
                )

    async def recent(self, user: str | None, limit: int) -> list[JobRecord]:
        chosen = select(*(JOBS.c[name] for name in _LISTED)).order_by(JOBS.c.ended.desc())
        if user is not None:
            chosen = chosen.where(JOBS.c.user == user)
        async with self._reading() as connection:
            rows = (await connection.execute(chosen.limit(limit))).all()
        return [_record(row) for row in rows]

    async def find(self, job_id: str) -> JobRecord | None:
        chosen = select(*(JOBS.c[name] for name in _FIELDS)).where(JOBS.c.id == job_id)
        async with self._reading() as connection:
            row = (await connection.execute(chosen)).one_or_none()
        return None if row is None else _record(row)

    async def totals(self, by: Group, since: date | None, user: str | None) -> list[UsageTotal]:
        name = USAGE.c[by]
        chosen = select(name, *(func.sum(USAGE.c[column]) for column in _SUMMED)).group_by(name)
        if since is not None:
            chosen = chosen.where(USAGE.c.day >= since.isoformat())
        if user is not None:
            chosen = chosen.where(USAGE.c.user == user)
        async with self._reading() as connection:
            rows = (await connection.execute(chosen)).all()
        totals = [
            UsageTotal(
                name=group,
                jobs=int(jobs),
                errors=int(errors),
                execution_s=float(seconds),
                result_bytes=int(size),
            )
            for group, jobs, errors, seconds, size in rows
        ]
        return in_order(by, totals)

    async def history(self, since: float, step_s: float) -> list[Interval]:
        async with self._reading() as connection:
            place = _whole(connection, JOBS.c.ended / literal_column(repr(step_s))).label("place")
            total = _class_of(JOBS.c.ended - JOBS.c.received).label("total")
            wait = _class_of(JOBS.c.dispatched - JOBS.c.received).label("wait")
            errors = func.sum(case((JOBS.c.status.in_(NO_ERRORS), 0), else_=1))
            chosen = (
                select(place, total, wait, func.count(), errors)
                .where(JOBS.c.ended >= since)
                .group_by(place, total, wait)
            )
            rows = (await connection.execute(chosen)).all()
        return _intervals(rows, step_s)

    async def sweep(self, before: float, *, dry: bool) -> int:
        if dry:
            count = select(func.count()).select_from(JOBS).where(JOBS.c.ended < before)
            async with self._reading() as connection:
                return int((await connection.execute(count)).scalar_one())
        async with self._writing() as connection:
            result = await connection.execute(delete(JOBS).where(JOBS.c.ended < before))
        return int(result.rowcount)

    async def close(self) -> None:
        """Close every connection."""
        if self._database is not None:
            await self._database.close()

    @contextlib.asynccontextmanager
    async def _reading(self) -> Any:
        with _translated():
            async with (await self._opened()).reading() as connection:
                yield connection

    @contextlib.asynccontextmanager
    async def _writing(self) -> Any:
        with _translated():
            async with (await self._opened()).writing() as connection:
                yield connection

    async def _opened(self) -> Database:
        """Return the database; migrate its schema on the first call."""
        if self._database is None:
            for url in self._urls:
                database = Database(url)
                # Another server's database is not written.
                if await database.shape() != "foreign":
                    break
                await database.close()
            await database.migrate()
            self._database = database
        return self._database


def _record(row: Row[Any]) -> JobRecord:
    return JobRecord.of(dict(row._mapping))


def _whole(connection: AsyncConnection, number: ColumnElement[Any]) -> ColumnElement[Any]:
    """Return the whole part of a number that is not negative."""
    # SQLite mostly lacks `floor`, and its cast truncates; PostgreSQL's cast rounds.
    is_sqlite = connection.dialect.name == "sqlite"
    return cast(number if is_sqlite else func.floor(number), Integer)


def _class_of(seconds: ColumnElement[Any]) -> ColumnElement[Any]:
    """Return the class of a duration, as `history.class_of` does; NULL for NULL."""
    # Literals, because PostgreSQL does not recognise expressions with different parameters as the same.
    classes: list[tuple[Any, Any]] = [
        (seconds < literal_column(repr(bound)), literal_column(str(number)))
        for number, bound in enumerate(BOUNDS_S)
    ]
    return case((seconds.is_(None), null()), *classes, else_=literal_column(str(len(BOUNDS_S))))


def _intervals(rows: Iterable[Any], step_s: float) -> list[Interval]:
    """Return the intervals in rows of interval number, total class, wait class, jobs and errors."""
    jobs: Counter[int] = Counter()
    errors: Counter[int] = Counter()
    totals: defaultdict[int, Counter[int]] = defaultdict(Counter)
    waits: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for place, total, wait, number, failed in rows:
        jobs[place] += number
        errors[place] += int(failed)
        totals[place][total] += number
        if wait is not None:
            waits[place][wait] += number
    return [
        Interval(place * step_s, jobs[place], errors[place], totals[place], waits[place])
        for place in sorted(jobs)
    ]


def _insert(connection: AsyncConnection, table: Table) -> Any:
    """Return an INSERT of the connection's dialect, which supports ON CONFLICT."""
    dialect: Any = sqlite if connection.dialect.name == "sqlite" else postgresql
    return dialect.insert(table)


def _sums(records: Iterable[JobRecord]) -> list[dict[str, Any]]:
    """Return the sums over jobs, by user, model and day, as rows of `USAGE`."""
    groups: dict[tuple[str, str, str], list[JobRecord]] = {}
    for record in records:
        place = record.user, record.model, day_of(record.ended).isoformat()
        groups.setdefault(place, []).append(record)
    rows = []
    for (user, model, day), jobs in groups.items():
        cost = asdict(added([total_of(record) for record in jobs], day))
        rows.append({"user": user, "model": model, "day": cost.pop("name"), **cost})
    return rows


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (AccountsUnavailableError, KeysError) as error:
        raise UsageUnavailableError(str(error)) from error
