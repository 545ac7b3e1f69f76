"""A runner, as its host sees it: a channel, a process id, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from ndif.host.channel import Channel
from ndif.runtime.frames import Header
from ndif.tasks import within

T = TypeVar("T")


_MAX_REASON = 1 << 16


class RunnerError(Exception):
    """A runner could not start; the message says why."""


class Runner:
    """One process that runs requests."""

    def __init__(self, runner_id: str, channel: Channel) -> None:
        self.id = runner_id
        self._pid: int | None = None
        self._doomed = False
        self._channel = channel
        self._exit: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        """Whether it has not ended, as far as the zygote has said."""
        return not self._exit.done()

    @property
    def usable(self) -> bool:
        """Return True if the process is there and nobody has asked for its end."""
        return self.alive and not self._doomed

    def forked(self, pid: int) -> None:
        """The zygote's word that it runs, as process `pid`."""
        self._pid = pid
        if self._doomed:
            self.kill()

    def exited(self, code: int | None) -> None:
        """The zygote's word that it ended; None where the zygote ended first.

        What it said before is still to be read: its channel stays open until then.
        """
        if not self._exit.done():
            self._exit.set_result(code)

    def close(self) -> None:
        """Read no more of it."""
        self._channel.close()

    async def exit_code(self, patience_s: float) -> int | None:
        """How it ended: an exit code, or minus a signal's number; None if nobody could say."""
        with contextlib.suppress(asyncio.TimeoutError):
            return await within(asyncio.shield(self._exit), patience_s)
        return None

    def hang_up(self) -> None:
        """Have it, and whoever reads of it here, see the end of its channel."""
        self._channel.hang_up()

    async def gone(self) -> None:
        """Return once it has ended."""
        await asyncio.shield(self._exit)

    async def unless_ended(self, coming: Coroutine[Any, Any, T]) -> T | None:
        """What `coming` gives; None where this process ends while it is waited for."""
        task = asyncio.create_task(coming)
        either: set[asyncio.Future[Any]] = {task, self._exit}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()

    @property
    def pid(self) -> int | None:
        """Its process, once the zygote has named it."""
        return self._pid

    async def ready(self) -> None:
        """Return once it waits for a request.

        Raises:
            RunnerError: if it cannot be what it must, or has ended.
        """
        async for header, body in self.frames(lambda _: _MAX_REASON):
            if header["kind"] in ("failed", "spent"):
                raise RunnerError(body.decode(errors="replace"))
            if header["kind"] != "idle":
                raise RunnerError("a runner said something before it was ready")
            return
        raise RunnerError("a runner ended before it was ready")

    async def send(
        self, header: dict[str, Any], body: bytes | bytearray = b"", fds: Sequence[int] = ()
    ) -> None:
        """Write a frame to it."""
        await self._channel.send(header, body, fds)

    async def frames(
        self, room: Callable[[Header], int]
    ) -> AsyncIterator[tuple[dict[str, Any], bytes]]:
        """What it says, until it ends; `room` says of a header how large its frame may be.

        Raises:
            ProtocolError: when it says what it may not.
        """
        while True:
            try:
                frame = await self._channel.receive(room)
            except EOFError:
                return
            yield frame

    def pause(self) -> None:
        """Stop the process: none of its threads runs until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue a stopped process."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it now, whatever it is doing."""
        self._doomed = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        # Its zygote reaps it, so until `exited` the number cannot be another's.
        if self._pid is not None and self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)
