"""Detection of frozen processes: busy, asleep, stopped and ended ones, and a stopped host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterator

import pytest

from ndif.host.heartbeat import sign_of_family, sign_of_life, until_frozen
from ndif.tasks import within
from tests.on_loop import on_loop
from tests.waiting import PATIENCE_S, time_passes

pytestmark = pytest.mark.process

FROZEN_S = 0.5
BUSY = "print('here', flush=True)\nwhile True: pass"
ASLEEP = "import time; print('here', flush=True); time.sleep(60)"
WAITING = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"
HOST = f"""
import asyncio, sys, time
from ndif.host.heartbeat import sign_of_life, until_frozen
print("here", flush=True)
asyncio.run(until_frozen(lambda: sign_of_life(int(sys.argv[1])), {FROZEN_S}))
print("frozen", flush=True)
"""


@contextlib.contextmanager
def a_process(program: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"here\n"
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


async def is_frozen(sign: Callable[[], Hashable], within_s: float = PATIENCE_S) -> bool:
    with contextlib.suppress(asyncio.TimeoutError):
        await within(until_frozen(sign, FROZEN_S), within_s)
        return True
    return False


@pytest.mark.parametrize(
    ("program", "sign", "frozen"),
    [
        (BUSY, sign_of_life, False),
        (ASLEEP, sign_of_life, True),
        (WAITING, sign_of_family, False),
        (WAITING, sign_of_life, True),
    ],
)
@on_loop
async def test_only_process_that_makes_no_progress_is_frozen(
    program: str, sign: Callable[[int], Hashable], frozen: bool
) -> None:
    with a_process(program) as process:
        within_s = PATIENCE_S if frozen else 2 * FROZEN_S
        assert await is_frozen(lambda: sign(process.pid), within_s) is frozen
        if not frozen:
            os.killpg(process.pid, signal.SIGSTOP)
            assert await is_frozen(lambda: sign(process.pid))


@on_loop
async def test_ended_process_is_not_reported_as_frozen() -> None:
    with a_process(ASLEEP) as process:
        pid = process.pid
    assert not await is_frozen(lambda: sign_of_life(pid), 2 * FROZEN_S)


def test_processes_are_not_frozen_after_host_was_stopped_too() -> None:
    """A laptop slept: neither process ran, and both continue."""
    with a_process(BUSY) as process, a_process(HOST, str(process.pid)) as host:
        assert host.stdout is not None
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for leader in (host, process):
                os.killpg(leader.pid, number)
            time_passes(2 * FROZEN_S)
        os.killpg(process.pid, signal.SIGSTOP)
        stopped = time.monotonic()
        assert host.stdout.readline() == b"frozen\n"
        assert time.monotonic() - stopped > FROZEN_S / 2
