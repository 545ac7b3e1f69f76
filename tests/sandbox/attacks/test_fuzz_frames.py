"""Fuzzed bytes from a runner: the host stops reading, and holds no more bytes than its limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndif.host.channel import AsyncFrameChannel, ProtocolError
from ndif.host.runner_handle import RunnerHandle
from ndif.runtime.frames import LENGTHS, pack
from ndif.runtime.messages import (
    Error,
    Exited,
    InlineAnswer,
    Message,
    Returned,
    RunReport,
    RunStep,
    SharedRunResults,
    Signal,
    Spill,
    Spilled,
)
from tests.waiting import PATIENCE_S

MAX_BODY = 1 << 16
MAX_HEADER = 1 << 20

SIGNALS = [signal.value for signal in Signal]
KINDS = st.sampled_from(
    [*SIGNALS, "returned", "error", "spill", "spilled", "shared run results", "exited", "ready"]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["\ud800", "\0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "kind": KINDS | VALUES,
        "report": st.fixed_dictionaries({"peak_memory": VALUES, "steps": VALUES}) | VALUES,
        "compressed": VALUES,
        "size": VALUES,
        "runner": VALUES,
    },
)
REPORT = RunReport(1 << 40, (RunStep("prepare", 10.0, 10.5),))
MESSAGES: list[Message] = [
    *Signal,
    Spill(1),
    Spilled(REPORT),
    Returned(True, REPORT),
    Error(REPORT, ends=True),
    SharedRunResults((None, InlineAnswer(1, False)), REPORT),
    Exited("runner", -9),
]
FRAMES = st.builds(
    lambda header, body: _raw(json.dumps(header).encode(), body), HEADERS, st.binary(max_size=2000)
)
LYING = st.builds(
    lambda header, body, rest: LENGTHS.pack(header, body) + rest,
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=200),
)
DEEP = st.builds(
    lambda depth, opening: _raw(opening * depth),
    st.integers(1, 100_000),
    st.sampled_from([b"[", b'{"a":', b'{"kind": [', b"[[[]"]),
)


def _raw(header: bytes, body: bytes = b"") -> bytes:
    return LENGTHS.pack(len(header), len(body)) + header + body


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Return valid frames with bytes changed, removed or inserted."""
    content = bytearray(b"".join(draw(st.lists(FRAMES, min_size=1, max_size=4))))
    for _ in range(draw(st.integers(0, 8))):
        at = draw(st.integers(0, max(len(content) - 1, 0)))
        match draw(st.integers(0, 2)):
            case 0:
                content[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case 1:
                del content[at : at + draw(st.integers(1, 40))]
            case _:
                content[at:at] = draw(st.binary(max_size=40))
    return bytes(content)


SENT = st.one_of(st.binary(max_size=4000), mutated(), LYING, DEEP)


async def _received(sent: bytes, pieces: int) -> list[Message]:
    """Return the frames that the host reads from these bytes and the end of the stream."""
    channel, theirs = AsyncFrameChannel.pair()
    runner = RunnerHandle("fake", channel)
    received = []

    async def send() -> None:
        loop = asyncio.get_running_loop()
        theirs.setblocking(False)
        step = len(sent) // pieces + 1
        # The host closes the channel at the first breach.
        with contextlib.suppress(OSError):
            for start in range(0, len(sent), step):
                await loop.sock_sendall(theirs, sent[start : start + step])
            theirs.shutdown(socket.SHUT_WR)

    sending = asyncio.create_task(send())
    try:
        async for message, body in runner.frames(lambda _: MAX_BODY):
            assert len(body) <= MAX_BODY
            pack(message)
            received.append(message)
    except ProtocolError:
        pass  # an end like any other
    finally:
        channel.close()
        await sending
        theirs.close()
    return received


def _end(sent: bytes, pieces: int = 1) -> list[Message]:
    return asyncio.run(asyncio.wait_for(_received(sent, pieces), PATIENCE_S))


@given(SENT, st.integers(1, 5))
def test_reading_any_bytes_ends(sent: bytes, pieces: int) -> None:
    _end(sent, pieces)


@given(
    st.lists(st.tuples(st.sampled_from(MESSAGES), st.binary(max_size=100)), max_size=20),
    st.integers(1, 20),
)
def test_valid_frames_are_received_whole(frames: list[tuple[Message, bytes]], pieces: int) -> None:
    sent = b"".join(pack(message, len(body)) + body for message, body in frames)
    assert _end(sent, pieces) == [message for message, _ in frames]


@pytest.mark.parametrize("header", [0, 1, MAX_HEADER, MAX_HEADER + 1, 2**32 - 1])
@pytest.mark.parametrize("body", [0, MAX_BODY, MAX_BODY + 1, 2**40, 2**64 - 1])
def test_claimed_frame_length_does_not_exceed_hosts_memory_limit(header: int, body: int) -> None:
    tracemalloc.start()
    try:
        _end(LENGTHS.pack(header, body) + b'{"kind": "log"}')
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * (MAX_HEADER + MAX_BODY)
