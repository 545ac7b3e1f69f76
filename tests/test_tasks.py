"""Tasks of the event loop: a cancellation that no library can lose."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from ndif.tasks import in_own_task
from tests.on_loop import on_loop
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.process


@on_loop
async def test_cancellation_at_moment_of_answer_is_not_lost() -> None:
    """`asyncio.wait_for` of Python 3.11 returns the answer in this case and loses the cancellation."""
    answer = asyncio.get_running_loop().create_future()

    async def library() -> str:
        return await asyncio.wait_for(answer, 10)

    async def work() -> None:
        await in_own_task(library())
        await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    answer.set_result("250 OK")
    task.cancel()
    _, waits = await asyncio.wait([task], timeout=5)
    assert not waits
    assert task.cancelled()


@on_loop
async def test_cancelled_library_call_ends_before_its_caller() -> None:
    ended = asyncio.Event()

    async def library() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            ended.set()

    task = asyncio.create_task(in_own_task(library()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


@on_loop
async def test_own_task_passes_on_result_and_error() -> None:
    async def library(fails: bool) -> int:
        if fails:
            raise ConnectionResetError("gone")
        return 3

    assert await in_own_task(library(False)) == 3
    with pytest.raises(ConnectionResetError, match="gone"):
        await in_own_task(library(True))


def test_abandoned_thread_does_not_delay_process_exit() -> None:
    code = (
        "import asyncio, threading; from ndif.tasks import in_daemon_thread, end\n"
        "async def main():\n"
        "    begun = asyncio.Event(); loop = asyncio.get_running_loop()\n"
        "    def work(): loop.call_soon_threadsafe(begun.set); threading.Event().wait()\n"
        "    async def wait(): await in_daemon_thread(work)\n"
        "    waiting = asyncio.create_task(wait()); await begun.wait(); await end([waiting])\n"
        "asyncio.run(main())"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S).returncode == 0
