"""The record of ended jobs: the contract of its forms, and recovery after outages."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from ndif.schema.job_record import JobRecord
from ndif.schema.step import GATEWAY, QUEUE, Step
from ndif.stores.usage import MemoryUsage, UsageStore, UsageTotal, UsageUnavailableError
from ndif.stores.usage.history import BOUNDS_S, class_of, intervals_of, percentile
from ndif.stores.usage.journal import JournaledUsage
from ndif.tasks import end, within
from tests.on_loop import on_loop
from tests.services.postgres import PostgresServer
from tests.stores.accounts.databases import FOREIGN
from tests.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.engine

MIDNIGHT = 1_790_000_000 - 1_790_000_000 % 86_400
FORMS = ("memory", "sqlite", "postgres")
_numbers = itertools.count()

Open = Callable[[], AbstractAsyncContextManager[UsageStore]]


def total(name: str, jobs: int, errors: int, execution_s: float, result_bytes: int) -> UsageTotal:
    return UsageTotal(
        name=name, jobs=jobs, errors=errors, execution_s=execution_s, result_bytes=result_bytes
    )


def record(user: str = "ada", model: str = "org/a", day: int = 0, **fields: object) -> JobRecord:
    """Return the record of a completed job."""
    ended = MIDNIGHT + 86_400 * day + next(_numbers)
    job_record = JobRecord(
        id=f"00000000-0000-4000-8000-{next(_numbers):012}",
        user=user,
        key="k",
        model=model,
        generation="0.8",
        status="COMPLETED",
        received=ended - 3,
        dispatched=ended - 2,
        ended=ended,
        execution_s=1.5,
        result_bytes=1000,
    )
    return replace(job_record, **fields)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def opened(usage: UsageStore) -> AsyncIterator[UsageStore]:
    await usage.start()
    try:
        yield usage
    finally:
        await usage.stop()


@pytest.fixture(params=FORMS)
def usage(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """A function that opens the same initially empty record, in each form."""
    if request.param == "memory":
        kept = MemoryUsage()
        return lambda: opened(kept)
    url = (
        f"sqlite:///{tmp_path / 'accounts.sqlite'}"
        if request.param == "sqlite"
        else request.getfixturevalue("postgres").database()
    )
    return lambda: opened(JournaledUsage([url], tmp_path / "usage", 3600))


@on_loop
async def test_job_record_is_found_with_its_steps(usage: Open) -> None:
    steps = (Step("receive", GATEWAY, 1.5, 2.25), Step("running", QUEUE, 2.25, 4.0))
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    first_record, other = record(steps=steps, traceparent=parent), record()
    async with usage() as store:
        for job in (first_record, other):
            store.record(job)
        assert await store.find(first_record.id) == first_record  # even before it is stored
        assert {job.id for job in await store.recent(None, 10)} == {first_record.id, other.id}
        assert await store.find(first_record.id) == first_record
        assert await store.find(other.id) == other
        assert await store.find("another") is None
        assert await store.find("x" * 1000) is None


@on_loop
async def test_usage_totals_add_up_by_user_model_and_day(usage: Open) -> None:
    async with usage() as store:
        for job in (
            record(),
            record(day=1, execution_s=2.0),
            record(model="org/b", status="ERROR", result_bytes=0),
            record(user="bob", execution_s=100.0, result_bytes=1 << 40),
        ):
            store.record(job)
        assert await store.totals("user") == [
            total("bob", 1, 0, 100.0, 1 << 40),
            total("ada", 3, 1, 5.0, 2000),
        ]
        assert await store.totals("model", user="ada") == [
            total("org/a", 2, 0, 3.5, 2000),
            total("org/b", 1, 1, 1.5, 0),
        ]
        first, second = (date.fromtimestamp(MIDNIGHT + 86_400 * day + 3600) for day in (0, 1))
        assert [row.name for row in await store.totals("day")] == [str(first), str(second)]
        assert await store.totals("user", since=second) == [total("ada", 1, 0, 2.0, 1000)]
        assert await store.totals("user", user="nobody") == []


@on_loop
async def test_job_noted_twice_counts_once(usage: Open) -> None:
    job = record()
    async with usage() as store:
        store.record(job)
        store.record(job)
        assert await store.totals("user") == [total("ada", 1, 0, 1.5, 1000)]
        store.record(job)
        store.record(record())
        assert await store.totals("user") == [total("ada", 2, 0, 3.0, 2000)]
    async with usage() as again:
        again.record(job)
        assert await again.totals("user") == [total("ada", 2, 0, 3.0, 2000)]


@on_loop
async def test_recent_jobs_are_sorted_by_end(usage: Open) -> None:
    jobs = [record(user=user) for user in ("ada", "bob", "ada", "ada")]
    jobs.append(record(user="bob", status="ENDED", dispatched=None, execution_s=0.0))
    async with usage() as store:
        for job in (jobs[3], jobs[0], jobs[1], jobs[2], jobs[4]):
            store.record(job)
        if not isinstance(store, MemoryUsage):  # which expects records in order of their ends
            assert await store.recent(None, 10) == jobs[::-1]
        assert await store.recent("bob", 10) == [jobs[4], jobs[1]]
        assert len(await store.recent("ada", 2)) == 2


@on_loop
async def test_sweep_deletes_records_but_keeps_totals(usage: Open) -> None:
    jobs = [record(day=day) for day in range(4)]
    async with usage() as store:
        for job in jobs:
            store.record(job)
        total = await store.totals("user")
        assert await store.sweep(jobs[2].ended, dry=True) == 2
        assert len(await store.recent("ada", 10)) == 4
        assert await store.sweep(jobs[2].ended) == 2
        assert await store.recent("ada", 10) == [jobs[3], jobs[2]]
        assert await store.totals("user") == total


@on_loop
async def test_concurrent_processes_count_each_job_once(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    url = postgres.database()
    jobs = [record(user=f"user {number % 7}") for number in range(1500)]
    async with (
        opened(JournaledUsage([url], tmp_path / "here", 3600)) as local,
        opened(JournaledUsage([url], tmp_path / "there", 3600)) as remote,
    ):
        # Some jobs are noted by both leaders.
        for job in jobs[:1000]:
            local.record(job)
        for job in jobs[500:]:
            remote.record(job)
        both = await asyncio.gather(local.totals("user"), remote.totals("user"))
        for total in (both[1], await local.totals("user")):
            assert sum(total_row.jobs for total_row in total) in (1000, 1500)
        assert sum(total_row.jobs for total_row in await local.totals("user")) == 1500
        assert sum(total_row.execution_s for total_row in await remote.totals("day")) == 1500 * 1.5


@on_loop
async def test_totals_do_not_wait_for_concurrent_notes(tmp_path: Path) -> None:
    url, folder = f"sqlite:///{tmp_path / 'a.sqlite'}", tmp_path / "usage"
    noted = 0

    async def note_all_the_time(store: UsageStore) -> None:
        nonlocal noted
        while True:
            store.record(record())
            noted += 1
            await asyncio.sleep(0.0005)

    async with opened(JournaledUsage([url], folder, 3600)) as store:
        noting = asyncio.create_task(note_all_the_time(store))
        await eventually(lambda: noted >= 50)
        for _ in range(5):
            before = noted
            (total,) = await within(store.totals("user"), PATIENCE_S)
            assert before <= total.jobs <= noted
            # Stored records have no journal file any more; newer records have one.
            assert len([*folder.iterdir()]) == 1
        await end([noting])
    async with opened(JournaledUsage([url], folder, 3600)) as store:
        (total,) = await store.totals("user")
        assert total.jobs == noted


@on_loop
async def test_jobs_noted_during_database_outage_are_stored_later(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    url, folder = postgres.database(), tmp_path / "usage"
    postgres.stop()
    try:
        async with opened(JournaledUsage([url], folder, 3600)) as store:
            store.record(record())
            with pytest.raises(UsageUnavailableError):
                await store.totals("user")
        # The first process ended without storing its record.
        async with opened(JournaledUsage([url], folder, 3600)) as store:
            store.record(record())
            postgres.start()

            async def totals() -> Sequence[UsageTotal] | None:
                with contextlib.suppress(UsageUnavailableError):
                    return await store.totals("user")
                return None

            assert await eventually(totals) == [total("ada", 2, 0, 3.0, 2000)]
    finally:
        with contextlib.suppress(AssertionError):
            postgres.start()
    assert list(folder.iterdir()) == []


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from ndif.schema.job_record import JobRecord
from ndif.stores.usage.history import BOUNDS_S, class_of, intervals_of, percentile
from ndif.stores.usage.journal import JournaledUsage
async def main():
    usage = JournaledUsage(["sqlite:////no/such/folder/accounts.sqlite"], Path(sys.argv[1]), 3600)
    await usage.start()
    for number in range(3):
        usage.record(JobRecord(str(number), "ada", "", "org/a", "0.8", "COMPLETED", 1, 2, 3, 0.5, 7))
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


@on_loop
async def test_jobs_noted_by_killed_process_are_stored_by_next(tmp_path: Path) -> None:
    folder = tmp_path / "usage"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, str(folder))
    assert await process.wait() == -signal.SIGKILL
    (left,) = folder.iterdir()
    # Simulate a kill during a write.
    with left.open("ab") as file:
        file.write(b'{"id": "4", "user":')
    async with opened(
        JournaledUsage([f"sqlite:///{tmp_path / 'a.sqlite'}"], folder, 3600)
    ) as store:
        assert await store.totals("user") == [total("ada", 3, 0, 1.5, 21)]
        assert left not in folder.iterdir()


@on_loop
async def test_journal_of_running_process_is_kept(tmp_path: Path) -> None:
    url, folder = f"sqlite:///{tmp_path / 'a.sqlite'}", tmp_path / "usage"
    folder.mkdir()
    other = folder / "1.jsonl"
    with other.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        async with opened(JournaledUsage([url], folder, 3600)) as store:
            store.record(record())
            assert len(await store.totals("user")) == 1
        assert other.exists()
    async with opened(JournaledUsage([url], folder, 3600)) as store:
        store.record(record())
        assert len(await store.totals("user")) == 1
    assert not other.exists()


@on_loop
async def test_usage_is_not_written_to_foreign_database(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    url, own = postgres.database(), tmp_path / "accounts.sqlite"
    postgres.sql(url, FOREIGN)
    async with opened(JournaledUsage([url, f"sqlite:///{own}"], tmp_path / "usage", 3600)) as store:
        store.record(record())
        assert len(await store.totals("user")) == 1
    assert own.exists()
    assert "ndif_" not in postgres.sql(url, "SELECT tablename FROM pg_tables")


@on_loop
async def test_unwritable_journal_folder_does_not_prevent_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "usage").touch()
    url = f"sqlite:///{tmp_path / 'a.sqlite'}"
    async with opened(JournaledUsage([url], tmp_path / "usage", 3600)) as store:
        assert "in memory" in caplog.text
        store.record(record())
        assert len(await store.totals("user")) == 1


@on_loop
async def test_history_is_equal_in_each_form(usage: Open) -> None:
    step_s = 300.0
    jobs = [
        record(ended=MIDNIGHT + ended, received=MIDNIGHT + ended - total, **fields)
        for ended, total, fields in (
            (-1.0, 1.0, {}),  # before the requested time
            (0.0, 0.001, {"dispatched": MIDNIGHT - 0.0005}),
            (299.5, 2.0, {"dispatched": MIDNIGHT + 299.0}),
            (299.5, 2.5, {"dispatched": None, "status": "ERROR"}),
            (900.0, 1e6, {"dispatched": MIDNIGHT + 0.0, "status": "ENDED"}),
        )
    ]
    async with usage() as store:
        for job in jobs:
            store.record(job)
        intervals = await store.history(MIDNIGHT, step_s)
        assert intervals == intervals_of(jobs, MIDNIGHT, step_s)
        first, second = intervals
        assert (first.start, first.jobs, first.errors) == (MIDNIGHT, 3, 1)
        assert (second.start, second.jobs, second.errors) == (MIDNIGHT + 900, 1, 1)
        assert sum(first.waits.values()) == 2
        assert await store.history(MIDNIGHT + 1e6, step_s) == []


@pytest.mark.parametrize("seconds", [0.0, 0.012, 0.5, 3.0, 59.0, 5000.0, 1e9])
def test_percentile_is_accurate_to_its_class(seconds: float) -> None:
    value = percentile({class_of(seconds): 5}, 0.5)
    assert value is not None
    assert 0.8 * min(seconds, BOUNDS_S[-1]) <= value <= max(1.2 * seconds, BOUNDS_S[0])


def test_percentile_follows_distribution_of_jobs() -> None:
    classes = {class_of(1.0): 90, class_of(60.0): 10}
    half, most = percentile(classes, 0.5), percentile(classes, 0.95)
    assert half is not None
    assert most is not None
    assert 0.8 < half < 1.2
    assert 50 < most < 72
    assert percentile({}, 0.5) is None
