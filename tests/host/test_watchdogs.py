"""The watchdog of a request: real processes that take memory and threads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ndif.host.watchdogs import ResourceUsage, ResourceWatchdog
from ndif.sandbox.confinement.cgroup import RunnerCgroups
from ndif.tasks import within
from tests.on_loop import on_loop
from tests.waiting import PATIENCE_S, eventually, time_passes_async, until

pytestmark = pytest.mark.process

MIB = 1 << 20
MEMORY, THREADS = 64 * MIB, 8
WATCH = ResourceWatchdog(MEMORY, THREADS)
MEMORY_WORDS = (
    "The request took more than 64MiB of memory, the most that this server gives to one "
    "(NDIF_RUNNER_MEMORY_BYTES), and was ended. Compute less at once: a "
    "smaller batch, or `with torch.no_grad():` if you need no gradients."
)
THREAD_WORDS = (
    "The request started more than 8 threads, the most that this server gives to one "
    "(NDIF_RUNNER_MAX_THREADS), and was ended."
)

PROGRAM = """
import mmap, os, sys, threading, time
kept = []
print("ready", flush=True)
for line in sys.stdin:
    what, _, number = line.strip().partition(" ")
    if what == "private":
        kept.append(bytearray(b"x") * int(number))
    elif what == "shared":
        area = mmap.mmap(-1, int(number))
        for start in range(0, int(number), 4096):
            area[start] = 1
        kept.append(area)
    elif what == "file":
        area = mmap.mmap(os.open(sys.executable, os.O_RDONLY), 0, prot=mmap.PROT_READ)
        kept.append((area, sum(area[::4096])))
    elif what == "tables":
        area = mmap.mmap(-1, int(number) << 9, mmap.MAP_PRIVATE, mmap.PROT_READ)
        area.madvise(mmap.MADV_NOHUGEPAGE)
        kept.append((area, sum(area[:: 1 << 21])))
    elif what == "threads":
        for _ in range(int(number)):
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    elif what == "free":
        kept.clear()
    print("done", flush=True)
"""


class Process:
    """A process that takes memory and threads on command."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-Sc", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        assert self._answer() == "ready\n"

    def take(self, action: str, number: int = 0) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{action} {number}\n")
        self._process.stdin.flush()
        self._answer()  # or its end

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def taken(self) -> ResourceUsage:
        taken = ResourceUsage.of(self.pid)
        assert taken is not None
        return taken

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self.kill()
        self._process.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process()
    yield process
    process.end()


# Resource usage of a process.


def test_private_and_shared_memory_counts(process: Process) -> None:
    for kind in ("private", "shared"):
        before = process.taken().memory_bytes
        process.take(kind, 32 * MIB)
        assert 32 * MIB <= process.taken().memory_bytes - before < 36 * MIB


def test_page_table_memory_counts(process: Process) -> None:
    before = process.taken().memory_bytes
    process.take("tables", 32 * MIB)
    assert 32 * MIB <= process.taken().memory_bytes - before < 36 * MIB


def test_mapped_files_do_not_count(process: Process) -> None:
    assert Path(sys.executable).stat().st_size > 0
    before = process.taken().memory_bytes
    process.take("file")
    assert process.taken().memory_bytes - before < 2 * MIB


def test_threads_count(process: Process) -> None:
    assert process.taken().threads == 1
    process.take("threads", 5)
    assert process.taken().threads == 6


def test_an_ended_process_has_no_usage(process: Process) -> None:
    process.end()
    assert ResourceUsage.of(process.pid) is None


def test_an_ending_process_has_no_usage() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    try:
        until(lambda: ResourceUsage.of(pid) is None)
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    finally:
        os.waitpid(pid, 0)


def test_watched_process_is_placed_in_cgroup(process: Process, tmp_path: Path) -> None:
    def placed() -> list[Path]:
        return [file.parent for file in tmp_path.glob("*/cgroup.procs") if file.read_text()]

    async def watch_until_it_has() -> None:
        watch = ResourceWatchdog(MEMORY, THREADS, lambda: RunnerCgroups(tmp_path))
        watching = asyncio.create_task(watch.enforce(process.pid, print))
        await eventually(placed)
        watching.cancel()

    asyncio.run(watch_until_it_has())
    [cgroup] = placed()
    assert (cgroup / "cgroup.procs").read_text() == str(process.pid)
    assert (cgroup / "memory.max").read_text() == str(MEMORY)
    assert (cgroup / "pids.max").read_text() == str(THREADS + 1)


# Limits.


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (ResourceUsage(0, 1), ResourceUsage(0, 1), None),
        (ResourceUsage(0, 1), ResourceUsage(MEMORY, THREADS), None),
        (ResourceUsage(0, 1), ResourceUsage(MEMORY + 1, 1), MEMORY_WORDS),
        (ResourceUsage(MEMORY, 1), ResourceUsage(2 * MEMORY, 1), None),
        (ResourceUsage(MEMORY, 1), ResourceUsage(2 * MEMORY + 1, 1), MEMORY_WORDS),
        (ResourceUsage(MEMORY, 1), ResourceUsage(0, 1), None),
        (ResourceUsage(0, 1), ResourceUsage(0, THREADS + 1), THREAD_WORDS),
        # Threads from before the request count, too.
        (ResourceUsage(0, THREADS), ResourceUsage(0, THREADS + 1), THREAD_WORDS),
        (ResourceUsage(0, 1), ResourceUsage(MEMORY + 1, THREADS + 1), MEMORY_WORDS),
    ],
)
def test_exceeded_limit_gives_its_message(
    before: ResourceUsage, now: ResourceUsage, words: str | None
) -> None:
    assert WATCH.exceeded(before, now) == words


# Watching.


async def watched(process: Process, action: str, number: int) -> list[str]:
    reasons: list[str] = []

    def end(reason: str) -> None:
        reasons.append(reason)
        process.kill()

    watching = asyncio.create_task(WATCH.enforce(process.pid, end))
    await time_passes_async(0.1)
    assert not watching.done()
    await asyncio.to_thread(process.take, action, number)
    await within(watching, PATIENCE_S)
    return reasons


@pytest.mark.parametrize("kind", ["private", "shared"])
def test_request_over_memory_limit_is_ended(process: Process, kind: str) -> None:
    assert asyncio.run(watched(process, kind, 80 * MIB)) == [MEMORY_WORDS]


def test_request_over_thread_limit_is_ended(process: Process) -> None:
    assert asyncio.run(watched(process, "threads", THREADS)) == [THREAD_WORDS]


@on_loop
async def test_request_within_limits_is_not_ended() -> None:
    process = Process()
    reasons: list[str] = []
    process.take("private", 2 * MEMORY)  # memory from before the request does not count
    watching = asyncio.create_task(WATCH.enforce(process.pid, reasons.append))
    await time_passes_async(0.06)
    for _ in range(3):
        await asyncio.to_thread(process.take, "private", 16 * MIB)
    await asyncio.to_thread(process.take, "threads", THREADS - 1)
    await time_passes_async(0.2)
    assert not watching.done()
    process.end()
    await within(watching, PATIENCE_S)
    assert reasons == []


@on_loop
async def test_watchdog_ends_with_process() -> None:
    process = Process()
    reasons: list[str] = []
    watching = asyncio.create_task(WATCH.enforce(process.pid, reasons.append))
    await time_passes_async(0.1)
    assert not watching.done()
    process.end()
    await within(watching, PATIENCE_S)
    assert reasons == []


@on_loop
async def test_an_ended_process_is_not_watched() -> None:
    process = Process()
    process.end()
    reasons: list[str] = []
    await within(WATCH.enforce(process.pid, reasons.append), PATIENCE_S)
    assert reasons == []


@on_loop
async def test_watchdog_can_be_cancelled() -> None:
    process = Process()
    reasons: list[str] = []
    watching = asyncio.create_task(WATCH.enforce(process.pid, reasons.append))
    await time_passes_async(0.1)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    await asyncio.to_thread(process.take, "private", 80 * MIB)
    await time_passes_async(0.1)
    assert reasons == []
    process.end()
