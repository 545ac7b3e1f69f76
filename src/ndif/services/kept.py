"""A process that there is: started, and started again where it ends, until it is told to.

Whoever keeps it and it end together: it holds one end of a pipe, and hears when the other is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ndif.tasks import within

logger = logging.getLogger(__name__)

_ENDS_WITHIN_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
_LIVED_S = 30.0
"""Whoever lived so long did not fail at once."""


@dataclass(frozen=True)
class Task:
    """A process that there is to be."""

    name: str
    command: Callable[[int], Sequence[str]]
    """What is run, by the descriptor of its end of the pipe."""
    log: Path
    gives_up: bool
    """Whether it is not started again if it ends at first."""
    passes: tuple[int, ...] = ()
    """Further descriptors that it inherits."""
    environment: Mapping[str, str] | None = None
    """Instead of this process's."""


class Kept:
    """Keeps one process, from now on; `keeping` is done when that failed."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.has_served = False
        """Whether it has done what it is there for: from then on it is always started again."""
        self._ending = asyncio.Event()
        self._theirs, self._ours = os.pipe()
        self.keeping = asyncio.create_task(self._keep(), name=f"keep {task.name}")

    async def end(self) -> None:
        """Have it end, and return once it has."""
        self._ending.set()
        os.close(self._ours)  # it hears this
        await asyncio.gather(self.keeping, return_exceptions=True)
        os.close(self._theirs)

    async def _keep(self) -> None:
        """Have a process for as long as there is to be one.

        Raises:
            RuntimeError: if it ends at once, and is one that gives up then.
        """
        loop, task = asyncio.get_running_loop(), self.task
        pause_s = _FIRST_PAUSE_S
        while not self._ending.is_set():
            began = loop.time()
            code = await self._run()
            if self._ending.is_set():
                return
            lived = loop.time() - began > _LIVED_S
            if task.gives_up and not self.has_served and not lived:
                raise RuntimeError(
                    f"its part {task.name} ended at once ({code}); {task.log} says why"
                )
            self.has_served = True
            pause_s = _FIRST_PAUSE_S if lived else min(2 * pause_s, _LONGEST_PAUSE_S)
            logger.warning("%s ended (%s); another is started in %.1f s", task.name, code, pause_s)
            with contextlib.suppress(asyncio.TimeoutError):
                await within(self._ending.wait(), pause_s)

    async def _run(self) -> int:
        task = self.task
        with task.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *task.command(self._theirs),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(self._theirs, *task.passes),
                env=task.environment,
                # A terminal's Ctrl-C is for the one that ends the others in order.
                start_new_session=True,
            )
        ended = asyncio.create_task(process.wait())
        ending = asyncio.create_task(self._ending.wait())
        await asyncio.wait({ended, ending}, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if not ended.done():
            await asyncio.wait({ended}, timeout=_ENDS_WITHIN_S)
            if not ended.done():
                logger.error("%s does not end and is killed", task.name)
                process.kill()
        return await ended
