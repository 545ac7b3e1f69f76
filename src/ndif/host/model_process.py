"""The host's side of a model process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import uuid
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ndif.config.units import format_duration
from ndif.host.channel import AsyncFrameChannel, ProtocolError
from ndif.host.device_errors import DeviceFailure, device_failure
from ndif.host.environment import bind
from ndif.host.fork_server import ForkServers, Process
from ndif.host.heartbeat import FROZEN_S, parent, sign_of_family, sign_of_life, until_frozen
from ndif.host.hub import DownloadError, download, task_to_load
from ndif.host.port import ActorError, Progress, ServedModel
from ndif.host.runner_handle import RunnerHandle, describe_exit
from ndif.host.runtimes import Runtime
from ndif.host.shared_weights import SharedWeights
from ndif.runtime.messages import (
    Exited,
    Filled,
    Forked,
    ForkRunner,
    Load,
    Message,
    Ready,
    SharedMemory,
    ShareWeights,
    Signal,
    Uncache,
    Uncached,
    Verified,
)
from ndif.runtime.messages import Progress as ProgressMessage
from ndif.runtime.sizing import RepositoryFacts
from ndif.runtime.spec import ModelSpec
from ndif.runtime.weights.cache import CacheRules, in_use
from ndif.schema.answer import project
from ndif.schema.structure import read_structure
from ndif.tasks import end, timeout, within

logger = logging.getLogger(__name__)

A = TypeVar("A", bound=Message)

_MAX_MESSAGE = 1 << 20
_LAST_LINES = 20
_LAST_WORDS = 3
"""Lines of output that are quoted in the error of a runner that could not start."""
_LAST_WORDS_S = 0.5
MAX_EXIT_S = 30.0
"""Seconds that a killed runner may take to exit: on a GPU the driver first ends its work."""
_VERIFY_S = 60.0
"""Seconds that a verification of weights may take. Loading them again takes no longer."""
_PINGS = 10
"""Number of pings to an idle process within `frozen_s`."""


class ModelProcessError(ActorError):
    """The model process could not start, or has ended."""


@dataclass(eq=False)
class ModelProcess:
    """The zygote of one model, and the runners that it forks.

    Owns the process, its control channel and the handles of its runners. `ForkServers` starts the process,
    `SharedWeights` provides memory, and `Exchange` talks to the runners. A method that queries the process
    raises a `ModelProcessError` if the process has ended.
    """

    spec: ModelSpec
    runtime: Runtime
    weights: SharedWeights
    fork_servers: ForkServers = field(default_factory=ForkServers)
    cache_rules: Callable[[], CacheRules] = CacheRules
    """Return the rules for the Hub's cache, as they are now."""
    model: ServedModel | None = None
    """Facts about the loaded model; None until the process is ready."""
    load_s: float = 0.0
    """Seconds that loading the weights took."""
    loaded_at: float = 0.0
    exposes_weights: bool = False
    """True if runners can write to the same weights, as on GPUs; elsewhere each runner has its own copy."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    frozen_s: float = FROZEN_S
    """Seconds without a sign of life after which the process is ended."""
    _is_frozen: bool = False
    _is_loaded: bool = False
    _is_awaited: bool = False
    """True while the process waits for an answer from this host."""
    _answers: int = 0
    """Number of answers to the host's pings."""
    _answered: asyncio.Event = field(default_factory=asyncio.Event)
    _is_bound: bool = False
    """True if the process and its runners are bound to some of the CPUs."""
    _pending: deque[asyncio.Future[tuple[Message, bytes]]] = field(default_factory=deque)
    _process: Process | None = None
    _control: AsyncFrameChannel | None = None
    _runners: dict[str, RunnerHandle] = field(default_factory=dict)
    _waiting: set[str] = field(default_factory=set)
    """Ids of confined runners that wait for their `clear_refs` file, which they cannot open themselves."""
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _output: asyncio.Task[None] | None = None
    _failed: str = ""
    """The reason why the process could not load, verify or move its model."""
    _stderr: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    _held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """The claim on the model's files in the Hub's cache; while it is held, nothing deletes them."""
    lines: int = 0
    """Number of lines that the process and its runners have written."""

    async def start(
        self,
        timeout_s: float,
        progress: Progress,
        max_memory: Mapping[int, int] | None = None,
        cpus: Collection[int] | None = None,
    ) -> None:
        """Start the process on these CPUs and load the weights, or raise a `ModelProcessError`.

        `max_memory` is as in `ModelSpec`; None leaves the spec as it is.
        """
        if max_memory is not None:
            self.spec = replace(self.spec, max_memory=max_memory)
        facts = RepositoryFacts(str(self.spec.files))
        try:
            started = asyncio.create_task(self._start_process(cpus), name="model process start")
            try:
                # Meanwhile the process imports its modules, unless a fork server has. The process cannot
                # download.
                if not self.spec.is_folder:
                    facts = await self._download(timeout_s, progress)
                control = await within(started, timeout_s)
            finally:
                await end([started])
            fetched = None if self.spec.is_folder else facts.folder
            task = task_to_load(self.spec, facts)
            self.spec = spec = replace(self.spec, task=task, folder=fetched)
            await control.send(Load(spec))
            self._tasks.append(asyncio.create_task(self._end_if_frozen(), name="sign of life"))
            model = await within(self._loaded(control, progress), timeout_s)
        except BaseException as error:
            await self.stop()
            # Checked first, because from Python 3.11 on TimeoutError is an OSError.
            if isinstance(error, asyncio.TimeoutError):
                limit = f"{format_duration(timeout_s)} (NDIF_MODEL_START_TIMEOUT_S)"
                why = f"the model did not load within {limit}"
            elif isinstance(error, EOFError | OSError | ProtocolError):
                why = self._why_it_ended() if self._process else f"it could not be started: {error}"
            else:
                raise
            raise ModelProcessError(why) from error
        # A repository's files may control the process, so the host states the model's identity.
        folder = spec.folder or spec.checkpoint
        self.model = replace(model, repo_id=facts.repo_id, gated=facts.gated, folder=folder)
        self._is_loaded = True
        self._tasks.append(asyncio.create_task(self._listen(control), name="model process control"))
        self._tasks.append(asyncio.create_task(self._ping(control), name="model process pings"))

    async def _end_if_frozen(self) -> None:
        await until_frozen(self._sign_of_life, self.frozen_s)
        logger.error("model process %s: no sign of life, it is ended", self.spec.checkpoint)
        self._is_frozen = True
        self.kill()

    def _sign_of_life(self) -> Hashable:
        if self._is_awaited or self.pid is None:
            return object()
        if self._pending or not self._is_loaded:
            # It is busy and cannot answer pings, or it waits for a busy child.
            return sign_of_family(self.pid)
        return self._answers, sign_of_life(self.pid)

    async def _ping(self, control: AsyncFrameChannel) -> None:
        """Ping an idle process, so that it can show a sign of life."""
        with contextlib.suppress(OSError):
            while True:
                self._answered.clear()
                await control.send(Signal.PING)
                await self._answered.wait()
                await asyncio.sleep(self.frozen_s / _PINGS)

    def _bind(self, cpus: Collection[int] | None) -> None:
        """Bind the process to these CPUs; None unbinds it."""
        if cpus is None and not self._is_bound:
            return
        self._is_bound = cpus is not None
        if self.pid is not None:
            bind(self.pid, os.sched_getaffinity(0) if cpus is None else cpus)

    async def _start_process(self, cpus: Collection[int] | None) -> AsyncFrameChannel:
        self._control, theirs = AsyncFrameChannel.pair()
        with theirs:
            self._process = await self.fork_servers.start(
                self.runtime, "ndif.runtime", theirs, untrusted=self.spec.untrusted is not None
            )
        self._tasks.append(asyncio.create_task(self._watch(self._process, self._control)))
        self._bind(cpus)
        self._output = asyncio.create_task(self._keep_output(), name="model process output")
        self._tasks.append(self._output)
        return self._control

    async def _watch(self, process: Process, control: AsyncFrameChannel) -> None:
        """Hang up once the process has ended: its children may hold the other end of the channel."""
        await process.wait()
        control.hang_up()

    async def _download(self, timeout_s: float, progress: Progress) -> RepositoryFacts:
        try:
            await asyncio.to_thread(self._held.enter_context, in_use(self.spec.checkpoint))
            fetching = download(self.spec, self.runtime, progress, self.cache_rules())
            return await within(fetching, timeout_s)
        except DownloadError as error:
            raise ModelProcessError(str(error)) from error
        except asyncio.TimeoutError as error:
            raise ModelProcessError(
                f"the model did not arrive within {format_duration(timeout_s)} (NDIF_MODEL_START_TIMEOUT_S)"
            ) from error

    async def _loaded(self, control: AsyncFrameChannel, progress: Progress) -> ServedModel:
        """Answer the process's requests until it has loaded its model."""
        while True:
            message, body = await control.receive(lambda _: _MAX_MESSAGE)
            match message:
                case ProgressMessage(done, total):
                    progress(done, total)
                case Signal.FAILED:
                    self._failed = body.decode(errors="replace")
                    raise ModelProcessError(self._failed)
                case ShareWeights(name, size):
                    self._is_awaited = True  # perhaps until another process has filled the memory
                    name = self._qualified_name(name)
                    fd = await self.weights.of(self, name, size)
                    self._is_awaited = False
                    memory = SharedMemory(self.weights.filled(name))
                    await control.send(memory, fds=[] if fd is None else [fd])
                case Filled(name, usable):
                    try:
                        self.weights.fill(self._qualified_name(name), usable=usable)
                    except KeyError as error:
                        raise ProtocolError(f"it has no memory {name!r} to fill") from error
                case Ready():
                    self.load_s, self.loaded_at = message.load_s, message.loaded_at
                    self.exposes_weights = message.exposed
                    return project(ServedModel, message.model, structure=read_structure(body))

    def _qualified_name(self, name: str) -> str:
        """Return a name within this model's files, so that no process gets the weights of others."""
        return f"{self.spec.folder or self.spec.checkpoint}:{name}"

    @property
    def device_failure(self) -> DeviceFailure | None:
        """Return the GPU failure that the process has reported last, or None."""
        return device_failure([*self._stderr, *self._failed.splitlines()])

    @property
    def pid(self) -> int | None:
        """Return the zygote's process id; None before the start. Owner and runners are its children."""
        return None if self._process is None else self._process.pid

    @property
    def is_confined(self) -> bool:
        """Return True if the zygote itself is confined, so that it can fork no trusted runner."""
        untrusted = self.spec.untrusted
        return untrusted is not None and untrusted.every_request and not self.exposes_weights

    async def fork(self, *, fresh: bool, reused: bool = False) -> RunnerHandle:
        """Fork a runner. A fresh one is confined and runs one request, or with `reused` several."""
        if self._control is None or self.ended.is_set():
            raise ModelProcessError(self._why_it_ended())
        channel, theirs = AsyncFrameChannel.pair()
        runner = RunnerHandle(uuid.uuid4().hex, channel, self.frozen_s)
        if reused and self.is_confined:
            self._waiting.add(runner.id)
        self._runners[runner.id] = runner
        try:
            with theirs:
                order = ForkRunner(runner.id, fresh, reused)
                await self._control.send(order, fds=[theirs.fileno()])
        except OSError as error:
            raise ModelProcessError(self._why_it_ended()) from error
        return runner

    async def _forked(self, runner: RunnerHandle, pid: int) -> None:
        """Record a runner's process id, and send it the `clear_refs` file that a confined fork cannot open.

        Writing to that file resets the recorded peak of the runner's memory.
        """
        with contextlib.suppress(OSError):  # the runner has ended, as the next frame says
            # A repository's files may control the model process, which must not get other processes killed.
            if parent(pid) != self.pid:
                raise ProtocolError(f"it did not fork process {pid}")
            if runner.id in self._waiting:
                self._waiting.discard(runner.id)
                file = os.open(f"/proc/{pid}/clear_refs", os.O_WRONLY)
                try:
                    await runner.channel.send(Signal.CLEAR_REFS, fds=[file])
                finally:
                    os.close(file)
            runner.forked(pid)

    async def end_runners(self) -> None:
        """End every runner and wait for their exits; kill the model process if a runner does not exit."""
        runners = list(self._runners.values())
        for runner in runners:
            runner.kill()
            runner.channel.hang_up()
        await asyncio.gather(*(runner.exit_code(MAX_EXIT_S) for runner in runners))
        if any(runner.alive for runner in runners):
            self.kill()
            raise ModelProcessError(
                f"a runner could not be ended within {format_duration(MAX_EXIT_S)}"
            )

    async def verify(self) -> int:
        """Restore the weights as they were loaded; return the number of tensors that differed."""
        problem = f"the weights could not be verified within {format_duration(_VERIFY_S)}"
        return (await self._query(Signal.VERIFY, Verified, _VERIFY_S, problem)).restored

    async def cache(self, timeout_s: float) -> None:
        """Move weights from GPUs to the CPU's memory, after all runners have ended."""
        problem = f"the weights were not in the CPU's memory within {format_duration(timeout_s)}"
        await self._query(Signal.CACHE, Signal, timeout_s, problem)

    async def uncache(
        self, max_memory: Mapping[int, int] | None, cpus: Collection[int] | None, timeout_s: float
    ) -> None:
        """Move cached weights back to GPUs, and the process to `cpus`; for `max_memory` see `ModelSpec`."""
        self.spec = replace(self.spec, max_memory=max_memory)
        self._bind(cpus)
        problem = f"the model was not back within {format_duration(timeout_s)} (NDIF_MODEL_START_TIMEOUT_S)"
        answer = await self._query(Uncache(max_memory), Uncached, timeout_s, problem)
        if self.model is not None:
            self.model = replace(self.model, device=answer.device)

    async def _query(self, question: Message, kind: type[A], timeout_s: float, problem: str) -> A:
        """Send a question and return its answer; answers come in the order of the questions.

        A process that fails or exceeds `timeout_s` is killed; `problem` is the error message after a
        timeout.
        """
        if self._control is None or self.ended.is_set():
            raise ModelProcessError(self._why_it_ended())
        answer: asyncio.Future[tuple[Message, bytes]] = asyncio.get_running_loop().create_future()
        self._pending.append(answer)
        try:
            async with timeout(timeout_s):
                with contextlib.suppress(OSError):  # `_end` fails the question of an ended process
                    await self._control.send(question)
                message, body = await answer
        except asyncio.TimeoutError as error:
            self.kill()
            raise ModelProcessError(problem) from error
        if isinstance(message, kind) and message is not Signal.FAILED:
            return message
        self.kill()
        self._failed = body.decode(errors="replace")
        raise ModelProcessError(self._failed)

    def kill(self) -> None:
        """Kill the process, its owner and its runners."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # A process that has only just been forked leads no group yet.
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def stop(self) -> None:
        """End the process and its runners."""
        if self._control is not None:
            self._control.hang_up()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(asyncio.TimeoutError):
                await within(self._process.wait(), 2)
            # Runners too, if the zygote has not ended them.
            self.kill()
            await self._process.wait()
        await self._await_output()
        await end(self._tasks)
        if self._control is not None:
            self._control.close()
        self._end()

    async def _listen(self, control: AsyncFrameChannel) -> None:
        try:
            await self._receive_answers(control)
        except EOFError:
            pass
        except ProtocolError as error:
            logger.error("model process %s: %s; it is ended", self.spec.checkpoint, error)  # noqa: TRY400
            self.kill()
        await self._await_output()
        self._end()

    async def _receive_answers(self, control: AsyncFrameChannel) -> None:
        while True:
            message, body = await control.receive(lambda _: _MAX_MESSAGE)
            match message:
                case Verified() | Uncached() | Signal.CACHED | Signal.FAILED:
                    answer = self._pending.popleft() if self._pending else None
                    if answer is not None and not answer.done():
                        answer.set_result((message, body))
                case Signal.PONG:
                    self._answers += 1
                    self._answered.set()
                case Forked(name, pid) if name in self._runners:
                    await self._forked(self._runners[name], pid)
                case Exited(name, code) if name in self._runners:
                    self._runners.pop(name).exited(code)

    async def _await_output(self) -> None:
        """Wait for the last lines of the output, which may say why the process has ended."""
        if self._output is not None:
            await asyncio.wait([self._output], timeout=_LAST_WORDS_S)

    async def last_words(self, before: int) -> str:
        """Return the last lines of output after the first `before`, without the frames of tracebacks."""
        await self._await_output()
        lines = [*self._stderr][max(0, len(self._stderr) - (self.lines - before)) :]
        quoted = [
            line for line in lines if line.strip() and not line.startswith((" ", "Traceback "))
        ]
        return "; ".join(quoted[-_LAST_WORDS:]) or "it said nothing"

    def _end(self) -> None:
        self.ended.set()
        self._held.close()
        self.weights.leave(self)
        for runner in self._runners.values():
            runner.exited(None)
        self._runners.clear()
        while self._pending:
            answer = self._pending.popleft()
            if not answer.done():
                answer.set_exception(ModelProcessError(self._why_it_ended()))

    async def _keep_output(self) -> None:
        assert self._process is not None  # noqa: S101 - started before this task
        assert self._process.stdout is not None  # noqa: S101
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:
                continue  # the line is longer than the reader's limit, and dropped
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._stderr.append(text)
            self.lines += 1
            # Once the model is loaded, a user's block may have written the line.
            level = logging.DEBUG if self._is_loaded else logging.INFO
            fields = {"model": self.spec.checkpoint}
            logger.log(level, "model process %s: %s", self.spec.checkpoint, text, extra=fields)

    def _why_it_ended(self) -> str:
        if self._is_frozen:
            limit = format_duration(self.frozen_s)
            return f"the model process showed no sign of life for {limit} and was ended"
        code = self._process.returncode if self._process else None
        last_line = next(
            (line for line in reversed(self._stderr) if line.strip()), "it said nothing"
        )
        return f"the model process ended ({describe_exit(code)}); its last words: {last_line}"
