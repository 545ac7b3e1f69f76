"""What a model takes, before it is loaded: worked out by a process that can build it without weights."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ndif.host.environment import environment
from ndif.host.port import ActorError
from ndif.host.runtimes import Runtime
from ndif.runtime.spec import ModelSpec
from ndif.schema.deployment import DeploymentConfig, task_of
from ndif.tasks import within

logger = logging.getLogger(__name__)

_PATIENCE_S = 300.0
_IDLE_S = 60.0


class EvaluationError(ActorError):
    """What a model takes cannot be known; the message says why, in a sentence."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a model takes."""

    size_bytes: int
    """Parameters and buffers as they would be loaded, and what is set aside beside them."""
    parameters: int
    task: str | None
    """The one that was asked for, else the hub's, else what the architecture is for."""
    repo_id: str | None
    """The name as a hub spells it; None where none was reached."""
    cuda: bool | None = None
    """True if the runtime's torch finds a GPU; None where it was not to look."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What a process says of a model."""

    bytes: int
    parameters: int
    task: str | None
    repo_id: str | None
    cuda: bool | None


class Evaluator:
    """Evaluates models, each once, by one process for each runtime that ends when it has no work."""

    def __init__(
        self,
        idle_s: float = _IDLE_S,
        measuring: Callable[[Runtime], None] = lambda _: None,
        *,
        look_for_cuda: bool = False,
    ) -> None:
        """`measuring` is told of each model that is not known yet.

        `look_for_cuda`: whether the processes say if their torch finds a GPU.
        """
        self._idle_s = idle_s
        self._look_for_cuda = look_for_cuda
        self._measuring = measuring
        self._processes: dict[Runtime, _Process] = {}
        self._known: dict[ModelSpec, asyncio.Task[_Found]] = {}

    async def __call__(self, config: DeploymentConfig, runtime: Runtime) -> Evaluation:
        """What `config` takes in `runtime`.

        Raises:
            EvaluationError: if that cannot be known.
        """
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
            self._measuring(runtime)
            process = self._processes.setdefault(
                runtime, _Process(runtime, self._idle_s, look_for_cuda=self._look_for_cuda)
            )
            task = self._known[spec] = asyncio.create_task(process.ask(spec), name="evaluation")
            task.add_done_callback(lambda done: self._forget_failed(spec, done))
        # Who leaves takes nothing from the others that wait for the same answer.
        await asyncio.wait([task])
        if task.cancelled():
            raise EvaluationError("the server is stopping")
        found = task.result()
        # A model whose task is learnt from this is the same model.
        self._known.setdefault(replace(spec, task=found.task), task)
        size = math.ceil(found.bytes * (1 + config.padding_factor)) + config.padding_bytes
        return Evaluation(size, found.parameters, found.task, found.repo_id, found.cuda)

    def _forget_failed(self, spec: ModelSpec, done: asyncio.Task[_Found]) -> None:
        if done.cancelled() or done.exception() is not None:
            self._known.pop(spec, None)

    async def stop(self) -> None:
        """End every process. Who still waits is told that the server stops."""
        unfinished = [task for task in self._known.values() if not task.done()]
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished)
        await asyncio.gather(*(process.end() for process in self._processes.values()))


class _EndedError(Exception):
    """The process ended before it answered."""


class _Process:
    """One process of a runtime, there while it has work and for some time after."""

    def __init__(self, runtime: Runtime, idle_s: float, *, look_for_cuda: bool) -> None:
        self._runtime = runtime
        self._look_for_cuda = look_for_cuda
        self._idle_s = idle_s
        self._numbers = itertools.count()
        self._speaking: _Speaking | None = None
        self._starting = asyncio.Lock()
        self._retiring: asyncio.Task[None] | None = None

    async def ask(self, spec: ModelSpec) -> _Found:
        """What it says of a model.

        Raises:
            EvaluationError: with its reason, or where it ended twice.
        """
        try:
            return _found(await self._ask_again(spec))
        except _EndedError as error:
            raise EvaluationError(
                f"the process that was to work out the size of {spec.checkpoint!r} ended"
            ) from error
        except asyncio.TimeoutError as error:
            # It may be stuck in a model's own code. What else it was asked is asked again.
            await self._kill()
            raise EvaluationError(
                f"the size of {spec.checkpoint!r} was not known after {_PATIENCE_S:g} s"
            ) from error

    async def _ask_again(self, spec: ModelSpec) -> dict[str, Any]:
        """Its answer: from another process, where the first ended, perhaps of another's model."""
        try:
            return await self._ask_once(spec)
        except _EndedError:
            return await self._ask_once(spec)

    async def _ask_once(self, spec: ModelSpec) -> dict[str, Any]:
        if self._retiring is not None:
            self._retiring.cancel()
        async with self._starting:
            speaking = self._speaking
            if speaking is None or speaking.ended:
                speaking = self._speaking = _Speaking(await self._start(), self._look_for_cuda)
        try:
            return await within(speaking.ask(next(self._numbers), spec), _PATIENCE_S)
        finally:
            if not speaking.pending:
                self._retiring = asyncio.create_task(self._retire(), name="evaluation retires")

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                str(self._runtime.interpreter),
                "-m",
                "ndif.runtime.evaluate",
                env=environment(self._runtime),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise EvaluationError(
                f"the process that works out sizes could not be started: {error}"
            ) from error

    async def _retire(self) -> None:
        await asyncio.sleep(self._idle_s)
        await self._kill()

    async def end(self) -> None:
        """End it."""
        if self._retiring is not None:
            self._retiring.cancel()
        await self._kill()

    async def _kill(self) -> None:
        speaking, self._speaking = self._speaking, None
        if speaking is not None:
            await speaking.kill()


class _Speaking:
    """A process that runs, and the questions that it has not answered."""

    def __init__(self, process: asyncio.subprocess.Process, look_for_cuda: bool) -> None:
        self._look_for_cuda = look_for_cuda
        self.pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._process = process
        self._reading = asyncio.create_task(self._read(), name="evaluations")

    @property
    def ended(self) -> bool:
        """Whether it answers no more."""
        return self._reading.done()

    async def ask(self, number: int, spec: ModelSpec) -> dict[str, Any]:
        """Its answer.

        Raises:
            _EndedError: if it ends first.
        """
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.pending[number] = answer
        question = {"number": number, "spec": spec.header(), "cuda": self._look_for_cuda}
        try:
            if self.ended:
                raise _EndedError
            with contextlib.suppress(ConnectionError):  # it ended: `_read` says so
                self._process.stdin.write(json.dumps(question).encode() + b"\n")
                await self._process.stdin.drain()
            return await answer
        finally:
            del self.pending[number]

    async def _read(self) -> None:
        assert self._process.stdout is not None  # noqa: S101 - it is a pipe
        async for line in self._process.stdout:
            answer = json.loads(line)
            asked = self.pending.get(answer.pop("number"))
            if asked is not None and not asked.done():
                asked.set_result(answer)
        for asked in self.pending.values():
            if not asked.done():
                asked.set_exception(_EndedError())

    async def kill(self) -> None:
        """End it, and those who wait for it hear so."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._reading


def _found(answer: dict[str, Any]) -> _Found:
    """What a process says.

    Raises:
        EvaluationError: if it says why it cannot tell.
    """
    if "failed" in answer:
        raise EvaluationError(answer["failed"])
    task = answer["task"]
    if task is None and answer["config"] is not None:
        task = task_of(Path(answer["config"]))
    return _Found(
        answer["bytes"], answer["parameters"], task, answer["repo_id"], answer.get("cuda")
    )
