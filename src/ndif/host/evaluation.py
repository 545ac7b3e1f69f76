"""The memory that a model needs, measured by a process that builds it without weights."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ndif.config.units import format_duration
from ndif.host.fork_server import ForkServers, Process
from ndif.host.port import ActorError
from ndif.host.runtimes import Runtime
from ndif.runtime.spec import ModelSpec
from ndif.schema.deployment import DeploymentConfig, read_task
from ndif.tasks import end, within

_MODULE = "ndif.runtime.measure"
_PATIENCE_S = 300.0


class EvaluationError(ActorError):
    """The size of a model cannot be worked out; the message says why, in a sentence."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The memory that a replica needs, and facts of its model before it is loaded."""

    size_bytes: int
    """Bytes of parameters and buffers as they would be loaded, and of the padding."""
    task: str | None = None
    """The configured task, else the hub's, else the architecture's."""
    repo_id: str | None = None
    """The repository's name as a hub spells it; None if no hub answered."""
    parameters: int = 0
    cuda: bool | None = None
    """True if the runtime's torch finds a GPU; None if it was not asked."""


@dataclass(eq=False)
class Evaluator:
    """Evaluates each model once, and remembers the answers.

    Owns one measuring process per runtime, which fork servers start and which ends after some time without
    work. Where a model goes is the controller's decision.
    """

    idle_s: float = 60.0
    """Seconds without work after which a process ends."""
    measuring: Callable[[Runtime], None] = lambda _: None
    """Called with the runtime of each model that is not known yet."""
    fork_servers: ForkServers = field(default_factory=ForkServers)
    look_for_cuda: bool = False
    """True to have processes say if their torch finds a GPU."""
    _processes: dict[Runtime, _Process] = field(default_factory=dict)
    _known: dict[ModelSpec, asyncio.Task[Measured]] = field(default_factory=dict)

    async def __call__(self, config: DeploymentConfig, runtime: Runtime) -> Measured:
        """Return the memory that `config` needs in `runtime`, or raise an `EvaluationError`."""
        spec = ModelSpec(
            checkpoint=config.checkpoint,
            generation=runtime.generation,
            revision=config.revision,
            task=config.task,
            dtype=config.dtype,
            trust_remote_code=config.trust_remote_code,
        )
        task = self._known.get(spec)
        if task is None:
            self.measuring(runtime)
            process = self._processes.get(runtime)
            if process is None:
                process = self._processes[runtime] = _Process(
                    runtime, self.fork_servers, self.idle_s
                )
            asking = process.ask(spec, look_for_cuda=self.look_for_cuda)
            task = self._known[spec] = asyncio.create_task(asking, name="evaluation")
            task.add_done_callback(lambda done: self._forget_failed(spec, done))
        # A caller that is cancelled leaves the task to the others that wait for it.
        await asyncio.wait([task])
        if task.cancelled():
            raise EvaluationError("the server is stopping")
        found = task.result()
        # The same model under its task is the same model.
        self._known.setdefault(replace(spec, task=found.task), task)
        size = math.ceil(found.size_bytes * (1 + config.padding_factor)) + config.padding_bytes
        return replace(found, size_bytes=size)

    def _forget_failed(self, spec: ModelSpec, done: asyncio.Task[Measured]) -> None:
        if done.cancelled() or done.exception() is not None:
            self._known.pop(spec, None)

    async def stop(self) -> None:
        """End every process. Callers that still wait learn that the server is stopping."""
        await end([task for task in self._known.values() if not task.done()])
        await asyncio.gather(*(process.end() for process in self._processes.values()))


class _EndedError(Exception):
    """The process ended before it answered."""


@dataclass(eq=False)
class _Process:
    """The measuring process of one runtime, started on demand and ended after some time without work."""

    runtime: Runtime
    fork_servers: ForkServers
    idle_s: float
    _conversation: _Conversation | None = None
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _retiring: asyncio.Task[None] | None = None

    async def ask(self, spec: ModelSpec, *, look_for_cuda: bool) -> Measured:
        """Return the process's answer about a model, without padding, or raise an `EvaluationError`."""
        question = {"spec": spec.header(), "cuda": look_for_cuda}
        try:
            try:
                answer = await self._ask_once(question)
            except _EndedError:  # for which another model may be the reason
                answer = await self._ask_once(question)
        except _EndedError as error:
            raise EvaluationError(
                f"the process that was to work out the size of {spec.checkpoint!r} ended"
            ) from error
        except asyncio.TimeoutError as error:
            # The process may be stuck in a model's own code. Its other questions are asked again.
            await self._kill()
            raise EvaluationError(
                f"the size of {spec.checkpoint!r} was not known after {format_duration(_PATIENCE_S)}"
            ) from error
        if "failed" in answer:
            raise EvaluationError(answer["failed"])
        task = answer["task"]
        if task is None and answer["config"] is not None:
            task = read_task(Path(answer["config"]))
        return Measured(
            answer["bytes"], task, answer["repo_id"], answer["parameters"], answer.get("cuda")
        )

    async def _ask_once(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._retiring is not None:
            self._retiring.cancel()
        async with self._starting:
            conversation = self._conversation
            if conversation is None or conversation.ended:
                conversation = self._conversation = await self._start()
        try:
            return await within(conversation.ask(question), _PATIENCE_S)
        finally:
            if not conversation.pending:
                self._retiring = asyncio.create_task(self._retire(), name="evaluation retires")

    async def _start(self) -> _Conversation:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await self.fork_servers.start(
                    self.runtime, _MODULE, theirs, untrusted=False, keep_output=False
                )
        except BaseException as error:
            ours.close()
            if not isinstance(error, OSError):
                raise
            raise EvaluationError(
                f"the process that measures models could not be started: {error}"
            ) from error
        return _Conversation(process, *await asyncio.open_connection(sock=ours))

    async def _retire(self) -> None:
        await asyncio.sleep(self.idle_s)
        await self._kill()

    async def end(self) -> None:
        """End the process."""
        if self._retiring is not None:
            self._retiring.cancel()
        await self._kill()

    async def _kill(self) -> None:
        conversation, self._conversation = self._conversation, None
        if conversation is not None:
            await conversation.kill()


class _Conversation:
    """A process that runs, and the questions that it has not answered."""

    def __init__(
        self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._process = process
        self._reader, self._writer = reader, writer
        self._reading = asyncio.create_task(self._read(), name="evaluations")

    @property
    def ended(self) -> bool:
        """Return True if the process does not answer any more."""
        return self._reading.done()

    async def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the process's answer, or raise `_EndedError`."""
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.pending[number] = answer
        try:
            if self.ended:
                raise _EndedError
            with contextlib.suppress(ConnectionError):  # the process ended: `_read` says so
                self._writer.write(json.dumps({"number": number, **question}).encode() + b"\n")
                await self._writer.drain()
            return await answer
        finally:
            del self.pending[number]

    async def _read(self) -> None:
        with contextlib.suppress(ConnectionError):
            async for line in self._reader:
                answer = json.loads(line)
                asked = self.pending.get(answer.pop("number"))
                if asked is not None and not asked.done():
                    asked.set_result(answer)
        self._writer.close()
        for asked in self.pending.values():
            if not asked.done():
                asked.set_exception(_EndedError())

    async def kill(self) -> None:
        """End the process, and fail its open questions."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._reading
