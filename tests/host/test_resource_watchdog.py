"""Who watches a request: real processes that take memory and threads, and what is said of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.on_loop import on_loop

from ndif.host.watch import Taken, Watch

MIB = 1 << 20
MEMORY, THREADS = 64 * MIB, 8
WATCH = Watch(MEMORY, THREADS)
MEMORY_WORDS = (
    "The request took more than 67,108,864 bytes of memory, the most that this server gives to one "
    "(NDIF_RUNNER_MEMORY_BYTES), and was ended. Compute less at once."
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
    elif what == "threads":
        for _ in range(int(number)):
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    elif what == "free":
        kept.clear()
    print("done", flush=True)
"""


class Process:
    """A process that takes what it is told to."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-Sc", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        assert self._answer() == "ready\n"

    def take(self, what: str, number: int = 0) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what} {number}\n")
        self._process.stdin.flush()
        self._answer()  # or its end

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def taken(self) -> Taken:
        taken = Taken.by(self.pid)
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


# What a process holds.


def test_private_and_shared_memory_count(process: Process) -> None:
    for what in ("private", "shared"):
        before = process.taken().memory_bytes
        process.take(what, 32 * MIB)
        assert 32 * MIB <= process.taken().memory_bytes - before < 36 * MIB


def test_what_a_file_backs_does_not_count(process: Process) -> None:
    assert Path(sys.executable).stat().st_size > 0
    before = process.taken().memory_bytes
    process.take("file")
    assert process.taken().memory_bytes - before < 2 * MIB


def test_threads_count(process: Process) -> None:
    assert process.taken().threads == 1
    process.take("threads", 5)
    assert process.taken().threads == 6


def test_who_is_gone_holds_nothing(process: Process) -> None:
    process.end()
    assert Taken.by(process.pid) is None


def test_who_is_ending_holds_nothing() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    try:
        deadline = time.monotonic() + 5
        while Taken.by(pid) is not None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    finally:
        os.waitpid(pid, 0)


# What is too much.


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (Taken(0, 1), Taken(0, 1), None),
        (Taken(0, 1), Taken(MEMORY, THREADS), None),
        (Taken(0, 1), Taken(MEMORY + 1, 1), MEMORY_WORDS),
        (Taken(MEMORY, 1), Taken(2 * MEMORY, 1), None),
        (Taken(MEMORY, 1), Taken(2 * MEMORY + 1, 1), MEMORY_WORDS),
        (Taken(MEMORY, 1), Taken(0, 1), None),
        (Taken(0, 1), Taken(0, THREADS + 1), THREAD_WORDS),
        # A thread is one's own, whenever it was started.
        (Taken(0, THREADS), Taken(0, THREADS + 1), THREAD_WORDS),
        (Taken(0, 1), Taken(MEMORY + 1, THREADS + 1), MEMORY_WORDS),
    ],
)
def test_what_is_too_much(before: Taken, now: Taken, words: str | None) -> None:
    assert WATCH.exceeded(before, now) == words


# Watching.


async def watched(process: Process, what: str, number: int) -> list[str]:
    said: list[str] = []

    def end(reason: str) -> None:
        said.append(reason)
        process.kill()

    watching = asyncio.create_task(WATCH.over(process.pid, end))
    await asyncio.sleep(0.1)
    assert not watching.done()
    await asyncio.to_thread(process.take, what, number)
    await asyncio.wait_for(watching, 2)
    return said


@pytest.mark.parametrize("what", ["private", "shared"])
def test_who_takes_too_much_memory_is_ended(process: Process, what: str) -> None:
    assert asyncio.run(watched(process, what, 80 * MIB)) == [MEMORY_WORDS]


def test_who_starts_too_many_threads_is_ended(process: Process) -> None:
    assert asyncio.run(watched(process, "threads", THREADS)) == [THREAD_WORDS]


@on_loop
async def test_who_takes_what_it_may_is_left_alone() -> None:
    process = Process()
    said: list[str] = []
    process.take("private", 2 * MEMORY)  # before: what it was forked with
    watching = asyncio.create_task(WATCH.over(process.pid, said.append))
    await asyncio.sleep(0.06)
    for _ in range(3):
        await asyncio.to_thread(process.take, "private", 16 * MIB)
    await asyncio.to_thread(process.take, "threads", THREADS - 1)
    await asyncio.sleep(0.2)
    assert not watching.done()
    process.end()
    await asyncio.wait_for(watching, 2)
    assert said == []


@on_loop
async def test_it_ends_with_who_is_watched() -> None:
    process = Process()
    said: list[str] = []
    watching = asyncio.create_task(WATCH.over(process.pid, said.append))
    await asyncio.sleep(0.1)
    assert not watching.done()
    process.end()
    await asyncio.wait_for(watching, 2)
    assert said == []


@on_loop
async def test_who_is_gone_is_not_watched() -> None:
    process = Process()
    process.end()
    said: list[str] = []
    await asyncio.wait_for(WATCH.over(process.pid, said.append), 1)
    assert said == []


@on_loop
async def test_it_can_be_called_off() -> None:
    process = Process()
    said: list[str] = []
    watching = asyncio.create_task(WATCH.over(process.pid, said.append))
    await asyncio.sleep(0.1)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    await asyncio.to_thread(process.take, "private", 80 * MIB)
    await asyncio.sleep(0.1)
    assert said == []
    process.end()
