"""What a model takes, before it is loaded: worked out by a process that can build it without weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path

from ndif.host.environment import environment
from ndif.host.port import ActorError
from ndif.host.runtimes import Runtime
from ndif.runtime.spec import ModelSpec
from ndif.schema.deployment import DeploymentConfig, task_of

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


@dataclass(frozen=True, slots=True)
class _Found:
    """What a process says of a model."""

    bytes: int
    parameters: int
    task: str | None
    repo_id: str | None


class Evaluator:
    """Evaluates models, each once, by one process for each runtime that ends when it has no work."""

    def __init__(self, idle_s: float = _IDLE_S) -> None:
        self._idle_s = idle_s
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
            process = self._processes.setdefault(runtime, _Process(runtime, self._idle_s))
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
        return Evaluation(size, found.parameters, found.task, found.repo_id)

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


class _Process:
    """One process of a runtime, there while it has work and for some time after."""

    def __init__(self, runtime: Runtime, idle_s: float) -> None:
        self._runtime = runtime
        self._idle_s = idle_s
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._retiring: asyncio.Task[None] | None = None

    async def ask(self, spec: ModelSpec) -> _Found:
        """What it says of a model.

        Raises:
            EvaluationError: with its reason, or where it ended.
        """
        async with self._turn:
            if self._retiring is not None:
                self._retiring.cancel()
            try:
                return await asyncio.wait_for(self._answer(spec), _PATIENCE_S)
            except asyncio.TimeoutError as error:
                await self._kill()
                raise EvaluationError(
                    f"the size of {spec.checkpoint!r} was not known after {_PATIENCE_S:g} s"
                ) from error
            except asyncio.CancelledError:
                # What it is about to say would be taken for the answer to another question.
                await self._kill()
                raise
            finally:
                self._retiring = asyncio.create_task(self._retire(), name="evaluation retires")

    async def _answer(self, spec: ModelSpec) -> _Found:
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await self._start()
        assert process.stdin is not None  # noqa: S101 - they are pipes
        assert process.stdout is not None  # noqa: S101
        with contextlib.suppress(ConnectionError):  # it ended: the answer says so
            process.stdin.write(json.dumps(spec.header()).encode() + b"\n")
            await process.stdin.drain()
        line = await process.stdout.readline()
        if not line:
            await self._kill()
            raise EvaluationError(
                f"the process that was to work out the size of {spec.checkpoint!r} ended"
            )
        answer = json.loads(line)
        if "failed" in answer:
            raise EvaluationError(answer["failed"])
        task = answer["task"]
        if task is None and answer["config"] is not None:
            task = task_of(Path(answer["config"]))
        return _Found(answer["bytes"], answer["parameters"], task, answer["repo_id"])

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
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
