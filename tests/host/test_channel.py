"""Frames of a channel arrive whole and in order, independent of the timing of writes and reads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import threading
import time
from pathlib import Path

import pytest

from ndif.host.channel import AsyncFrameChannel
from ndif.runtime.frames import FrameChannel as BlockingChannel
from ndif.runtime.frames import pack
from ndif.runtime.messages import Signal, Spill
from ndif.schema.payload import PayloadFile
from tests.on_loop import Play, play
from tests.waiting import time_passes, time_passes_async

__all__ = ["play"]

SOON_S = 0.05


@pytest.mark.parametrize("seed", range(8))
def test_frames_of_all_sizes_arrive_whole_and_in_order(play: Play, seed: int) -> None:
    dice = random.Random(seed)
    bodies = [dice.randbytes(dice.choice((0, 1, 50, 3000, 4096, 5000, 90_000))) for _ in range(60)]
    content = b"".join(pack(Spill(n), len(body)) + body for n, body in enumerate(bodies))

    def write(theirs: socket.socket) -> None:
        at = 0
        while at < len(content):
            size = dice.choice((1, 7, 100, 4096, 10_000, 200_000))
            theirs.sendall(content[at : at + size])
            at += size
            if not dice.randrange(4):
                time_passes(dice.choice((0.0, 0.0005, 0.002)))

    async def scene() -> None:
        ours, theirs = AsyncFrameChannel.pair()
        writing = threading.Thread(target=write, args=(theirs,))
        writing.start()
        waits = random.Random(seed + 1000)
        for n, body in enumerate(bodies):
            if not waits.randrange(3):
                await time_passes_async(waits.choice((0.0, 0.001, 0.004)))
            assert await ours.receive(lambda _: 1 << 20) == (Spill(n), body)
        writing.join()
        theirs.close()
        with pytest.raises(EOFError):
            await ours.receive(lambda _: 0)
        ours.close()

    play(scene)


def test_body_is_read_from_its_file_and_missing_file_closes_channel(
    play: Play, tmp_path: Path
) -> None:
    content = random.Random(0).randbytes(3_500_000)

    async def scene() -> None:
        for is_lost in (False, True):
            file = PayloadFile.create(tmp_path)
            file.append(content)
            ours, theirs = AsyncFrameChannel.pair()
            reading = asyncio.create_task(asyncio.to_thread(BlockingChannel(theirs).receive))
            if is_lost:
                file.discard()
                with pytest.raises(FileNotFoundError):
                    await ours.send(Signal.UPLOAD, file)
                with pytest.raises(EOFError):
                    await reading
            else:
                # A second frame is not taken for the first one's body.
                await ours.send(Signal.UPLOAD, file)
                await ours.send(Signal.FILE, b"small")
                assert await reading == (Signal.UPLOAD, content, ())
                assert BlockingChannel(theirs).receive() == (Signal.FILE, b"small", [])
            ours.close()
            theirs.close()

    play(scene)


def test_truncated_file_closes_channel(play: Play, tmp_path: Path) -> None:
    async def scene() -> None:
        file = PayloadFile.create(tmp_path)
        file.append(bytes(2 << 20))
        os.truncate(file.path, 1 << 20)
        ours, theirs = AsyncFrameChannel.pair()
        with contextlib.closing(ours), theirs:
            await ours.send(Signal.UPLOAD, file)
            with pytest.raises(EOFError, match="cut off"):
                BlockingChannel(theirs).receive()

    play(scene)


def test_unread_frames_block_their_writer(play: Play) -> None:
    async def scene() -> None:
        ours, theirs = AsyncFrameChannel.pair()
        theirs.setblocking(False)
        reading = asyncio.create_task(ours.receive(lambda _: 0))
        theirs.send(pack(Spill(0), 0))
        assert await reading == (Spill(0), b"")
        frame = pack(Spill(1), 1000) + bytes(1000)
        written = 0
        for _ in range(5):
            try:
                while True:
                    written += theirs.send(frame)
            except BlockingIOError:
                await time_passes_async(SOON_S)
        # The reader takes no more than a socket holds, though the event loop had time for many reads.
        assert written < 5_000_000
        began = time.process_time()
        await time_passes_async(5 * SOON_S)
        assert time.process_time() - began < SOON_S, "it is busy with what nobody reads"
        assert await ours.receive(lambda _: 1000) == (Spill(1), bytes(1000))
        ours.close()

    play(scene)


def test_cancelled_read_loses_no_frame(play: Play) -> None:
    async def scene() -> None:
        ours, theirs = AsyncFrameChannel.pair()
        for n in range(20):
            reading = asyncio.create_task(ours.receive(lambda _: 0))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait([reading])
            theirs.sendall(pack(Spill(n), 0))
            await asyncio.sleep(0)
            assert await ours.receive(lambda _: 0) == (Spill(n), b"")
        ours.close()

    play(scene)


def test_peer_that_closes_with_unread_data_is_detected(play: Play) -> None:
    async def scene() -> None:
        ours, theirs = AsyncFrameChannel.pair()
        theirs.sendall(pack(Signal.UPLOAD, 0) + pack(Signal.FILE, 9000) + bytes(9000))
        await ours.send(Signal.PING)
        theirs.close()
        assert await ours.receive(lambda _: 0) == (Signal.UPLOAD, b"")
        assert await ours.receive(lambda _: 9000) == (Signal.FILE, bytes(9000))
        for _ in range(2):
            with pytest.raises(EOFError):
                await ours.receive(lambda _: 0)
        ours.close()

    play(scene)


def test_hang_up_ends_pending_and_later_reads(play: Play) -> None:
    async def scene() -> None:
        ours, theirs = AsyncFrameChannel.pair()
        reading = asyncio.create_task(ours.receive(lambda _: 0))
        await asyncio.sleep(0)
        ours.hang_up()
        with pytest.raises(EOFError):
            await reading
        with pytest.raises(EOFError):
            await ours.receive(lambda _: 0)
        ours.close()
        theirs.close()

    play(scene)
