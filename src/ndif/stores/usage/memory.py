"""The record of the last jobs of a server for one user, in memory."""

from __future__ import annotations

from datetime import date

from cachetools import FIFOCache

from ndif.schema.job_record import JobRecord
from ndif.stores.usage.history import Interval, intervals_of
from ndif.stores.usage.port import Group, UsageTotal, added, day_of, in_order, total_of

_MAX_RECORDS, _MAX_SUMS = 1000, 10_000


class MemoryUsage:
    """The form of `UsageStore` that ends with its process."""

    def __init__(self) -> None:
        self._records: FIFOCache[str, JobRecord] = FIFOCache(_MAX_RECORDS)
        self._sums: FIFOCache[tuple[str, str, date], UsageTotal] = FIFOCache(_MAX_SUMS)

    async def start(self) -> None:
        """See `UsageStore.start`."""

    async def stop(self) -> None:
        """See `UsageStore.stop`."""

    def record(self, record: JobRecord) -> None:
        if record.id in self._records:
            return
        self._records[record.id] = record
        place = record.user, record.model, day_of(record.ended)
        before = [self._sums[place]] if place in self._sums else []
        self._sums[place] = added([*before, total_of(record)], "")

    async def recent(self, user: str | None, limit: int) -> list[JobRecord]:
        newest_first = reversed([*self._records.values()])
        matching = (record for record in newest_first if user in (None, record.user))
        return [record for record, _ in zip(matching, range(limit), strict=False)]

    async def find(self, job_id: str) -> JobRecord | None:
        return self._records.get(job_id)

    async def totals(
        self, by: Group, since: date | None = None, user: str | None = None
    ) -> list[UsageTotal]:
        groups: dict[str, list[UsageTotal]] = {}
        for (owner, model, day), total in self._sums.items():
            if (since is None or day >= since) and user in (None, owner):
                name = {"user": owner, "model": model, "day": day.isoformat()}[by]
                groups.setdefault(name, []).append(total)
        return in_order(by, [added(parts, name) for name, parts in groups.items()])

    async def history(self, since: float, step_s: float) -> list[Interval]:
        return intervals_of(self._records.values(), since, step_s)

    async def sweep(self, before: float, *, dry: bool = False) -> int:
        old = [record.id for record in self._records.values() if record.ended < before]
        for request_id in () if dry else old:
            del self._records[request_id]
        return len(old)
