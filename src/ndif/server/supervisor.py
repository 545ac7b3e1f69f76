"""The supervisor of a server of many processes on this machine: starts them, and again where one ends.

The socket is its own and theirs: while a gateway is started anew the others answer.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ndif.server.part import Part
from ndif.services.kept import Kept, Task

_POLL_S = 0.1


@dataclass(frozen=True)
class Module:
    """A process of ours that has a part in the server."""

    name: str
    module: str
    log: Path
    gives_up: bool
    """Whether the server ends if it cannot be started at first."""


class Supervisor:
    """Keeps processes alive until it is told to stop."""

    def __init__(self, modules: list[Module], part: Part, folder: Path) -> None:
        self._modules = modules
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
        self._part.write(self._file)
        kept = [Kept(self._task(module)) for module in self._modules]
        keeping = [one.keeping for one in kept]
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
            waiting.cancel()
            stopping.cancel()
            await asyncio.gather(*(one.end() for one in kept))
            self._file.unlink(missing_ok=True)

    def _task(self, module: Module) -> Task:
        def command(lifeline: int) -> Sequence[str]:
            return [sys.executable, "-m", module.module, str(self._file), str(lifeline)]

        return Task(
            module.name, command, module.log, module.gives_up, passes=(self._part.listening,)
        )


async def _until(is_so: Callable[[], bool]) -> None:
    while not await asyncio.to_thread(is_so):  # noqa: ASYNC110 - another process's state
        await asyncio.sleep(_POLL_S)
