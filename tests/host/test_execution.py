"""The limits of the host, against a runner that speaks the protocol itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import zstandard

from ndif.config.settings import Settings
from ndif.host.channel import AsyncFrameChannel
from ndif.host.execution import Execution
from ndif.host.request_run import RequestRun, RunTools
from ndif.host.runner_handle import RunnerHandle
from ndif.runtime.frames import LENGTHS, FrameChannel
from ndif.runtime.messages import Error, Returned, RunReport, Signal, Spill, Spilled
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.request import Request, Wire
from ndif.schema.response import InlineResult, Response, StoredResult
from ndif.schema.status import Status
from ndif.stores.broker import MemoryBroker
from ndif.stores.memory import total_memory
from ndif.stores.objects import FileStore, Upload
from ndif.stores.objects.s3 import S3Store, S3Upload
from ndif.telemetry.steps import Steps, recording
from tests.on_loop import on_loop

MIB = 1 << 20
TIER = MIB
"""Bytes of the largest result of the key."""
SETTINGS = Settings(max_result_bytes=64 * MIB, max_inline_result_bytes=8 * MIB)
HONEST = RunReport(1, ())
HOUR_S = 3600.0
REQUEST = Request(
    *(DeploymentConfig("test/model", "").key, "0.8", Wire.ENVELOPE, b"", False, "http://here"),
    subscription_id="me",
    trusted=False,
    key="key",
    max_result_bytes=TIER,
)
POLLED = replace(REQUEST, subscription_id=None)
HYBRID = replace(REQUEST, wire=Wire.HEADERS)

Script = Callable[[FrameChannel], None]
"""The frames of a runner after it got its request."""


class MemoryFiles(FileStore):
    """A store whose uploads are memory files, as on S3."""

    async def create_for(self, size: int) -> Upload:  # type: ignore[override]
        return S3Upload(cast(S3Store, self), size)


@dataclass
class Clock:
    """The clocks of the host, which a script sets."""

    now: float = 1000.0

    def time(self) -> float:
        return self.now

    perf_counter = time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("ndif.host.execution.time", clock)
    return clock


@pytest.fixture(params=[FileStore, MemoryFiles])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> FileStore:
    """A store whose uploads are files of a disk, or of memory."""
    return cast(FileStore, request.param(tmp_path, HOUR_S))


@dataclass
class HostileRunners:
    """Runners that send the frames of a script each; a part of `ReplicaRunners`."""

    scripts: list[Script]
    unavailable: str = ""
    playing: list[asyncio.Task[None]] = field(default_factory=list)

    async def acquire(self, _: Request, __: asyncio.Future[str]) -> RunnerHandle:
        channel, theirs = AsyncFrameChannel.pair()
        runner = RunnerHandle("hostile", channel)
        self.playing.append(asyncio.create_task(self._play(runner, theirs, self.scripts.pop(0))))
        return runner

    async def _play(self, runner: RunnerHandle, theirs: socket.socket, script: Script) -> None:
        theirs.setblocking(True)
        await asyncio.to_thread(_play, theirs, script)
        runner.exited(0)

    def release(self, runner: RunnerHandle, *, trusted: bool, answered: bool) -> None:
        runner.kill()


def _play(theirs: socket.socket, script: Script) -> None:
    with theirs, contextlib.suppress(OSError, EOFError):
        channel = FrameChannel(theirs)
        channel.receive()
        script(channel)


class Process:
    """The part of a `ModelProcess` that a run on the CPU reads."""

    exposes_weights = False
    pid = None
    ended = asyncio.Event()


async def run(
    *scripts: Script,
    request: Request = REQUEST,
    objects: FileStore | None = None,
    sent: list[Response] | None = None,
) -> Response:
    """Return the response to a request on runners with these scripts; `sent` gets its updates."""
    runners = HostileRunners([*scripts])
    execution = Execution(SETTINGS, MemoryBroker(), cast(FileStore, objects))
    # A runner without a process id is watched by nothing, and the request names no adapter.
    parts: Any = (Process(), runners, execution, None, None, None)
    updates: list[Response] = [] if sent is None else sent

    async def respond(update: Response) -> bool:
        updates.append(update)
        return True

    response = await RequestRun(RunTools(*parts), {}, HOUR_S).run(request, respond)
    await asyncio.gather(*runners.playing)
    return response


def running(channel: FrameChannel) -> None:
    channel.send(Signal.RUNNING)


def returns(body: bytes, report: RunReport = HONEST, *, compressed: bool = False) -> Script:
    def script(channel: FrameChannel) -> None:
        running(channel)
        channel.send(Returned(compressed, report), body)

    return script


def writes(content: Callable[[int], object], announced: int = 1) -> Script:
    """Return a script that announces a result and fills its file with `content`."""

    def script(channel: FrameChannel) -> None:
        running(channel)
        channel.send(Spill(announced))
        _, _, fds = channel.receive()
        content(fds[0])
        os.close(fds[0])
        channel.send(Spilled(HONEST))

    return script


def says(header: str) -> Script:
    """Return a script that ends with a header of its own."""

    def script(channel: FrameChannel) -> None:
        running(channel)
        text = header.encode()
        channel.socket.sendall(LENGTHS.pack(len(text), 0) + text)

    return script


def of_size(size: int) -> Callable[[int], object]:
    return lambda fd: os.ftruncate(fd, size)


def left_over(objects: FileStore) -> list[Path]:
    """Return the results and the uploads of a store."""
    return [*objects.root.glob("results/*"), *objects.root.glob(".ndif-part-*")]


def refused(response: Response, reason: str) -> bool:
    return response.status is Status.ERROR and reason in response.description


# The size of a result


@pytest.mark.parametrize("request_", [REQUEST, POLLED], ids=["live", "polled"])
@on_loop
async def test_result_frame_over_limit_of_key_is_refused(request_: Request, tmp_path: Path) -> None:
    objects = FileStore(tmp_path, HOUR_S)
    response = await run(returns(bytes(7 * MIB)), request=request_, objects=objects)
    assert refused(response, "a frame of 7340032 bytes is over the limit of its kind")
    assert left_over(objects) == []


@on_loop
async def test_result_frame_over_inline_limit_is_refused() -> None:
    request = replace(REQUEST, max_result_bytes=None)
    response = await run(returns(bytes(9 * MIB)), request=request)
    assert refused(response, "is over the limit of its kind")


@on_loop
async def test_incompressible_result_at_limit_of_key_is_returned() -> None:
    body = zstandard.compress(os.urandom(TIER))
    assert len(body) > TIER
    response = await run(returns(body, compressed=True))
    assert response.data == InlineResult(body, True)
    assert response.result_bytes == len(body)


@pytest.mark.parametrize("request_", [REQUEST, POLLED], ids=["live", "polled"])
@on_loop
async def test_result_file_over_limit_of_key_is_refused(
    request_: Request, store: FileStore
) -> None:
    response = await run(writes(of_size(60 * MIB)), request=request_, objects=store)
    assert refused(response, "its result takes 60MiB, more than 1MiB")
    assert refused(response, "NDIF_MAX_RESULT_BYTES, or a limit of your API key")
    assert left_over(store) == []


@on_loop
async def test_result_file_over_limit_of_trusted_key_is_refused(store: FileStore) -> None:
    request = replace(REQUEST, trusted=True)
    response = await run(writes(of_size(60 * MIB)), request=request, objects=store)
    assert refused(response, "its result takes 60MiB")
    assert left_over(store) == []


@on_loop
async def test_limit_of_server_holds_for_key_with_larger_limit(store: FileStore) -> None:
    request = replace(REQUEST, max_result_bytes=1 << 40)
    response = await run(writes(of_size(65 * MIB)), request=request, objects=store)
    assert refused(response, "its result takes 65MiB, more than 64")


@on_loop
async def test_announced_size_over_limit_of_key_is_refused(store: FileStore) -> None:
    # The store would keep memory for the result.
    response = await run(writes(of_size(1), announced=(1 << 63) - 1), objects=store)
    assert refused(response, "its result takes 8EiB, more than 1MiB")
    assert left_over(store) == []


@on_loop
async def test_result_file_at_limit_of_key_is_stored_with_its_measured_size(
    store: FileStore,
) -> None:
    body = zstandard.compress(os.urandom(TIER))
    response = await run(writes(lambda fd: os.write(fd, body)), objects=store)
    assert response.status is Status.COMPLETED, response.description
    assert isinstance(response.data, StoredResult)
    assert response.data.size == response.result_bytes == len(body)
    assert await store.get(f"results/{REQUEST.id}.pt") == body


@on_loop
async def test_streamed_values_over_limit_of_key_are_not_sent() -> None:
    def script(channel: FrameChannel) -> None:
        running(channel)
        for _ in range(3):
            channel.send(Signal.STREAM, bytes(TIER // 2))

    sent: list[Response] = []
    response = await run(script, request=HYBRID, sent=sent)
    assert refused(response, "sent its client more than 1MiB")
    assert response.limit == "streamed"
    streamed = [update.data for update in sent if update.status is Status.STREAM]
    assert [len(cast(bytes, data)) for data in streamed] == [TIER // 2] * 2


# The numbers of a report


@pytest.mark.parametrize("number", ["-1", "NaN", "Infinity", "1e308", "1e400", str(1 << 63)])
@pytest.mark.parametrize(
    "header",
    [
        '{"kind": "error", "report": {"peak_memory": %s, "steps": []}}',
        '{"kind": "spill", "size": %s}',
    ],
    ids=["cost", "size"],
)
@on_loop
async def test_number_that_is_no_size_ends_runner(header: str, number: str) -> None:
    response = await run(says(header % number))
    assert refused(response, "The runner broke its protocol and was ended")


@on_loop
async def test_reported_memory_is_at_most_memory_of_machine() -> None:
    report = RunReport((1 << 63) - 1, ())
    assert (await run(returns(b"", report))).peak_memory == total_memory()


@pytest.mark.parametrize("time", [-1e308, -1.0, 1e12, 1e308])
@on_loop
async def test_reported_times_are_cut_to_run(time: float, clock: Clock) -> None:
    steps = [{"name": "execute", "start": time, "end": 1e308}]
    report = json.dumps({"kind": "error", "report": {"peak_memory": 1, "steps": steps}})

    def script(channel: FrameChannel) -> None:
        clock.now += 2.0
        says(report)(channel)

    recorded = Steps(REQUEST, "queue")
    with recording(recorded):
        response = await run(script)
    assert response.status is Status.ERROR
    [step] = [step for step in recorded.all if step.name == "execute"]
    assert 1000.0 <= step.start <= step.end <= clock.now
    assert response.execution_s == 2.0


# The time of a run


def works(clock: Clock, seconds: float, *last: Signal) -> Script:
    """Return a script that takes time before it sends its signals and ends."""

    def script(channel: FrameChannel) -> None:
        clock.now += seconds
        for signal in last:
            channel.send(signal)

    return script


@on_loop
async def test_time_before_running_frame_of_untrusted_runner_is_charged(clock: Clock) -> None:
    def script(channel: FrameChannel) -> None:
        clock.now += HOUR_S
        returns(b"")(channel)

    assert (await run(script)).execution_s == HOUR_S
    assert (await run(script, request=replace(REQUEST, trusted=True))).execution_s < HOUR_S


@on_loop
async def test_time_of_runner_that_ends_without_running_frame_is_charged(clock: Clock) -> None:
    def answers(channel: FrameChannel) -> None:
        running(channel)
        clock.now += 3.0
        channel.send(Error(HONEST), b"the end")

    response = await run(works(clock, HOUR_S), works(clock, HOUR_S), answers)
    assert response.description == "the end"
    assert response.execution_s == 2 * HOUR_S + 3.0


@on_loop
async def test_time_of_crashed_untrusted_runner_is_charged(clock: Clock) -> None:
    response = await run(works(clock, HOUR_S, Signal.RUNNING))
    assert refused(response, "before the block was done")
    assert response.execution_s == HOUR_S
