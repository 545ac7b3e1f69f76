"""Model processes that have no model yet: they import what any model needs, and wait to be told which.

That takes as long as it takes to measure a model, and whoever waits for the model need not wait for both,
one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from ndif.host.channel import Channel
from ndif.host.environment import environment, for_strangers
from ndif.host.runtimes import Runtime
from ndif.tasks import end

_IDLE_S = 60.0


@dataclass(frozen=True, slots=True)
class Blank:
    """One that is started, and the way to speak to it: closing that ends it."""

    process: asyncio.subprocess.Process
    control: Channel

    @classmethod
    async def start(cls, runtime: Runtime, variables: Mapping[str, str]) -> Blank:
        """Start one.

        Raises:
            OSError: if it cannot be started.
        """
        control, theirs = Channel.pair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    str(runtime.interpreter),
                    "-m",
                    "ndif.runtime",
                    str(theirs.fileno()),
                    pass_fds=[theirs.fileno()],
                    env=variables,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    # Ctrl-C is for the server; it decides when its processes end.
                    start_new_session=True,
                )
        except BaseException:
            control.close()
            raise
        return cls(process, control)

    async def end(self) -> None:
        """Have it gone."""
        self.control.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


class Blanks:
    """Of each runtime at most one that waits, to run strangers' code once it has a model."""

    def __init__(self, idle_s: float = _IDLE_S) -> None:
        """`idle_s`: one that nobody takes ends after that."""
        self.devices: str | None = None
        """The `CUDA_VISIBLE_DEVICES` of every model process of this machine, once its GPUs are known."""
        self._idle_s = idle_s
        self._waiting: dict[Runtime, asyncio.Task[Blank]] = {}
        self._retiring: dict[Runtime, asyncio.Task[None]] = {}

    def prepare(self, runtime: Runtime) -> None:
        """Have one start, because it may be taken soon."""
        if runtime not in self._waiting:
            self._waiting[runtime] = asyncio.create_task(self._for_strangers(runtime), name="blank")
            self._retiring[runtime] = asyncio.create_task(
                self._retire(runtime), name="blank retires"
            )

    async def take(self, runtime: Runtime) -> Blank:
        """The one that waits, or another.

        Raises:
            OSError: if none can be started.
        """
        starting = self._waiting.pop(runtime, None)
        if starting is None:
            return await self._for_strangers(runtime)
        self._retiring.pop(runtime).cancel()
        blank = await starting
        if blank.process.returncode is None:
            return blank
        await blank.end()
        return await self._for_strangers(runtime)

    async def trusted(self, runtime: Runtime) -> Blank:
        """Start one for trusted code, with all of this process's environment.

        Raises:
            OSError: if it cannot be started.
        """
        return await Blank.start(runtime, environment(runtime, self.devices))

    async def _for_strangers(self, runtime: Runtime) -> Blank:
        return await Blank.start(runtime, for_strangers(environment(runtime, self.devices)))

    async def stop(self) -> None:
        """End those that wait."""
        await end(self._retiring.values())
        self._retiring.clear()
        for runtime in [*self._waiting]:
            await self._discard(runtime)

    async def _retire(self, runtime: Runtime) -> None:
        await asyncio.sleep(self._idle_s)
        del self._retiring[runtime]
        await self._discard(runtime)

    async def _discard(self, runtime: Runtime) -> None:
        with contextlib.suppress(OSError):  # there is none
            blank = await self._waiting.pop(runtime)
            await blank.end()
