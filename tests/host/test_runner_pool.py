"""Runners that are kept, and runners that wait, over socket pairs whose other ends the tests hold."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.on_loop import on_loop

from ndif.host.channel import Channel
from ndif.host.pool import Fresh, Kept, PerUser, Runners
from ndif.host.process import ModelProcessError
from ndif.host.runner import Runner, RunnerError
from ndif.runtime.frames import pack

IDLE = pack({"kind": "idle"})


def a_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["/bin/sleep", "60"])


class Zygote:
    """Forks runners as a test tells it to: what each says first, or that it ends."""

    def __init__(self) -> None:
        self.runners: list[Runner] = []
        self.ends: list[socket.socket] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.first_words = IDLE
        self.mute = self.gone = self.real = False
        self.reaping = False
        """Whether a runner that is killed ends at once."""

    async def fork(self) -> Runner:
        if self.gone:
            raise ModelProcessError("the model process ended")
        channel, theirs = Channel.pair()
        runner = Runner(f"runner {len(self.runners)}", channel)
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

    def end(self, runner: Runner, code: int = -9) -> None:
        """The runner ends, and the host hears it."""
        self.ends[self.runners.index(runner)].close()
        runner.exited(code)

    def says(self, runner: Runner, frame: bytes) -> None:
        """The runner sends a frame."""
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


async def settle(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0)


async def nothing_more_happens() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


# Runners of one request each.


@on_loop
async def test_a_pool_starts_full() -> None:
    async with a_zygote() as zygote:
        await Fresh(zygote.fork, 3).start()
        assert len(zygote.runners) == 3


@on_loop
async def test_runners_start_one_after_the_other() -> None:
    async with a_zygote() as zygote:
        zygote.mute = True
        starting = asyncio.create_task(Fresh(zygote.fork, 3).start())
        for count in (1, 2, 3):
            await settle(lambda count=count: len(zygote.runners) == count)
            await nothing_more_happens()
            assert len(zygote.runners) == count
            assert not starting.done()
            zygote.ends[-1].sendall(IDLE)
        await starting
        assert len(zygote.runners) == 3


@on_loop
async def test_those_who_wait_longest_are_first() -> None:
    async with a_zygote() as zygote:
        pool = Fresh(zygote.fork, 3)
        await pool.start()
        assert [await pool.take("") for _ in range(3)] == zygote.runners
        assert len(zygote.runners) == 3


@on_loop
async def test_a_runner_is_used_once() -> None:
    async with a_zygote() as zygote:
        pool = Fresh(zygote.fork, 2)
        await pool.start()
        taken = []
        for _ in range(20):
            taken.append(await pool.take(""))
            pool.give_back(taken[-1], answered=True)
        assert len(set(taken)) == 20


@on_loop
async def test_a_pool_is_filled_after_the_request() -> None:
    async with a_zygote() as zygote:
        pool = Fresh(zygote.fork, 2)
        await pool.start()
        runner = await pool.take("")
        await nothing_more_happens()
        # It would warm up on the cores of the request.
        assert len(zygote.runners) == 2
        pool.give_back(runner, answered=True)
        await settle(lambda: len(zygote.runners) == 3)
        await nothing_more_happens()
        assert len(zygote.runners) == 3


@on_loop
async def test_a_pool_keeps_its_size() -> None:
    async with a_zygote() as zygote:
        pool = Fresh(zygote.fork, 2)
        await pool.start()
        for count in range(3, 10):
            pool.give_back(await pool.take(""), answered=True)
            await settle(lambda count=count: len(zygote.runners) == count)
            await nothing_more_happens()
            assert len(zygote.runners) == count


@on_loop
async def test_requests_in_a_hurry_fill_it_once() -> None:
    async with a_zygote() as zygote:
        pool = Fresh(zygote.fork, 2)
        await pool.start()
        zygote.mute = True
        taken = [await pool.take(""), await pool.take("")]
        for runner in taken:
            pool.give_back(runner, answered=True)
        for count in (3, 4):
            await settle(lambda count=count: len(zygote.runners) == count)
            await nothing_more_happens()
            assert len(zygote.runners) == count
            zygote.ends[-1].sendall(IDLE)
        await nothing_more_happens()
        assert len(zygote.runners) == 4
        assert [await pool.take(""), await pool.take("")] == zygote.runners[2:]


@on_loop
async def test_what_is_given_back_ends() -> None:
    async with a_zygote() as zygote:
        zygote.real = True
        pool = Fresh(zygote.fork, 1)
        await pool.start()
        runner = await pool.take("")
        assert zygote.processes[0].poll() is None
        pool.give_back(runner, answered=True)
        assert await asyncio.to_thread(zygote.processes[0].wait, 5) == -signal.SIGKILL
        await settle(lambda: len(zygote.runners) == 2)
        assert zygote.processes[1].poll() is None


@on_loop
async def test_what_is_given_back_before_its_number_is_known_ends_with_it() -> None:
    async with a_zygote() as zygote:
        pool = Fresh(zygote.fork, 1)
        await pool.start()
        runner = await pool.take("")
        pool.give_back(runner, answered=True)
        with a_process() as process:
            runner.forked(process.pid)
            assert await asyncio.to_thread(process.wait, 5) == -signal.SIGKILL


@on_loop
async def test_who_ended_while_waiting_is_passed_over() -> None:
    async with a_zygote() as zygote:
        pool = Fresh(zygote.fork, 3)
        await pool.start()
        zygote.end(zygote.runners[0])
        zygote.end(zygote.runners[1])
        assert await pool.take("") is zygote.runners[2]
        assert len(zygote.runners) == 3


@on_loop
async def test_where_all_have_ended_another_is_made() -> None:
    async with a_zygote() as zygote:
        pool = Fresh(zygote.fork, 2)
        await pool.start()
        for runner in list(zygote.runners):
            zygote.end(runner)
        taken = await pool.take("")
        assert taken is zygote.runners[2]
        assert taken.alive


@on_loop
async def test_those_that_ended_while_waiting_are_replaced() -> None:
    async with a_zygote() as zygote:
        pool = Fresh(zygote.fork, 3)
        await pool.start()
        runner = await pool.take("")
        for waiting in zygote.runners[1:]:
            zygote.end(waiting)
        pool.give_back(runner, answered=True)
        # Three that live wait for the next three requests.
        await settle(lambda: len(zygote.runners) == 6)
        await nothing_more_happens()
        assert [await pool.take("") for _ in range(3)] == zygote.runners[3:6]


@on_loop
async def test_an_empty_pool_has_one_made() -> None:
    async with a_zygote() as zygote:
        pool = Fresh(zygote.fork, 1)
        await pool.start()
        await pool.take("")
        zygote.mute = True
        taking = asyncio.create_task(pool.take(""))
        await settle(lambda: len(zygote.runners) == 2)
        await nothing_more_happens()
        assert not taking.done()
        zygote.ends[1].sendall(IDLE)
        assert await taking is zygote.runners[1]


@on_loop
async def test_a_pool_that_was_never_started() -> None:
    async with a_zygote() as zygote:
        assert await Fresh(zygote.fork, 2).take("") is zygote.runners[0]


@on_loop
async def test_who_takes_while_it_is_filled_gets_one_of_its_own() -> None:
    async with a_zygote() as zygote:
        pool = Fresh(zygote.fork, 1)
        await pool.start()
        zygote.mute = True
        pool.give_back(await pool.take(""), answered=True)
        await settle(lambda: len(zygote.runners) == 2)
        taking = asyncio.create_task(pool.take(""))
        await settle(lambda: len(zygote.runners) == 3)
        for end in zygote.ends[1:]:
            end.sendall(IDLE)
        taken = await taking
        await nothing_more_happens()
        other = await pool.take("")
        assert taken is not other
        assert len({taken, other}) == 2


# Runners that cannot be.


@on_loop
async def test_why_one_failed_is_told() -> None:
    async with a_zygote() as zygote:
        zygote.mute = True
        starting = asyncio.create_task(Fresh(zygote.fork, 2).start())
        await settle(lambda: len(zygote.ends) == 1)
        reason = "ConfinementError: no Landlock \N{SNOWMAN}".encode()
        zygote.ends[0].sendall(pack({"kind": "failed"}, len(reason)) + reason)
        with pytest.raises(RunnerError, match="ConfinementError: no Landlock \N{SNOWMAN}"):
            await starting


@on_loop
async def test_one_that_ends_before_it_is_ready() -> None:
    async with a_zygote() as zygote:
        zygote.mute = True
        taking = asyncio.create_task(Fresh(zygote.fork, 2).take(""))
        await settle(lambda: len(zygote.ends) == 1)
        zygote.ends[0].close()
        with pytest.raises(RunnerError, match="ended before it was ready"):
            await taking


@on_loop
async def test_one_that_ends_in_the_middle_of_its_first_word() -> None:
    async with a_zygote() as zygote:
        zygote.first_words = IDLE[:-3]
        taking = asyncio.create_task(Fresh(zygote.fork, 2).take(""))
        await settle(lambda: len(zygote.ends) == 1)
        zygote.ends[0].close()
        with pytest.raises(RunnerError):
            await taking


@on_loop
async def test_a_pool_that_could_not_be_filled_is_filled_after_the_next_request() -> None:
    async with a_zygote() as zygote:
        pool = Fresh(zygote.fork, 2)
        await pool.start()
        zygote.first_words = pack({"kind": "failed"})
        pool.give_back(await pool.take(""), answered=True)
        await settle(lambda: len(zygote.runners) == 3)
        await nothing_more_happens()
        zygote.first_words = IDLE
        pool.give_back(await pool.take(""), answered=True)
        await settle(lambda: len(zygote.runners) == 5)
        await nothing_more_happens()
        assert [await pool.take(""), await pool.take("")] == zygote.runners[3:]


@on_loop
async def test_one_that_failed_is_left_to_nobody() -> None:
    async with a_zygote() as zygote:
        zygote.real = True
        zygote.first_words = pack({"kind": "failed"})
        with pytest.raises(RunnerError):
            await Fresh(zygote.fork, 1).take("")
        assert await asyncio.to_thread(zygote.processes[0].wait, 2) == -signal.SIGKILL


@on_loop
async def test_one_nobody_waits_for_any_more_is_left_to_nobody() -> None:
    async with a_zygote() as zygote:
        zygote.real = zygote.mute = True
        taking = asyncio.create_task(Fresh(zygote.fork, 1).take(""))
        await settle(lambda: len(zygote.processes) == 1)
        await nothing_more_happens()
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        assert await asyncio.to_thread(zygote.processes[0].wait, 2) == -signal.SIGKILL


@pytest.mark.parametrize("kind", [Fresh, Kept])
@on_loop
async def test_without_its_zygote_there_is_none(kind: type[Fresh] | type[Kept]) -> None:
    async with a_zygote() as zygote:
        pool: Runners = Fresh(zygote.fork, 1) if kind is Fresh else Kept(zygote.fork)
        await pool.start()
        taken = await pool.take("")
        zygote.gone = True
        pool.give_back(taken, answered=True)
        for runner in zygote.runners:
            if runner.alive:
                zygote.end(runner)
        await nothing_more_happens()
        with pytest.raises(ModelProcessError, match="the model process ended"):
            await pool.take("")


# The runner that is kept.


@on_loop
async def test_one_is_kept_and_one_is_spare() -> None:
    async with a_zygote() as zygote:
        pool = Kept(zygote.fork)
        await pool.start()
        assert len(zygote.runners) == 2
        for _ in range(5):
            runner = await pool.take("")
            assert runner is zygote.runners[0]
            pool.give_back(runner, answered=True)
        assert runner.alive
        assert len(zygote.runners) == 2


@on_loop
async def test_the_spare_is_not_forked_before_the_first_is_ready() -> None:
    async with a_zygote() as zygote:
        zygote.mute = True
        starting = asyncio.create_task(Kept(zygote.fork).start())
        await settle(lambda: len(zygote.runners) == 1)
        await nothing_more_happens()
        assert len(zygote.runners) == 1
        zygote.ends[0].sendall(IDLE)
        # It is not waited for.
        await starting
        assert len(zygote.runners) == 2


@on_loop
async def test_the_spare_takes_the_place_of_one_that_ended() -> None:
    async with a_zygote() as zygote:
        pool = Kept(zygote.fork)
        await pool.start()
        zygote.end(await pool.take(""))
        assert await pool.take("") is zygote.runners[1]
        assert len(zygote.runners) == 3
        zygote.end(zygote.runners[2])
        assert await pool.take("") is zygote.runners[1]
        assert len(zygote.runners) == 4


@on_loop
async def test_where_both_ended_two_are_forked() -> None:
    async with a_zygote() as zygote:
        pool = Kept(zygote.fork)
        await pool.start()
        for runner in list(zygote.runners):
            zygote.end(runner)
        assert await pool.take("") is zygote.runners[2]
        assert len(zygote.runners) == 4


@on_loop
async def test_one_is_kept_though_it_was_never_started() -> None:
    async with a_zygote() as zygote:
        assert await Kept(zygote.fork).take("") is zygote.runners[0]
        assert len(zygote.runners) == 2


@on_loop
async def test_why_the_kept_one_failed_is_told() -> None:
    async with a_zygote() as zygote:
        zygote.first_words = pack({"kind": "failed"}, 3) + b"why"
        with pytest.raises(RunnerError, match=r"^why$"):
            await Kept(zygote.fork).start()


# Runners that one key keeps.


@st.composite
def visits(draw: st.DrawFn) -> list[tuple[str, str]]:
    """Users in any order, and how each one's request ends."""
    ends = st.sampled_from(["reset", "reset", "reset", "spent", "no answer", "killed", "ended"])
    return draw(st.lists(st.tuples(st.sampled_from(["", "ada", "bob", "eve"]), ends), max_size=30))


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(visits=visits(), most=st.integers(1, 5))
def test_a_runner_never_serves_two_keys(visits: list[tuple[str, str]], most: int) -> None:
    asyncio.run(_serve_them_all(visits, most))


async def _serve_them_all(visits: list[tuple[str, str]], most: int) -> None:
    async with a_zygote() as zygote:
        zygote.reaping = True
        pool = PerUser(Fresh(zygote.fork, 2), 60, most)
        await pool.start()
        served: dict[Runner, list[str]] = {}
        ended: set[Runner] = set()
        last: tuple[Runner, str] | None = None
        for key, end in visits:
            runner = await pool.take(key)
            assert runner not in ended
            assert runner.alive
            of = served.setdefault(runner, [])
            of.append(key)
            # It serves on for who it served, as long as it may, and for nobody else.
            assert set(of) == {key}
            assert len(of) <= (most if key else 1)
            if last is not None and last[1] == key and last[0] not in ended:
                assert (runner is last[0]) is (len(served[last[0]]) - (runner is last[0]) < most)
            if end == "spent":
                zygote.says(runner, pack({"kind": "spent"}))
            elif end == "reset":
                zygote.says(runner, IDLE)
            elif end == "killed":
                runner.kill()
            elif end == "ended":
                zygote.end(runner)
            pool.give_back(runner, answered=end in ("reset", "spent"))
            if end != "reset" or not key or len(of) == most:
                ended.add(runner)
                await pool.idle()
            last = runner, key
        await pool.empty()


async def taken_and_reset(zygote: Zygote, pool: PerUser, key: str) -> Runner:
    """A runner after a request that it was reset from."""
    runner = await pool.take(key)
    zygote.says(runner, IDLE)
    pool.give_back(runner, answered=True)
    assert await pool.idle()
    return runner


@on_loop
async def test_the_next_key_waits_until_the_last_ones_process_is_gone() -> None:
    async with a_zygote() as zygote:
        pool = PerUser(Fresh(zygote.fork, 2), 60, 10)
        await pool.start()
        runner = await taken_and_reset(zygote, pool, "ada")
        taking = asyncio.create_task(pool.take("bob"))
        await nothing_more_happens()
        assert not taking.done()
        zygote.end(runner)
        assert await taking is not runner


@on_loop
async def test_the_next_request_waits_for_the_reset() -> None:
    async with a_zygote() as zygote:
        pool = PerUser(Fresh(zygote.fork, 2), 60, 10)
        await pool.start()
        runner = await pool.take("ada")
        pool.give_back(runner, answered=True)
        taking = asyncio.create_task(pool.take("ada"))
        await nothing_more_happens()
        assert not taking.done()
        zygote.says(runner, IDLE)
        assert await taking is runner


@on_loop
async def test_what_a_runner_says_instead_of_being_reset_ends_it() -> None:
    async with a_zygote() as zygote:
        pool = PerUser(Fresh(zygote.fork, 2), 60, 10)
        await pool.start()
        runner = await pool.take("ada")
        zygote.says(runner, pack({"kind": "log"}))
        pool.give_back(runner, answered=True)
        assert not await pool.idle()
        zygote.end(runner)
        assert await pool.take("ada") is not runner


@on_loop
async def test_a_process_that_waits_for_its_user_is_stopped() -> None:
    async with a_zygote() as zygote:
        zygote.real = True
        pool = PerUser(Fresh(zygote.fork, 1), 60, 10)
        await pool.start()

        def state() -> str:
            pid = zygote.processes[0].pid
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

        await taken_and_reset(zygote, pool, "ada")
        await settle(lambda: state() == "T")
        await pool.take("ada")
        await settle(lambda: state() == "S")


@on_loop
async def test_who_idles_is_ended() -> None:
    async with a_zygote() as zygote:
        zygote.real = True
        pool = PerUser(Fresh(zygote.fork, 1), 0.05, 10)
        await pool.start()
        await taken_and_reset(zygote, pool, "ada")
        assert await asyncio.to_thread(zygote.processes[0].wait, 5) == -signal.SIGKILL
        assert not await pool.idle()
        # Another waits in its place.
        await settle(lambda: len(zygote.runners) == 2)
