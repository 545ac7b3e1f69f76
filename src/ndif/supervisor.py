"""The supervisor of a server of many processes on this machine: starts them, and again where one ends.

The socket is its own and theirs: while a gateway is started anew the others answer. It and they end
together, whoever ends first: each holds an end of a pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ndif.part import Part

logger = logging.getLogger(__name__)

_ENDS_WITHIN_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
_POLL_S = 0.1
_LIVED_S = 30.0
"""Whoever lived so long did not fail at once."""


@dataclass(frozen=True)
class Task:
    """A process that there is to be."""

    name: str
    module: str
    log: Path
    gives_up: bool
    """Whether the server ends if it cannot be started at first."""


class Supervisor:
    """Keeps processes alive until it is told to stop."""

    def __init__(self, tasks: list[Task], part: Part, folder: Path) -> None:
        self._tasks = tasks
        self._part = part
        self._file = folder / "part.json"
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End them all."""
        self._stopping.set()

    async def run(self, is_up: Callable[[], bool], up: Callable[[], None]) -> None:
        """Keep them running; `up` is called once `is_up`.

        Raises:
            RuntimeError: if one that it cannot do without ends before.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.stop)
        theirs, ours = os.pipe()
        self._part.write(self._file)
        keeping = [asyncio.create_task(self._keep(task, theirs)) for task in self._tasks]
        waiting = asyncio.create_task(_until(is_up))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({*keeping, waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                up()
                await asyncio.wait({*keeping, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in keeping:
                if task.done():
                    task.result()
        finally:
            self._stopping.set()
            os.close(ours)  # all of them hear this
            waiting.cancel()
            stopping.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)
            os.close(theirs)
            self._file.unlink(missing_ok=True)

    async def _keep(self, task: Task, lifeline: int) -> None:
        """Have a process for as long as the server is to run."""
        loop = asyncio.get_running_loop()
        pause_s, lived = _FIRST_PAUSE_S, False
        while not self._stopping.is_set():
            began = loop.time()
            code = await self._run(task, lifeline)
            if self._stopping.is_set():
                return
            if task.gives_up and not lived and loop.time() - began < _LIVED_S:
                raise RuntimeError(
                    f"its part {task.name} ended at once ({code}); {task.log} says why"
                )
            lived = True
            pause_s = (
                _FIRST_PAUSE_S
                if loop.time() - began > _LIVED_S
                else min(2 * pause_s, _LONGEST_PAUSE_S)
            )
            logger.warning("%s ended (%s); another is started in %.1f s", task.name, code, pause_s)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)

    async def _run(self, task: Task, lifeline: int) -> int:
        with task.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", task.module, str(self._file), str(lifeline)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(self._part.listening, lifeline),
                # A terminal's Ctrl-C is for the one that ends the others in order.
                start_new_session=True,
            )
        ended = asyncio.create_task(process.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not ended.done():
            await asyncio.wait({ended}, timeout=_ENDS_WITHIN_S)
            if not ended.done():
                logger.error("%s does not end and is killed", task.name)
                process.kill()
        return await ended


async def _until(is_so: Callable[[], bool]) -> None:
    while not await asyncio.to_thread(is_so):  # noqa: ASYNC110 - another process's state
        await asyncio.sleep(_POLL_S)
