"""Supervision of the processes that belong to one server: services, gateways and the dispatcher.

A process ends with its owner, however the owner ends: it inherits one end of a pipe, and stops when the
other end, which only the owner holds, is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ndif.config.units import format_duration
from ndif.tasks import within

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.2, 10.0
_STABLE_S = 30.0
"""Seconds of life after which an exit does not count as a failed start."""


@dataclass(frozen=True)
class ProcessSpec:
    """One process to run."""

    name: str
    command: Callable[[int], Sequence[str]]
    """Command line, made from the descriptor of the pipe that its owner closes to stop it."""
    log: Path
    must_start: bool
    """True if its owner fails when the process ends before it was ever ready; False to try again."""
    stop_timeout_s: float = 30.0
    """Seconds that it may take to stop before it is killed."""
    inherited: tuple[int, ...] = ()
    environment: Mapping[str, str] | None = None
    """Environment variables; None for the environment of this process."""


class Supervisor:
    """Runs processes, restarts each when it ends, and stops them in order.

    Processes start in stages: a stage starts when the previous stage is ready, and stops before that stage.
    A process that ends starts again after a back-off of 0.2 to 10 seconds. The caller of `start` decides
    when a stage is ready.
    """

    def __init__(self, stopping: asyncio.Event) -> None:
        """Take the event by which the owner ends `start` and `wait`; the owner then calls `stop`."""
        self._stopping = stopping
        self._stages: list[list[_SupervisedProcess]] = []

    async def start(
        self,
        specs: Sequence[ProcessSpec],
        is_ready: Callable[[], bool],
        timeout_s: float | None = None,
    ) -> None:
        """Start processes together, and return once they are ready or the supervisor is stopping.

        `is_ready` is polled in a thread, and may block. Raise a `RuntimeError` if a process that must start
        ends first, and an `asyncio.TimeoutError` after `timeout_s`.
        """
        if self._stopping.is_set():
            return
        stage = [_SupervisedProcess(spec) for spec in specs]
        self._stages.append(stage)
        ready = self._ready(stage, is_ready)
        await (ready if timeout_s is None else within(ready, timeout_s))
        for process in stage:
            process.was_ready = True

    async def wait(self) -> None:
        """Return when the supervisor is stopping; raise the error of a process that cannot be run again."""
        stopping = asyncio.create_task(self._stopping.wait())
        supervising = {process.supervision for stage in self._stages for process in stage}
        try:
            await asyncio.wait({stopping, *supervising}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        for task in supervising:
            if task.done():
                task.result()

    async def stop(self) -> None:
        """Stop all processes: the last stage first, the processes of a stage together."""
        while self._stages:
            stage = self._stages.pop()
            await asyncio.gather(*(process.stop() for process in stage))

    async def _ready(
        self, stage: Sequence[_SupervisedProcess], is_ready: Callable[[], bool]
    ) -> None:
        while not self._stopping.is_set():
            for process in stage:
                if process.supervision.done():
                    process.supervision.result()
            if await asyncio.to_thread(is_ready):
                return
            await asyncio.sleep(_POLL_S)


class _SupervisedProcess:
    """One process, started at once and again whenever it ends, until it is stopped."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.was_ready = False
        """True once the process has served: from then on it is always started again."""
        self._spec = spec
        self._stopping = asyncio.Event()
        self._child_end, self._owner_end = os.pipe()
        self.supervision = asyncio.create_task(self._supervise(), name=f"supervise {spec.name}")

    async def stop(self) -> None:
        """Stop the process, and return once it has ended."""
        self._stopping.set()
        os.close(self._owner_end)  # the process stops when it reads the end of the pipe
        await asyncio.gather(self.supervision, return_exceptions=True)
        os.close(self._child_end)
        logger.info("%s stopped", self._spec.name)

    async def _supervise(self) -> None:
        loop, spec = asyncio.get_running_loop(), self._spec
        backoff_s = _MIN_BACKOFF_S
        while not self._stopping.is_set():
            started = loop.time()
            code = await self._run()
            if self._stopping.is_set():
                return
            is_stable = loop.time() - started > _STABLE_S
            if spec.must_start and not self.was_ready and not is_stable:
                raise RuntimeError(
                    f"the process {spec.name!r} ended at once with status {code}; its log is {spec.log}"
                )
            self.was_ready = True
            backoff_s = _MIN_BACKOFF_S if is_stable else min(2 * backoff_s, _MAX_BACKOFF_S)
            logger.warning(
                "%s ended with status %s; it starts again in %s",
                spec.name,
                code,
                format_duration(backoff_s),
            )
            with contextlib.suppress(asyncio.TimeoutError):
                await within(self._stopping.wait(), backoff_s)

    async def _run(self) -> int:
        """Run the process until it ends, and return its status; kill it if it does not stop in time."""
        spec = self._spec
        with spec.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *spec.command(self._child_end),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(self._child_end, *spec.inherited),
                env=spec.environment,
                # A terminal's Ctrl-C reaches only the owner, which stops the others in order.
                start_new_session=True,
            )
        ended = asyncio.create_task(process.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await asyncio.wait({ended}, timeout=spec.stop_timeout_s)
        if not ended.done():
            limit = format_duration(spec.stop_timeout_s)
            logger.error("%s did not stop within %s: killed", spec.name, limit)
            process.kill()
        return await ended
