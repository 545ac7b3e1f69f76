"""Measurement of a model's memory by a process that builds it without weights."""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ndif.config.units import format_duration
from ndif.host.environment import environment
from ndif.host.fork_server import ForkServers
from ndif.host.measurement_slots import MeasurementSlots
from ndif.host.port import ActorError
from ndif.host.runtimes import Runtime
from ndif.runtime.sizing import (
    Failure,
    ModelSize,
    OutlineQuestion,
    RepositoryFacts,
    SizeQuestion,
)
from ndif.runtime.spec import ModelSpec
from ndif.runtime.typed_json import from_json, to_json
from ndif.sandbox.confinement.confinement import Mode
from ndif.schema.deployment import Defaults, DeploymentConfig, read_task
from ndif.schema.structure import ModelStructure, read_structure
from ndif.tasks import end, in_daemon_thread, within

_OUTLINE, _MEASURE = "ndif.runtime.weights.checkpoint_metadata", "ndif.runtime.measure"
_OUTLINES_AT_ONCE, _MEASURED_AT_ONCE = 8, 4
_FIRST_ATTEMPT_S = 5.0
_REFUSED_S = 600.0
"""Seconds for which a commit that could not be measured is refused without another attempt."""
_REFUSED_AFTER_TIMEOUT_S = 60.0
"""The same after a timeout: the machine may be less busy at the next attempt."""
_MAX_REFUSALS = 1000
_MAX_ANSWER_BYTES = 1 << 18

Question = OutlineQuestion | SizeQuestion
T = TypeVar("T")


class EvaluationError(ActorError):
    """A model cannot be measured; the message gives the reason in a sentence."""


def spec_of(config: DeploymentConfig, generation: str, **further: Any) -> ModelSpec:
    """Return the spec of a deployment's model in a generation, with `further` fields."""
    return ModelSpec(
        config.checkpoint,
        generation,
        config.revision,
        config.task,
        trust_remote_code=config.trust_remote_code,
        **further,
    )


@dataclass(frozen=True, slots=True)
class Measured:
    """The memory that a replica needs, and facts of its model before it is loaded."""

    size_bytes: int
    """Bytes of parameters and buffers as loaded, padding included."""
    task: str | None = None
    """The configured task, else the architecture's."""
    repo_id: str | None = None
    """The repository's name as a hub spells it; None if no hub answered."""
    parameters: int = 0
    gated: bool = False
    """True if the repository is gated or private: the hub serves its files to permitted accounts only."""
    structure: ModelStructure | None = None
    """The model's tree of modules; None if it could not be described."""
    cuda: bool | None = None
    """True if the runtime's torch finds a GPU; None if the evaluator does not look for one."""
    on_branch: bool = True
    """False if the hub says that no branch or tag contains the commit."""


@dataclass(eq=False)
class Evaluator:
    """Measures each model once, and remembers the answers.

    Two processes, started by fork servers, measure a model one after the other. The first reaches the hub
    with the operator's account, downloads a repository's configs and the headers of its weights, but reads
    none of these files. The second reads the files, confined to their folder. Both have limits of memory
    and time, and only a few of each run at once. The controller decides placement.
    """

    measuring: Callable[[Runtime], None] = lambda _: None
    """Called with the runtime before a new model is measured."""
    fork_servers: ForkServers = field(default_factory=ForkServers)
    look_for_cuda: bool = False
    """True to have processes report whether their torch finds a GPU."""
    sandbox: Mode = "best-effort"
    """Confinement of the second process, unless the operator trusts the repository's code."""
    pickled: bool = False
    """True to measure models that have only pickled weights, if the server loads such weights."""
    untrusted: bool = True
    """False if the only fork server has the operator's environment."""
    defaults: Defaults = field(default_factory=Defaults)
    """The settings of models whose deployment does not give them."""
    patience_s: float = 60.0
    """Seconds that a process may take for one model."""
    _outlining: MeasurementSlots = field(
        default_factory=lambda: MeasurementSlots(_OUTLINES_AT_ONCE, _FIRST_ATTEMPT_S)
    )
    _reading: MeasurementSlots = field(
        default_factory=lambda: MeasurementSlots(_MEASURED_AT_ONCE, _FIRST_ATTEMPT_S)
    )
    _evaluations: dict[ModelSpec, asyncio.Task[Measured]] = field(default_factory=dict)
    _refused: dict[tuple[ModelSpec, str], tuple[float, str]] = field(default_factory=dict)
    """End of a commit's refusal (by `time.monotonic`) and its reason, the oldest first."""

    async def __call__(self, config: DeploymentConfig, runtime: Runtime) -> Measured:
        """Return the memory that `config` needs in `runtime`, or raise an `EvaluationError`."""
        dtype = self.defaults.dtype_of(config)
        spec = spec_of(config, runtime.generation, dtype=dtype, pickled=self.pickled)
        task = self._evaluations.get(spec)
        if task is None:
            self.measuring(runtime)
            evaluation = self._evaluate(spec, runtime)
            task = self._evaluations[spec] = asyncio.create_task(evaluation, name="evaluation")
            task.add_done_callback(lambda finished: self._forget_failed(spec, finished))
        # Unlike `await task`, this leaves the task to other waiting callers if this one is cancelled.
        await asyncio.wait([task])
        if task.cancelled():
            raise EvaluationError("the server is stopping")
        measured = task.result()
        # A later request that names the task means the same model.
        self._evaluations.setdefault(replace(spec, task=measured.task), task)
        return replace(measured, size_bytes=self.defaults.padded(measured.size_bytes, config))

    def _forget_failed(self, spec: ModelSpec, task: asyncio.Task[Measured]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._evaluations.pop(spec, None)

    async def stop(self) -> None:
        """End every process; waiting callers get an `EvaluationError`."""
        await end([task for task in self._evaluations.values() if not task.done()])

    async def _evaluate(self, spec: ModelSpec, runtime: Runtime) -> Measured:
        """Return a model's measurements without padding, or raise an `EvaluationError`."""
        # A folder has no commit, so it is never refused: its operator may repair it at any time.
        facts = RepositoryFacts(spec.checkpoint)
        owner = "" if spec.is_folder else spec.checkpoint.partition("/")[0]
        with _scratch_folder() as scratch:
            if not spec.is_folder:
                # A mistyped name must not wait for a fork server, which may take many seconds to start.
                why = await self._outlining.run(owner, lambda: _hub_refusal(spec))
                if why is not None:
                    raise EvaluationError(why)
                outline_question = OutlineQuestion(spec, scratch, environment(runtime))
                facts = await self._outlining.run(
                    owner,
                    lambda: self._query(runtime, _OUTLINE, spec, outline_question, RepositoryFacts),
                )
            commit = facts.commit
            config = Path(facts.folder, "config.json")
            task = spec.task or read_task(config, facts.card)
            if commit is not None:
                self._raise_if_refused(spec, commit)
            question = SizeQuestion(
                replace(spec, task=task),
                facts.folder,
                self.look_for_cuda,
                "off" if spec.trust_remote_code else self.sandbox,
            )
            try:
                size = await self._reading.run(
                    owner,
                    lambda: self._query(runtime, _MEASURE, spec, question, ModelSize),
                )
            except _RefusedError as error:
                if commit is not None:
                    self._remember_refusal(spec, commit, error)
                raise
        structure = read_structure(size.structure)
        if structure is not None and facts.tokenizer is not None:
            fields = {
                "license": facts.license or structure.license,
                "tokenizer": facts.tokenizer,
            }
            structure = structure.model_copy(update=fields)
        return Measured(
            size.bytes,
            task,
            facts.repo_id,
            size.parameters,
            facts.gated,
            structure,
            size.cuda,
            facts.on_branch,
        )

    def _raise_if_refused(self, spec: ModelSpec, commit: str) -> None:
        until, why = self._refused.get((spec, commit), (-math.inf, ""))
        if time.monotonic() < until:
            raise EvaluationError(why)

    def _remember_refusal(self, spec: ModelSpec, commit: str, error: _RefusedError) -> None:
        self._refused.pop((spec, commit), None)
        self._refused[spec, commit] = time.monotonic() + error.for_s, str(error)
        if len(self._refused) > _MAX_REFUSALS:
            del self._refused[next(iter(self._refused))]

    async def _query(
        self,
        runtime: Runtime,
        module: str,
        spec: ModelSpec,
        question: Question,
        kind: type[T],
    ) -> T:
        """Return the answer of a new process, or raise an `EvaluationError`."""
        try:
            try:
                answer = await self._query_once(runtime, module, question, kind)
            except _EndedError:  # its fork server may have ended
                answer = await self._query_once(runtime, module, question, kind)
        except _EndedError as error:
            raise _RefusedError(
                f"the process that measures {spec.checkpoint!r} ended before it answered"
            ) from error
        except asyncio.TimeoutError as error:
            raise _RefusedError(
                f"the size of {spec.checkpoint!r} was not known after {format_duration(self.patience_s)}",
                _REFUSED_AFTER_TIMEOUT_S,
            ) from error
        if isinstance(answer, Failure):
            raise _RefusedError(answer.failed)
        return answer

    async def _query_once(
        self, runtime: Runtime, module: str, question: Question, kind: type[T]
    ) -> T | Failure:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await self.fork_servers.start(
                    runtime, module, theirs, untrusted=self.untrusted, keep_output=False
                )
        except BaseException as error:
            ours.close()
            if not isinstance(error, OSError):
                raise
            raise EvaluationError(
                f"the process that measures models could not be started: {error}"
            ) from error
        try:
            source, writer = await asyncio.open_connection(sock=ours, limit=_MAX_ANSWER_BYTES)
            with contextlib.closing(writer):
                return await within(_exchange(source, writer, question, kind), self.patience_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _hub_refusal(spec: ModelSpec) -> str | None:
    """Return the reason why the hub refuses a repository to this server; None without a refusal."""

    def check() -> str | None:
        from ndif.runtime.weights.fetch import unavailable  # imports the hub's library

        return unavailable(spec)

    # If the hub does not answer, the thread is left behind and ends with the process.
    return await in_daemon_thread(check)


@contextlib.contextmanager
def _scratch_folder() -> Iterator[str]:
    """Yield an empty folder and remove it afterwards; raise an `EvaluationError` if there is no room."""
    try:
        folder = tempfile.mkdtemp(prefix="ndif-outline-")
    except OSError as error:
        raise EvaluationError(f"there is no room to measure a model: {error}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _RefusedError(EvaluationError):
    """A process could not measure the model."""

    def __init__(self, why: str, for_s: float = _REFUSED_S) -> None:
        super().__init__(why)
        self.for_s = for_s
        """Seconds for which the refusal stands."""


class _EndedError(Exception):
    """The process ended before it answered."""


async def _exchange(
    source: asyncio.StreamReader, writer: asyncio.StreamWriter, question: Question, kind: type[T]
) -> T | Failure:
    """Return a process's answer to a question, or raise `_EndedError`."""
    try:
        writer.write(to_json(question) + b"\n")
        await writer.drain()
        answer = await source.readline()
        with contextlib.suppress(ValueError):
            return from_json(Failure, answer)
        return from_json(kind, answer)
    except (ConnectionError, ValueError) as error:  # it ended, or its answer is malformed
        raise _EndedError from error
