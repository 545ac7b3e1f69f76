"""Persistent, fresh and per-user runners, over socket pairs with the tests at the other end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ndif.config.groups import MiB
from ndif.config.settings import Settings
from ndif.host import runner_pool
from ndif.host.channel import AsyncFrameChannel
from ndif.host.model_process import ModelProcessError
from ndif.host.runner_handle import RunnerError, RunnerHandle
from ndif.host.runner_pool import (
    FreshRunners,
    PersistentRunner,
    PerUserRunners,
    RunnerPool,
    context_bytes,
)
from ndif.runtime.frames import pack
from ndif.runtime.messages import Signal
from tests.on_loop import on_loop
from tests.waiting import PATIENCE_S, eventually, time_passes_async

IDLE = pack(Signal.IDLE)


def a_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["/bin/sleep", "60"])


class Zygote:
    """A zygote that forks runners under a test's control."""

    def __init__(self) -> None:
        self.runners: list[RunnerHandle] = []
        self.ends: list[socket.socket] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.first_words = IDLE
        self.mute = self.gone = self.real = False
        self.reaping = False
        """True if a runner that is killed ends at once."""

    async def fork(self) -> RunnerHandle:
        if self.gone:
            raise ModelProcessError("the model process ended")
        channel, theirs = AsyncFrameChannel.pair()
        runner = RunnerHandle(f"runner {len(self.runners)}", channel)
        self.runners.append(runner)
        self.ends.append(theirs)
        if self.real:
            process = a_process()
            self.processes.append(process)
            runner.forked(process.pid)
        if self.reaping:
            kill = runner.kill

            def end() -> None:
                kill()
                self.end(runner)

            runner.kill = end  # type: ignore[method-assign]
        if not self.mute:
            theirs.sendall(self.first_words)
        return runner

    def end(self, runner: RunnerHandle, code: int = -9) -> None:
        """End a runner and notify the host."""
        self.ends[self.runners.index(runner)].close()
        runner.exited(code)

    def says(self, runner: RunnerHandle, frame: bytes) -> None:
        """Send a frame as the runner."""
        self.ends[self.runners.index(runner)].sendall(frame)

    def close(self) -> None:
        for runner, end in zip(self.runners, self.ends, strict=True):
            end.close()
            runner.exited(None)
        for process in self.processes:
            process.kill()
            process.wait()


@contextlib.asynccontextmanager
async def a_zygote() -> AsyncIterator[Zygote]:
    zygote = Zygote()
    try:
        yield zygote
    finally:
        zygote.close()


async def nothing_more_happens() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


# Runners of one request each.


async def full(zygote: Zygote, size: int) -> FreshRunners:
    """Return a full pool."""
    pool = FreshRunners(zygote.fork, size)
    await pool.start()
    await eventually(lambda: len(zygote.runners) == size)
    await nothing_more_happens()
    return pool


@on_loop
async def test_pool_starts_once_first_runner_is_ready() -> None:
    async with a_zygote() as zygote:
        pool = FreshRunners(zygote.fork, 3)
        await pool.start()
        assert len(zygote.runners) == 1
        await eventually(lambda: len(zygote.runners) == 3)
        assert await pool.acquire("") is zygote.runners[0]


@on_loop
async def test_runners_start_sequentially() -> None:
    async with a_zygote() as zygote:
        zygote.mute = True
        starting = asyncio.create_task(FreshRunners(zygote.fork, 3).start())
        for count in (1, 2, 3):
            await eventually(lambda count=count: len(zygote.runners) == count)
            await nothing_more_happens()
            assert len(zygote.runners) == count
            assert starting.done() == (count > 1)
            zygote.ends[-1].sendall(IDLE)
        await nothing_more_happens()
        assert len(zygote.runners) == 3


@on_loop
async def test_cleared_pool_forks_no_runners() -> None:
    async with a_zygote() as zygote:
        pool = FreshRunners(zygote.fork, 3)
        await pool.start()
        await pool.clear()
        await asyncio.sleep(0.05)
        assert len(zygote.runners) == 1
        assert not any(runner.usable for runner in zygote.runners)


@on_loop
async def test_oldest_runner_is_used_first() -> None:
    async with a_zygote() as zygote:
        pool = await full(zygote, 3)
        assert [await pool.acquire("") for _ in range(3)] == zygote.runners
        assert len(zygote.runners) == 3


@on_loop
async def test_fresh_runner_is_used_once() -> None:
    async with a_zygote() as zygote:
        pool = await full(zygote, 2)
        taken = []
        for _ in range(20):
            taken.append(await pool.acquire(""))
            pool.release(taken[-1], answered=True)
        assert len(set(taken)) == 20


@on_loop
async def test_pool_is_refilled_only_after_request() -> None:
    async with a_zygote() as zygote:
        pool = await full(zygote, 2)
        runner = await pool.acquire("")
        await nothing_more_happens()
        # It would warm up on the cores of the request.
        assert len(zygote.runners) == 2
        pool.release(runner, answered=True)
        await eventually(lambda: len(zygote.runners) == 3)
        await nothing_more_happens()
        assert len(zygote.runners) == 3


@on_loop
async def test_pool_keeps_its_size() -> None:
    async with a_zygote() as zygote:
        pool = await full(zygote, 2)
        for count in range(3, 10):
            pool.release(await pool.acquire(""), answered=True)
            await eventually(lambda count=count: len(zygote.runners) == count)
            await nothing_more_happens()
            assert len(zygote.runners) == count


@on_loop
async def test_burst_of_requests_refills_pool_once() -> None:
    async with a_zygote() as zygote:
        pool = await full(zygote, 2)
        zygote.mute = True
        taken = [await pool.acquire(""), await pool.acquire("")]
        for runner in taken:
            pool.release(runner, answered=True)
        for count in (3, 4):
            await eventually(lambda count=count: len(zygote.runners) == count)
            await nothing_more_happens()
            assert len(zygote.runners) == count
            zygote.ends[-1].sendall(IDLE)
        await nothing_more_happens()
        assert len(zygote.runners) == 4
        assert [await pool.acquire(""), await pool.acquire("")] == zygote.runners[2:]


@pytest.mark.process
@on_loop
async def test_released_runner_ends() -> None:
    async with a_zygote() as zygote:
        zygote.real = True
        pool = FreshRunners(zygote.fork, 1)
        await pool.start()
        runner = await pool.acquire("")
        assert zygote.processes[0].poll() is None
        pool.release(runner, answered=True)
        assert await asyncio.to_thread(zygote.processes[0].wait, PATIENCE_S) == -signal.SIGKILL
        await eventually(lambda: len(zygote.runners) == 2)
        assert zygote.processes[1].poll() is None


@pytest.mark.process
@on_loop
async def test_runner_released_before_its_pid_is_known_ends() -> None:
    async with a_zygote() as zygote:
        pool = FreshRunners(zygote.fork, 1)
        await pool.start()
        runner = await pool.acquire("")
        pool.release(runner, answered=True)
        with a_process() as process:
            runner.forked(process.pid)
            assert await asyncio.to_thread(process.wait, 5) == -signal.SIGKILL


@on_loop
async def test_runner_that_ended_while_waiting_is_skipped() -> None:
    async with a_zygote() as zygote:
        pool = await full(zygote, 3)
        zygote.end(zygote.runners[0])
        zygote.end(zygote.runners[1])
        assert await pool.acquire("") is zygote.runners[2]
        assert len(zygote.runners) == 3


@on_loop
async def test_runner_is_forked_if_all_have_ended() -> None:
    async with a_zygote() as zygote:
        pool = await full(zygote, 2)
        for runner in list(zygote.runners):
            zygote.end(runner)
        taken = await pool.acquire("")
        assert taken is zygote.runners[2]
        assert taken.alive


@on_loop
async def test_runners_that_ended_while_waiting_are_replaced() -> None:
    async with a_zygote() as zygote:
        pool = await full(zygote, 3)
        runner = await pool.acquire("")
        for waiting in zygote.runners[1:]:
            zygote.end(waiting)
        pool.release(runner, answered=True)
        # Three that live wait for the next three requests.
        await eventually(lambda: len(zygote.runners) == 6)
        await nothing_more_happens()
        assert [await pool.acquire("") for _ in range(3)] == zygote.runners[3:6]


@on_loop
async def test_empty_pool_forks_runner() -> None:
    async with a_zygote() as zygote:
        pool = FreshRunners(zygote.fork, 1)
        await pool.start()
        await pool.acquire("")
        zygote.mute = True
        taking = asyncio.create_task(pool.acquire(""))
        # A third may fill the pool.
        await eventually(lambda: len(zygote.runners) >= 2)
        await nothing_more_happens()
        assert not taking.done()
        zygote.ends[1].sendall(IDLE)
        assert await taking is zygote.runners[1]


@on_loop
async def test_unstarted_pool_forks_runner() -> None:
    async with a_zygote() as zygote:
        assert await FreshRunners(zygote.fork, 2).acquire("") is zygote.runners[0]


@on_loop
async def test_request_during_refill_gets_its_own_runner() -> None:
    async with a_zygote() as zygote:
        pool = FreshRunners(zygote.fork, 1)
        await pool.start()
        zygote.mute = True
        pool.release(await pool.acquire(""), answered=True)
        await eventually(lambda: len(zygote.runners) == 2)
        taking = asyncio.create_task(pool.acquire(""))
        await eventually(lambda: len(zygote.runners) == 3)
        for end in zygote.ends[1:]:
            end.sendall(IDLE)
        taken = await taking
        await nothing_more_happens()
        other = await pool.acquire("")
        assert taken is not other
        assert len({taken, other}) == 2


# Runners that fail.


@on_loop
async def test_failure_reason_of_runner_is_reported() -> None:
    async with a_zygote() as zygote:
        zygote.mute = True
        starting = asyncio.create_task(FreshRunners(zygote.fork, 2).start())
        await eventually(lambda: len(zygote.ends) == 1)
        reason = "ConfinementError: no Landlock \N{SNOWMAN}".encode()
        zygote.ends[0].sendall(pack(Signal.FAILED, len(reason)) + reason)
        with pytest.raises(RunnerError, match="ConfinementError: no Landlock \N{SNOWMAN}"):
            await starting


@on_loop
async def test_runner_that_ends_before_it_is_ready_raises_error() -> None:
    async with a_zygote() as zygote:
        zygote.mute = True
        taking = asyncio.create_task(FreshRunners(zygote.fork, 2).acquire(""))
        await eventually(lambda: len(zygote.ends) == 1)
        zygote.ends[0].close()
        with pytest.raises(RunnerError, match="ended before it was ready"):
            await taking


@on_loop
async def test_runner_that_ends_within_its_first_frame_raises_error() -> None:
    async with a_zygote() as zygote:
        zygote.first_words = IDLE[:-3]
        taking = asyncio.create_task(FreshRunners(zygote.fork, 2).acquire(""))
        await eventually(lambda: len(zygote.ends) == 1)
        zygote.ends[0].close()
        with pytest.raises(RunnerError):
            await taking


@on_loop
async def test_failed_refill_is_repeated_after_next_request() -> None:
    async with a_zygote() as zygote:
        pool = await full(zygote, 2)
        zygote.first_words = pack(Signal.FAILED)
        pool.release(await pool.acquire(""), answered=True)
        await eventually(lambda: len(zygote.runners) == 3)
        await nothing_more_happens()
        zygote.first_words = IDLE
        pool.release(await pool.acquire(""), answered=True)
        await eventually(lambda: len(zygote.runners) == 5)
        await nothing_more_happens()
        assert [await pool.acquire(""), await pool.acquire("")] == zygote.runners[3:]


@pytest.mark.process
@on_loop
async def test_failed_runner_is_killed() -> None:
    async with a_zygote() as zygote:
        zygote.real = True
        zygote.first_words = pack(Signal.FAILED)
        with pytest.raises(RunnerError):
            await FreshRunners(zygote.fork, 1).acquire("")
        assert await asyncio.to_thread(zygote.processes[0].wait, 2) == -signal.SIGKILL


@pytest.mark.process
@on_loop
async def test_runner_of_cancelled_request_is_killed() -> None:
    async with a_zygote() as zygote:
        zygote.real = zygote.mute = True
        taking = asyncio.create_task(FreshRunners(zygote.fork, 1).acquire(""))
        await eventually(lambda: len(zygote.processes) == 1)
        await nothing_more_happens()
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        assert await asyncio.to_thread(zygote.processes[0].wait, 2) == -signal.SIGKILL


@pytest.mark.parametrize("kind", [FreshRunners, PersistentRunner])
@on_loop
async def test_pool_without_zygote_raises_error(
    kind: type[FreshRunners] | type[PersistentRunner],
) -> None:
    async with a_zygote() as zygote:
        pool: RunnerPool = (
            FreshRunners(zygote.fork, 1) if kind is FreshRunners else PersistentRunner(zygote.fork)
        )
        await pool.start()
        taken = await pool.acquire("")
        zygote.gone = True
        pool.release(taken, answered=True)
        for runner in zygote.runners:
            if runner.alive:
                zygote.end(runner)
        await nothing_more_happens()
        with pytest.raises(ModelProcessError, match="the model process ended"):
            await pool.acquire("")


# Persistent runners.


@on_loop
async def test_persistent_pool_keeps_one_runner_and_one_spare() -> None:
    async with a_zygote() as zygote:
        pool = PersistentRunner(zygote.fork)
        await pool.start()
        assert len(zygote.runners) == 2
        for _ in range(5):
            runner = await pool.acquire("")
            assert runner is zygote.runners[0]
            pool.release(runner, answered=True)
            zygote.says(runner, IDLE)
        assert runner.alive
        assert len(zygote.runners) == 2


@on_loop
async def test_next_request_waits_until_persistent_runner_is_reset() -> None:
    async with a_zygote() as zygote:
        pool = PersistentRunner(zygote.fork)
        await pool.start()
        pool.release(await pool.acquire(""), answered=True)
        acquiring = asyncio.create_task(pool.acquire(""))
        await nothing_more_happens()
        assert not acquiring.done()
        zygote.says(zygote.runners[0], IDLE)
        assert await acquiring is zygote.runners[0]


@pytest.mark.parametrize("last", ["spent", "ended", "unanswered"])
@on_loop
async def test_spare_replaces_runner_that_is_not_reset(last: str) -> None:
    async with a_zygote() as zygote:
        zygote.reaping = True
        pool = PersistentRunner(zygote.fork)
        await pool.start()
        runner = await pool.acquire("")
        pool.release(runner, answered=last != "unanswered")
        if last == "spent":
            zygote.says(runner, pack(Signal.SPENT))
        elif last == "ended":
            zygote.end(runner, 1)
        await pool.wait_until_reset()
        assert not runner.usable
        # Another spare is there before a request comes.
        assert len(zygote.runners) == 3
        assert await pool.acquire("") is zygote.runners[1]
        assert len(zygote.runners) == 3


@on_loop
async def test_spare_is_forked_only_after_first_runner_is_ready() -> None:
    async with a_zygote() as zygote:
        zygote.mute = True
        starting = asyncio.create_task(PersistentRunner(zygote.fork).start())
        await eventually(lambda: len(zygote.runners) == 1)
        await nothing_more_happens()
        assert len(zygote.runners) == 1
        zygote.ends[0].sendall(IDLE)
        # It is not waited for.
        await starting
        assert len(zygote.runners) == 2


@on_loop
async def test_spare_replaces_ended_runner() -> None:
    async with a_zygote() as zygote:
        pool = PersistentRunner(zygote.fork)
        await pool.start()
        zygote.end(await pool.acquire(""))
        assert await pool.acquire("") is zygote.runners[1]
        assert len(zygote.runners) == 3
        zygote.end(zygote.runners[2])
        assert await pool.acquire("") is zygote.runners[1]
        assert len(zygote.runners) == 4


@on_loop
async def test_two_runners_are_forked_if_both_have_ended() -> None:
    async with a_zygote() as zygote:
        pool = PersistentRunner(zygote.fork)
        await pool.start()
        for runner in list(zygote.runners):
            zygote.end(runner)
        assert await pool.acquire("") is zygote.runners[2]
        assert len(zygote.runners) == 4


@on_loop
async def test_unstarted_persistent_pool_forks_runner_and_spare() -> None:
    async with a_zygote() as zygote:
        assert await PersistentRunner(zygote.fork).acquire("") is zygote.runners[0]
        assert len(zygote.runners) == 2


@on_loop
async def test_failure_reason_of_persistent_runner_is_reported() -> None:
    async with a_zygote() as zygote:
        zygote.first_words = pack(Signal.FAILED, 3) + b"why"
        with pytest.raises(RunnerError, match=r"^why$"):
            await PersistentRunner(zygote.fork).start()


# Runners that are kept for one key.


@st.composite
def visits(draw: st.DrawFn) -> list[tuple[str, str]]:
    """Return users in any order, and the end of each request."""
    ends = st.sampled_from(["reset", "reset", "reset", "spent", "no answer", "killed", "ended"])
    return draw(st.lists(st.tuples(st.sampled_from(["", "ada", "bob", "eve"]), ends), max_size=30))


@settings(suppress_health_check=list(HealthCheck))
@given(visits=visits(), most=st.integers(1, 5), users=st.integers(1, 3))
def test_runner_never_serves_two_keys(visits: list[tuple[str, str]], most: int, users: int) -> None:
    asyncio.run(_serve_them_all(visits, most, users))


async def _serve_them_all(visits: list[tuple[str, str]], most: int, users: int) -> None:
    async with a_zygote() as zygote:
        zygote.reaping = True
        pool = PerUserRunners(FreshRunners(zygote.fork, 2), 60, most, users)
        await pool.start()
        served: dict[RunnerHandle, list[str]] = {}
        ended: set[RunnerHandle] = set()
        waiting: dict[str, RunnerHandle] = {}
        """Runners that wait for their key, the least recently used first."""
        for key, end in visits:
            runner = await pool.acquire(key)
            kept = waiting.pop(key, None)
            assert (runner is kept) is (kept is not None)
            if kept is None and len(waiting) == users:
                ended.add(waiting.pop(next(iter(waiting))))
            # A runner that no longer waits has ended before the request starts.
            assert not any(runner.alive for runner in ended)
            assert runner not in ended
            assert runner.alive
            of = served.setdefault(runner, [])
            of.append(key)
            # A runner serves only its first key, and at most `most` requests.
            assert set(of) == {key}
            assert len(of) <= (most if key else 1)
            if end == "spent":
                zygote.says(runner, pack(Signal.SPENT))
            elif end == "reset":
                zygote.says(runner, IDLE)
            elif end == "killed":
                runner.kill()
            elif end == "ended":
                zygote.end(runner)
            pool.release(runner, answered=end in ("reset", "spent"))
            if end != "reset" or not key or len(of) == most:
                ended.add(runner)
                await pool.wait_until_reset()
            else:
                waiting[key] = runner
        await pool.clear()
        assert not any(runner.alive for runner in served)


async def taken_and_reset(zygote: Zygote, pool: PerUserRunners, key: str) -> RunnerHandle:
    """Return a runner that was reset after a request."""
    runner = await pool.acquire(key)
    zygote.says(runner, IDLE)
    pool.release(runner, answered=True)
    assert await pool.wait_until_reset()
    return runner


@on_loop
async def test_next_key_waits_until_runner_of_last_key_has_ended() -> None:
    async with a_zygote() as zygote:
        pool = PerUserRunners(FreshRunners(zygote.fork, 2), 60, 10)
        await pool.start()
        runner = await taken_and_reset(zygote, pool, "ada")
        taking = asyncio.create_task(pool.acquire("bob"))
        await nothing_more_happens()
        assert not taking.done()
        zygote.end(runner)
        assert await taking is not runner


@on_loop
async def test_idle_runners_of_other_keys_end_if_memory_is_short() -> None:
    async with a_zygote() as zygote:
        zygote.reaping = True
        short = False
        pool = PerUserRunners(FreshRunners(zygote.fork, 1), 60, 10, 3, lambda: short)
        await pool.start()
        ada, bob = [await taken_and_reset(zygote, pool, key) for key in ("ada", "bob")]
        assert (ada.alive, bob.alive) == (True, True)
        short = True
        assert await taken_and_reset(zygote, pool, "ada") is ada  # a user with a runner keeps it
        eve = await taken_and_reset(zygote, pool, "eve")
        assert (ada.alive, bob.alive, eve.alive) == (False, False, True)
        await pool.clear()


@on_loop
async def test_next_request_of_key_waits_for_reset() -> None:
    async with a_zygote() as zygote:
        pool = PerUserRunners(FreshRunners(zygote.fork, 2), 60, 10)
        await pool.start()
        runner = await pool.acquire("ada")
        pool.release(runner, answered=True)
        taking = asyncio.create_task(pool.acquire("ada"))
        await nothing_more_happens()
        assert not taking.done()
        zygote.says(runner, IDLE)
        assert await taking is runner


@on_loop
async def test_runner_that_does_not_report_reset_is_replaced() -> None:
    async with a_zygote() as zygote:
        pool = PerUserRunners(FreshRunners(zygote.fork, 2), 60, 10)
        await pool.start()
        runner = await pool.acquire("ada")
        zygote.says(runner, pack(Signal.LOG))
        pool.release(runner, answered=True)
        assert not await pool.wait_until_reset()
        zygote.end(runner)
        assert await pool.acquire("ada") is not runner


def state(process: subprocess.Popen[bytes]) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pause runners soon after their last request."""
    monkeypatch.setattr(runner_pool, "_STOPPED_AFTER_S", 0.05)


@pytest.mark.process
@on_loop
async def test_waiting_runner_is_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_zygote() as zygote:
        zygote.real = True
        pool = PerUserRunners(FreshRunners(zygote.fork, 1), 60, 10)
        await pool.start()
        monkeypatch.setattr(runner_pool, "_STOPPED_AFTER_S", PATIENCE_S)
        await taken_and_reset(zygote, pool, "ada")
        (process,) = zygote.processes
        await nothing_more_happens()
        assert state(process) != "T"
        monkeypatch.setattr(runner_pool, "_STOPPED_AFTER_S", 0.05)
        await taken_and_reset(zygote, pool, "ada")
        await eventually(lambda: state(process) == "T")
        await pool.acquire("ada")
        await eventually(lambda: state(process) != "T")


@pytest.mark.process
@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("waits_for_reset", [False, True])
@on_loop
async def test_runner_with_next_request_is_not_paused(waits_for_reset: bool) -> None:
    async with a_zygote() as zygote:
        zygote.real = True
        pool = PerUserRunners(FreshRunners(zygote.fork, 1), 60, 10)
        await pool.start()
        if waits_for_reset:
            runner = await pool.acquire("ada")
            pool.release(runner, answered=True)
            taking = asyncio.create_task(pool.acquire("ada"))
            await nothing_more_happens()
            zygote.says(runner, IDLE)
            assert await taking is runner
        else:
            runner = await taken_and_reset(zygote, pool, "ada")
            assert await pool.acquire("ada") is runner
        await time_passes_async(0.1)
        assert state(zygote.processes[0]) != "T"


@pytest.mark.process
@on_loop
async def test_idle_runner_is_ended_and_replaced() -> None:
    async with a_zygote() as zygote:
        zygote.real = True
        pool = PerUserRunners(FreshRunners(zygote.fork, 1), 0.5, 10)
        await pool.start()
        await taken_and_reset(zygote, pool, "ada")
        assert await asyncio.to_thread(zygote.processes[0].wait, PATIENCE_S) == -signal.SIGKILL
        assert not await pool.wait_until_reset()
        # Another waits in its place.
        await eventually(lambda: len(zygote.runners) == 2)


# CUDA contexts.


@pytest.mark.process
@pytest.mark.parametrize(
    ("untrusted", "trusted", "processes"),
    [(False, True, 3), (True, False, 4), (True, True, 6)],
)
def test_each_process_reserves_cuda_context(untrusted: bool, trusted: bool, processes: int) -> None:
    config = Settings(gpu_context_bytes=100 * MiB, runner_pool=2)
    assert context_bytes(config, untrusted=untrusted, trusted=trusted) == processes * 100 * MiB


def test_waiting_runners_reserve_cuda_contexts() -> None:
    config = Settings(runner_pool=6, runner_scope="request")
    assert context_bytes(config, untrusted=True, trusted=False) == 7 * config.gpu_context_bytes
    # One more for the runner that is kept for a key.
    config = Settings(runner_pool=6)
    assert context_bytes(config, untrusted=True, trusted=False) == 8 * config.gpu_context_bytes
