"""One model process: started, spoken to, ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from ndif.host.blanks import Blank, Blanks
from ndif.host.channel import Channel, ProtocolError
from ndif.host.device_errors import DeviceFailure, device_failure
from ndif.host.download import DownloadError, Found, download
from ndif.host.exits import describe_exit
from ndif.host.numa import bind
from ndif.host.port import ActorError
from ndif.host.runner import Runner
from ndif.host.runtimes import Runtime
from ndif.host.weights import Weights
from ndif.runtime.frames import Header
from ndif.runtime.spec import ModelSpec
from ndif.tasks import within

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_MESSAGE = 1 << 20
_LAST_LINES = 20
_LAST_WORDS_S = 1.0
GONE_S = 30.0
"""Seconds within which a runner that was killed is gone. On a GPU its driver ends its work before."""
_VERIFY_S = 60.0
"""Seconds within which weights are verified. To restore them by then is no slower than to load them."""
_ANSWERS = ("verified", "cached", "uncached", "failed")
"""What a process that has loaded its model says to a question."""


class ModelProcessError(ActorError):
    """The model process could not start, or is gone."""


class ModelProcess:
    """The zygote of one model, and the runners it forks."""

    def __init__(
        self, spec: ModelSpec, runtime: Runtime, weights: Weights, blanks: Blanks | None = None
    ) -> None:
        """`weights`: what this process and others of this machine share.

        `blanks`: where it comes from, if it is for strangers.
        """
        self.spec = spec
        self.runtime = runtime
        self._weights = weights
        self._blanks = blanks or Blanks()
        self.model: Mapping[str, Any] = {}
        """What the process says it loaded, once it is ready."""
        self.load_s = self.loaded_at = 0.0
        """How long the weights took, and when (Unix seconds) they were there."""
        self.exposes_weights = False
        """Whether its runners write to the same weights, as on GPUs; elsewhere each has its own copy."""
        self.cpus: Collection[int] | None = None
        """The CPUs on which it and its runners run, from when it is next started or has its model back."""
        self.ended = asyncio.Event()
        self._asked: deque[asyncio.Future[tuple[dict[str, Any], bytes]]] = deque()
        self._process: asyncio.subprocess.Process | None = None
        self._control: Channel | None = None
        self._runners: dict[str, Runner] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._output: asyncio.Task[None] | None = None
        self._failed = ""
        """Why it could not load its model, verify or move it."""
        self._stderr: deque[str] = deque(maxlen=_LAST_LINES)

    async def start(self, timeout_s: float, progress: Callable[[int, int], None]) -> None:
        """Start the process and wait until the weights are loaded.

        Raises:
            ModelProcessError: with the reason, in a sentence.
        """
        found = Found(None, self.spec.task)
        try:
            blank = await self._blank()
            self._process, self._control = blank.process, blank.control
            control = blank.control
            self._bind()
            self._output = asyncio.create_task(self._keep_output(), name="model process output")
            self._tasks.append(self._output)
            # Meanwhile the process imports what it needs, which takes as long as a small model's download.
            if self.spec.untrusted is not None and not self.spec.is_folder:
                found = await self._download(timeout_s, progress)
            spec = replace(self.spec, task=found.task)
            await control.send({"kind": "load", "spec": spec.header()})
            await within(self._loaded(control, progress), timeout_s)
        except (EOFError, OSError, ProtocolError) as error:
            await self.stop()
            why = self._why_it_ended() if self._process else f"it could not be started: {error}"
            raise ModelProcessError(why) from error
        except asyncio.TimeoutError as error:
            await self.stop()
            raise ModelProcessError(
                f"the model did not load within {timeout_s:g} s (NDIF_MODEL_START_TIMEOUT_S)"
            ) from error
        except BaseException:
            await self.stop()
            raise
        if found.repo_id is not None:
            self.model = {**self.model, "repo_id": found.repo_id}
        self._tasks.append(asyncio.create_task(self._listen(control), name="model process control"))

    def _bind(self) -> None:
        if self.cpus is not None and self.pid is not None:
            bind(self.pid, self.cpus)

    async def _blank(self) -> Blank:
        """The process that is to be this one."""
        if self.spec.untrusted is None:
            return await self._blanks.trusted(self.runtime)
        return await self._blanks.take(self.runtime)

    async def _download(self, timeout_s: float, progress: Callable[[int, int], None]) -> Found:
        try:
            return await within(download(self.spec, self.runtime, progress), timeout_s)
        except DownloadError as error:
            raise ModelProcessError(str(error)) from error
        except asyncio.TimeoutError as error:
            raise ModelProcessError(
                f"the model did not arrive within {timeout_s:g} s (NDIF_MODEL_START_TIMEOUT_S)"
            ) from error

    async def _loaded(self, control: Channel, progress: Callable[[int, int], None]) -> None:
        while True:
            header, body = await control.receive(lambda _: _MAX_MESSAGE)
            match header["kind"]:
                case "progress":
                    progress(int(header["done"]), int(header["total"]))
                case "failed":
                    self._failed = body.decode(errors="replace")
                    raise ModelProcessError(self._failed)
                case "weights":
                    fd = await self._weights.of(self, header["name"], int(header["size"]))
                    filled = self._weights.filled(header["name"])
                    given = [] if fd is None else [fd]
                    await control.send({"kind": "weights", "filled": filled}, fds=given)
                case "filled":
                    self._weights.fill(header["name"], usable=bool(header["usable"]))
                case "ready":
                    self.model, self.load_s = header["model"], float(header["load_s"])
                    self.loaded_at = float(header["loaded_at"])
                    self.exposes_weights = bool(header["exposed"])
                    return

    @property
    def device_failure(self) -> DeviceFailure | None:
        """The failure of a GPU that it has reported of late."""
        return device_failure([*self._stderr, *self._failed.splitlines()])

    @property
    def pid(self) -> int | None:
        """The zygote's process, of which owner and runners are children; None before it is started."""
        return None if self._process is None else self._process.pid

    async def fork(self, *, fresh: bool, reused: bool = False) -> Runner:
        """A new runner: a fresh one is confined and runs one request, or with `reused` one after the other.

        Raises:
            ModelProcessError: if the process is gone.
        """
        if self._control is None or self.ended.is_set():
            raise ModelProcessError(self._why_it_ended())
        channel, theirs = Channel.pair()
        runner = Runner(uuid.uuid4().hex, channel)
        self._runners[runner.id] = runner
        try:
            with theirs:
                await self._control.send(
                    {"kind": "fork", "runner": runner.id, "fresh": fresh, "reused": reused},
                    fds=[theirs.fileno()],
                )
        except OSError as error:
            raise ModelProcessError(self._why_it_ended()) from error
        return runner

    async def end_runners(self) -> None:
        """End every runner, and return once they are gone.

        Raises:
            ModelProcessError: if one cannot be ended; the process is then ended with all of them.
        """
        runners = list(self._runners.values())
        for runner in runners:
            runner.kill()
            runner.hang_up()
        gone = asyncio.gather(*(runner.gone() for runner in runners))
        await self._or_kill(gone, GONE_S, f"a runner could not be ended within {GONE_S:g} s")

    async def _or_kill(self, work: Awaitable[T], seconds: float, why: str) -> T:
        """Return what `work` comes to; end this process if it takes longer.

        Raises:
            ModelProcessError: then, with the reason `why`.
        """
        try:
            return await within(work, seconds)
        except asyncio.TimeoutError as error:
            self.kill()
            raise ModelProcessError(why) from error

    async def verify(self) -> int:
        """See that the weights are as they were, and have them so; return how many tensors were not.

        Raises:
            ModelProcessError: if the process is gone, or cannot; it is then ended.
        """
        why = f"the weights could not be verified within {_VERIFY_S:g} s"
        header, _ = await self._or_kill(self._ask({"kind": "verify"}), _VERIFY_S, why)
        return int(header["restored"])

    async def cache(self, timeout_s: float) -> None:
        """Have weights on GPUs in the CPU's memory, and nothing on the GPUs. No runner may be there.

        Raises:
            ModelProcessError: if the process is gone, or does not within `timeout_s`; it is then ended.
        """
        why = f"the weights were not in the CPU's memory within {timeout_s:g} s"
        await self._or_kill(self._ask({"kind": "cache"}), timeout_s, why)

    async def uncache(self, max_memory: Mapping[int, int] | None, timeout_s: float) -> None:
        """Have cached weights on GPUs again; `max_memory` is as in `ModelSpec`.

        Raises:
            ModelProcessError: if they cannot be there. The process is then at its end.
        """
        self.spec = replace(self.spec, max_memory=max_memory)
        self._bind()
        asked = {"kind": "uncache", "max_memory": max_memory}
        why = f"the model was not back within {timeout_s:g} s (NDIF_MODEL_START_TIMEOUT_S)"
        header, _ = await self._or_kill(self._ask(asked), timeout_s, why)
        self.model = {**self.model, "device": header["model"]["device"]}

    async def _ask(self, header: Header) -> tuple[dict[str, Any], bytes]:
        """Send what is answered; answers come in the order of the questions.

        Raises:
            ModelProcessError: if the process is gone, or cannot. It is then at its end.
        """
        if self._control is None or self.ended.is_set():
            raise ModelProcessError(self._why_it_ended())
        answer: asyncio.Future[tuple[dict[str, Any], bytes]] = (
            asyncio.get_running_loop().create_future()
        )
        self._asked.append(answer)
        with contextlib.suppress(OSError):  # whoever waits is told once it is seen to have ended
            await self._control.send(header)
        said, body = await answer
        if said["kind"] == "failed":
            self.kill()
            self._failed = body.decode(errors="replace")
            raise ModelProcessError(self._failed)
        return said, body

    def kill(self) -> None:
        """End the process, its owner and its runners at once, whatever they are doing."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """End the process and every runner of it."""
        if self._control is not None:
            self._control.hang_up()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(asyncio.TimeoutError):
                await within(self._process.wait(), 2)
            # Runners too, should the zygote not have ended them.
            self.kill()
            await self._process.wait()
        if self._output is not None:  # its end, with its last words
            await asyncio.wait([self._output], timeout=_LAST_WORDS_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._control is not None:
            self._control.close()
        self._end()

    async def _listen(self, control: Channel) -> None:
        with contextlib.suppress(EOFError, ProtocolError):
            while True:
                header, body = await control.receive(lambda _: _MAX_MESSAGE)
                if header["kind"] in _ANSWERS:
                    asked = self._asked.popleft() if self._asked else None
                    if asked is not None and not asked.done():
                        asked.set_result((header, body))
                    continue
                runner = self._runners.get(header.get("runner", ""))
                if runner is None:
                    continue
                if header["kind"] == "forked":
                    runner.forked(int(header["pid"]))
                elif header["kind"] == "exited":
                    del self._runners[runner.id]
                    runner.exited(int(header["code"]))
        if self._output is not None:  # what it said last may be why
            await asyncio.wait([self._output], timeout=_LAST_WORDS_S / 2)
        self._end()

    def _end(self) -> None:
        self.ended.set()
        self._weights.leave(self)
        for runner in self._runners.values():
            runner.exited(None)
        self._runners.clear()
        while self._asked:
            asked = self._asked.popleft()
            if not asked.done():
                asked.set_exception(ModelProcessError(self._why_it_ended()))

    async def _keep_output(self) -> None:
        assert self._process is not None  # noqa: S101 - started before this task
        assert self._process.stdout is not None  # noqa: S101
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:
                continue  # a line longer than anybody reads: what came of it is dropped
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._stderr.append(text)
            logger.info("model process %s: %s", self.spec.checkpoint, text)

    def _why_it_ended(self) -> str:
        code = self._process.returncode if self._process else None
        said = next((line for line in reversed(self._stderr) if line.strip()), "it said nothing")
        return f"the model process ended ({describe_exit(code)}); its last words: {said}"
