"""The record of ended jobs and its sums, kept by one process or in a database."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime, timezone
from typing import Literal, Protocol

from ndif.schema.answer import answer
from ndif.schema.job_record import JobRecord
from ndif.stores.usage.history import Interval

Group = Literal["user", "model", "day"]


class UsageUnavailableError(Exception):
    """The record of jobs cannot be read now; the message says why."""


@answer()
class UsageTotal:
    """The sum over the ended jobs of a user, a model or a day."""

    name: str
    """The user, the model, or the day as YYYY-MM-DD in UTC."""
    jobs: int
    errors: int
    """Jobs among them that failed."""
    execution_s: float
    result_bytes: int


class UsageStore(Protocol):
    """Ended jobs and their sums. A job that is noted twice counts once."""

    async def start(self) -> None:
        """Begin to store noted jobs."""

    async def stop(self) -> None:
        """Store the noted jobs, if that is possible now."""

    def record(self, record: JobRecord) -> None:
        """Take the record of a job that has ended; it is stored later, in batches."""

    async def recent(self, user: str | None, limit: int) -> list[JobRecord]:
        """Return the last jobs of a user, or of all, the newest first, perhaps without their steps.

        Raise a `UsageUnavailableError` if they cannot be read.
        """

    async def find(self, job_id: str) -> JobRecord | None:
        """Return the record of a job, or None; raise a `UsageUnavailableError` if it cannot be read."""

    async def totals(
        self, by: Group, since: date | None = None, user: str | None = None
    ) -> list[UsageTotal]:
        """Return the sums since a day, of a user or of all, the longest execution first, days in order.

        Raise a `UsageUnavailableError` if they cannot be read.
        """

    async def history(self, since: float, step_s: float) -> list[Interval]:
        """Return the non-empty intervals of jobs that ended since a moment, in order.

        Intervals begin at multiples of `step_s`. Raise a `UsageUnavailableError` if they cannot be read.
        """

    async def sweep(self, before: float, *, dry: bool = False) -> int:
        """Delete the records of jobs that ended before a moment, not their sums; return their number.

        With `dry`, only count them.
        """


def day_of(moment: float) -> date:
    """Return the UTC day of a moment; a job counts on the day of its end."""
    return datetime.fromtimestamp(moment, timezone.utc).date()


def in_order(by: Group, totals: list[UsageTotal]) -> list[UsageTotal]:
    """Return sums in display order: days by date, others by their execution time."""
    if by == "day":
        return sorted(totals, key=lambda total: total.name)
    return sorted(totals, key=lambda total: (-total.execution_s, -total.jobs, total.name))


def total_of(record: JobRecord) -> UsageTotal:
    """Return the sum over one job."""
    return UsageTotal(
        name="",
        jobs=1,
        errors=int(record.is_error),
        execution_s=record.execution_s,
        result_bytes=record.result_bytes,
    )


def added(parts: Sequence[UsageTotal], name: str) -> UsageTotal:
    """Return the sum of `parts`, named `name`."""
    return UsageTotal(
        name=name,
        jobs=sum(part.jobs for part in parts),
        errors=sum(part.errors for part in parts),
        execution_s=sum(part.execution_s for part in parts),
        result_bytes=sum(part.result_bytes for part in parts),
    )
