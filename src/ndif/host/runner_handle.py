"""The host's handle on a runner: its channel, its process id and its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from ndif.host.channel import AsyncFrameChannel
from ndif.host.heartbeat import FROZEN_S, sign_of_life, until_frozen
from ndif.runtime.messages import Message, Signal
from ndif.schema.payload import Payload
from ndif.tasks import within

logger = logging.getLogger(__name__)

T = TypeVar("T")


_MAX_REASON = 1 << 16
_EXIT_S = 1.0
"""Seconds for the zygote to report the exit code of a runner that hung up."""


class RunnerError(Exception):
    """A runner could not start or be reset; the message says why."""


class RunnerEndedError(RunnerError):
    """A runner ended without giving a reason."""


class RunnerHandle:
    """One process that runs requests.

    Owns the host's end of the channel. The zygote's messages about the process arrive through `forked` and
    `exited`; a pool decides which requests the runner serves.
    """

    def __init__(
        self, runner_id: str, channel: AsyncFrameChannel, frozen_s: float = FROZEN_S
    ) -> None:
        self.id = runner_id
        self.pid: int | None = None
        self.channel = channel
        self._frozen_s = frozen_s
        self._is_paused = False
        self._watching: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[int | None] = loop.create_future()
        self._over: asyncio.Future[None] = loop.create_future()
        """Done once the process was killed or has ended."""
        self._cut: asyncio.Future[None] = loop.create_future()
        """Done once the process was killed or its zygote has ended."""

    @property
    def alive(self) -> bool:
        """Return True until the zygote has reported the process's end."""
        return not self._exit.done()

    @property
    def usable(self) -> bool:
        """Return True if the process is alive and was not killed."""
        return not self._over.done()

    def forked(self, pid: int) -> None:
        """Record the process id."""
        self.pid = pid
        if not self.usable:
            self.kill()

    def exited(self, code: int | None) -> None:
        """Record the exit code; None if the zygote ended first. Unread frames can still be read."""
        if not self._exit.done():
            self._exit.set_result(code)
        self._mark_over(is_cut=code is None)

    def _mark_over(self, *, is_cut: bool) -> None:
        for future in (self._over, self._cut) if is_cut else (self._over,):
            if not future.done():
                future.set_result(None)

    async def exit_code(self, patience_s: float) -> int | None:
        """Return the exit code, or minus a signal's number; None if it is not known in time."""
        with contextlib.suppress(asyncio.TimeoutError):
            return await within(asyncio.shield(self._exit), patience_s)
        return None

    async def unless_ended(self, awaitable: Awaitable[T]) -> T | None:
        """Return the result of `awaitable`; None if the process ends or is killed first."""
        return await self._unless(self._over, awaitable)

    async def unless_cut(self, awaitable: Awaitable[T]) -> T | None:
        """Return the result of `awaitable`; None if it is killed first, or ends with its zygote."""
        return await self._unless(self._cut, awaitable)

    async def _unless(self, over: asyncio.Future[None], awaitable: Awaitable[T]) -> T | None:
        task = asyncio.ensure_future(awaitable)
        futures: set[asyncio.Future[Any]] = {task, over}
        try:
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()

    async def ready(self) -> None:
        """Return once the runner waits for a request; raise a `RunnerError` if it never does."""
        watching = self.kill_if_frozen()
        try:
            async for message, body in self.frames(lambda _: _MAX_REASON):
                if message in (Signal.FAILED, Signal.SPENT):
                    raise RunnerError(body.decode(errors="replace"))
                if message is not Signal.IDLE:
                    raise RunnerError("a runner sent a frame before it was ready")
                return
        finally:
            watching.cancel()
        code = await self.exit_code(_EXIT_S)
        raise RunnerEndedError(f"a runner ended before it was ready ({describe_exit(code)})")

    def kill_if_frozen(self) -> asyncio.Task[None]:
        """Start a task that kills a process without a sign of life; not for use while user code runs."""
        return asyncio.create_task(self._kill_if_frozen(), name="runner's sign of life")

    async def _kill_if_frozen(self) -> None:
        # Until it is forked, only the zygote can show a sign of life.
        await until_frozen(
            lambda: object() if self.pid is None else sign_of_life(self.pid), self._frozen_s
        )
        logger.error("runner %s: no sign of life, it is killed", self.pid)
        self.kill()

    async def send(self, message: Message, body: Payload = b"", fds: Sequence[int] = ()) -> None:
        """Send a frame to the runner; ignore a closed channel, which ends `frames`."""
        with contextlib.suppress(OSError):
            await self.channel.send(message, body, fds)

    async def frames(
        self, max_body_bytes: Callable[[Message], int]
    ) -> AsyncIterator[tuple[Message, bytes]]:
        """Yield the runner's frames until it ends; `max_body_bytes` limits the body after a message."""
        with contextlib.suppress(EOFError):
            while True:
                yield await self.channel.receive(max_body_bytes)

    def pause(self) -> None:
        """Stop the process until `resume`, so that none of its threads runs, and end its watch."""
        if not self._is_paused:
            self._is_paused = True
            self._signal(signal.SIGSTOP)
        self.watch(None)

    def resume(self) -> None:
        """Continue the process if it is stopped."""
        if self._is_paused:
            self._is_paused = False
            self._signal(signal.SIGCONT)

    def watch(self, watching: asyncio.Task[None] | None) -> None:
        """Replace the task that watches the resources of the process; None ends the watch."""
        if self._watching is not None:
            self._watching.cancel()
        self._watching = watching

    def interrupt(self) -> None:
        """Interrupt the process: its block gets an error at the line that it executes."""
        self._signal(signal.SIGUSR1)

    def kill(self) -> None:
        """Kill the process and hang up its channel."""
        self._signal(signal.SIGKILL)
        self.watch(None)
        # The process may not be forked yet, or its zygote may be frozen: readers must not wait.
        self.channel.hang_up()
        self._mark_over(is_cut=True)

    def _signal(self, number: signal.Signals) -> None:
        # The zygote reaps the process, so until `exited` no other process can have its id.
        if self.pid is not None and self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def describe_exit(code: int | None) -> str:
    """Describe an exit code in words."""
    if code is None:
        return "no exit code"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def describe_crash(code: int | None) -> str:
    """Return the message for the user of a request whose runner ended with `code`."""
    how = describe_exit(code)
    if code is not None and code >= 0:
        return (
            f"The process that ran your block exited ({how}) before the block was done: something in "
            "it ends the process (os._exit, an abort in native code). Nothing was returned."
        )
    hint = {
        -9: "The system ended it, most often because it ran out of memory: save or compute less, with a "
        "smaller batch, or under `torch.no_grad()` if you need no gradients.",
        -11: "Native code touched memory it may not: a wrong pointer, or a bug in a library.",
        -6: "Native code gave up on an internal check.",
    }.get(code or 0, "Nothing more is known.")
    return f"The process that ran your block ended ({how}) before the block was done. {hint}"
