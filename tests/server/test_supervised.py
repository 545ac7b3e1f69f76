"""Supervision of processes: order, restart, failure and stop, with minimal programs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ndif.server.supervised import ProcessSpec, Supervisor
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.anyio, pytest.mark.process]

SERVE = """
import os, sys
name, journal, pipe = sys.argv[1], sys.argv[2], int(sys.argv[3])
def note(what):
    with open(journal, "a") as file:
        file.write(f"{what} {name}\\n")
note("start")
os.read(pipe, 1)  # until the owner closes its end
note("stop")
"""
END = "import sys; open(sys.argv[2], 'a').write(f'start {sys.argv[1]}\\n'); sys.exit(3)"
IGNORE = (
    "import sys, time; open(sys.argv[2], 'a').write(f'start {sys.argv[1]}\\n'); time.sleep(600)"
)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "journal"
    path.touch()
    return path


def spec(
    journal: Path,
    name: str,
    program: str = SERVE,
    *,
    must_start: bool = True,
    stop_timeout_s: float = 30,
) -> ProcessSpec:
    def command(parent_pipe: int) -> Sequence[str]:
        return [sys.executable, "-c", program, name, str(journal), str(parent_pipe)]

    return ProcessSpec(name, command, journal.with_suffix(".log"), must_start, stop_timeout_s)


def read(journal: Path) -> str:
    return journal.read_text()


def starts(journal: Path, *names: str) -> Callable[[], bool]:
    return lambda: all(f"start {name}" in read(journal) for name in names)


async def test_stages_start_in_order_and_stop_in_reverse(journal: Path) -> None:
    supervisor = Supervisor(asyncio.Event())
    for name in ("broker", "store"):
        await supervisor.start([spec(journal, name)], starts(journal, name), PATIENCE_S)
    gateways = [spec(journal, "gateway-0"), spec(journal, "gateway-1")]
    await supervisor.start(gateways, starts(journal, "gateway-0", "gateway-1"), PATIENCE_S)
    await supervisor.stop()
    lines = read(journal).splitlines()
    assert lines[:2] == ["start broker", "start store"]
    assert {*lines[2:4]} == {"start gateway-0", "start gateway-1"}
    assert {*lines[4:6]} == {"stop gateway-0", "stop gateway-1"}
    assert lines[6:] == ["stop store", "stop broker"]


async def test_required_process_that_ends_at_once_fails_start(journal: Path) -> None:
    supervisor = Supervisor(asyncio.Event())
    with pytest.raises(RuntimeError, match="'broker' ended at once with status 3; its log is"):
        await supervisor.start([spec(journal, "broker", END)], lambda: False, PATIENCE_S)
    await supervisor.stop()
    assert read(journal) == "start broker\n"


async def test_ended_process_is_restarted(journal: Path) -> None:
    supervisor = Supervisor(asyncio.Event())
    twice = [spec(journal, "dispatcher", END, must_start=False)]
    await supervisor.start(twice, lambda: read(journal).count("start") >= 2, PATIENCE_S)
    await supervisor.stop()


async def test_ready_process_that_ends_is_restarted(journal: Path) -> None:
    supervisor = Supervisor(asyncio.Event())
    # Ready at the first check, which comes before Python has started.
    await supervisor.start([spec(journal, "broker", END)], lambda: True, PATIENCE_S)
    await supervisor.start([], lambda: read(journal).count("start") >= 2, PATIENCE_S)
    await supervisor.stop()


async def test_start_fails_if_process_is_not_ready_in_time(journal: Path) -> None:
    supervisor = Supervisor(asyncio.Event())
    with pytest.raises(asyncio.TimeoutError):
        await supervisor.start([spec(journal, "broker")], lambda: False, 0.2)
    await supervisor.stop()


async def test_a_process_that_does_not_stop_is_killed(journal: Path) -> None:
    supervisor = Supervisor(asyncio.Event())
    stubborn = spec(journal, "broker", IGNORE, stop_timeout_s=0.2)
    await supervisor.start([stubborn], starts(journal, "broker"), PATIENCE_S)
    await asyncio.wait_for(supervisor.stop(), PATIENCE_S)


async def test_no_process_starts_while_owner_is_stopping(journal: Path) -> None:
    stopping = asyncio.Event()
    supervisor = Supervisor(stopping)
    await supervisor.start([spec(journal, "broker")], starts(journal, "broker"), PATIENCE_S)
    stopping.set()
    await asyncio.wait_for(supervisor.wait(), PATIENCE_S)
    await supervisor.start([spec(journal, "store")], lambda: False)
    await supervisor.stop()
    assert read(journal) == "start broker\nstop broker\n"
