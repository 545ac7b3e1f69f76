"""The state of queues and of waiting, running and ended jobs, with their steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, cast

from pydantic import SerializerFunctionWrapHandler, model_serializer

from ndif.schema.answer import JsonObject, answer, project
from ndif.schema.job_record import JobRecord
from ndif.schema.model_key import A_MODEL
from ndif.schema.states import ProcessorStatus
from ndif.schema.status import Status
from ndif.schema.step import Step, in_order

_KEY = str(A_MODEL)
A_JOB = "0d9ff6ea-2f0c-4b1f-8f4e-6c1d5a7b9e21"
"""The job of the examples."""
_SOME_TIME = 1_785_000_000.0
_Ended = Literal["CANCELLED", "ENDED"]
_JobStatus = Status | _Ended


def _status(record: JobRecord) -> _JobStatus:
    return (
        Status(record.status)
        if record.status in Status.__members__
        else cast(_Ended, record.status)
    )


@answer()
class RunningRequest:
    """A running job."""

    request_id: str
    user: str
    replica_id: str
    since: float
    """Unix time of its dispatch to the replica."""


@answer()
class WaitingRequest:
    """A waiting job. `received` is in Unix seconds, `expected_start_s` in seconds from now."""

    request_id: str
    user: str
    position: int
    received: float
    expected_start_s: float | None


@answer()
class QueueState:
    """The queue of a model in one nnsight generation."""

    model_key: str
    repo_id: str
    generation: str
    processor: ProcessorStatus
    running: list[RunningRequest]
    waiting: list[WaitingRequest]


@answer(
    example={
        "models": [
            {
                "model_key": _KEY,
                "repo_id": "openai-community/gpt2",
                "generation": "0.8",
                "processor": "BUSY",
                "running": [
                    {
                        "request_id": A_JOB,
                        "user": "ada@example.org",
                        "replica_id": "5f0c2a7d",
                        "since": _SOME_TIME,
                    }
                ],
                "waiting": [],
            }
        ]
    }
)
class Queues:
    """Running and waiting jobs by model."""

    models: list[QueueState]


_OF_UNFINISHED = frozenset(("position", "expected_start_s"))
_OF_ENDED = frozenset(("execution_s", "reason", "result_bytes"))


@answer()
class OwnJob:
    """A job as its user sees it."""

    id: str
    model: str
    """Repository, followed by `@` and the revision if one was named."""
    generation: str
    status: _JobStatus
    """CANCELLED: its user or an operator ended the job, or its client disconnected. ENDED: the process that
    ran the job is gone."""
    received: float | None
    dispatched: float | None
    """Unix time of its dispatch to a replica; null if it was not dispatched."""
    ended: float | None
    """Unix time of its end; null for a waiting or running job."""
    position: int | None = None
    """Position of a waiting job in the queue."""
    expected_start_s: float | None = None
    """Expected seconds until a waiting job starts; null if no job has run yet."""
    execution_s: float | None = None
    """Seconds that the block of an ended job ran until it ended or was stopped."""
    reason: str | None = None
    """The reason why a job was cancelled, as a sentence; empty for other jobs."""
    result_bytes: int | None = None
    """Size of an ended job's result as sent or downloaded."""

    @model_serializer(mode="wrap")
    def _serialize(self, handler: SerializerFunctionWrapHandler) -> JsonObject:
        """Leave out the fields that apply only to ended jobs, or only to unfinished ones."""
        absent = _OF_ENDED if self.ended is None else _OF_UNFINISHED
        return {name: value for name, value in handler(self).items() if name not in absent}


@answer()
class JobState(OwnJob):
    """A job and its user."""

    user: str

    @classmethod
    def of(cls, record: JobRecord) -> JobState:
        """Return the state of an ended job."""
        return project(cls, record, status=_status(record))

    @property
    def own(self) -> OwnJob:
        """The job as its user sees it."""
        return project(OwnJob, self)


OWN_JOBS: list[JsonObject] = [
    {
        "id": A_JOB,
        "model": "openai-community/gpt2",
        "generation": "0.8",
        "status": "QUEUED",
        "received": _SOME_TIME,
        "dispatched": None,
        "ended": None,
        "position": 2,
        "expected_start_s": 12.5,
    },
    {
        "id": "7c0c52d8-5a0e-4f3b-8a43-0d7c0e4c2a90",
        "model": "openai-community/gpt2",
        "generation": "0.8",
        "status": "COMPLETED",
        "received": _SOME_TIME - 60,
        "dispatched": _SOME_TIME - 59,
        "ended": _SOME_TIME - 58,
        "execution_s": 0.31,
        "reason": "",
        "result_bytes": 4096,
    },
]
"""A waiting and an ended job of one user, for examples."""


@answer(example={"jobs": [{**job, "user": "ada@example.org"} for job in OWN_JOBS]})
class JobList:
    """The unfinished jobs, newest first, and the jobs that ended last."""

    jobs: list[JobState]


@answer()
class TraceStep:
    """A step of a job. Steps of different parts of the server may overlap."""

    name: str
    by: str
    """The part of the server that performed the step: gateway, queue, replica or runner."""
    start: float
    """Unix time by the clock of the machine that performed the step."""
    end: float
    """Unix time of the end; the present for an unfinished step."""

    @classmethod
    def of(cls, steps: Iterable[Step]) -> list[TraceStep]:
        """Return a job's steps in the order of their start."""
        return [cls(**step._asdict()) for step in in_order(steps)]


@answer()
class OwnTrace:
    """A job and its steps as its user sees them."""

    id: str
    model: str
    """Repository, followed by `@` and the revision if one was named."""
    generation: str
    status: _JobStatus
    """CANCELLED: its user or an operator ended the job, or its client disconnected. ENDED: the process that
    ran the job is gone."""
    reason: str
    """The reason why a job was cancelled, as a sentence; empty for other jobs."""
    received: float
    ended: float | None
    """Unix time of its end; null for a waiting or running job."""
    traceparent: str
    """The W3C Trace Context `traceparent` of the client's request; empty without one."""
    steps: list[TraceStep]
    """Steps in the order of their start."""


OWN_TRACE: JsonObject = {
    "id": A_JOB,
    "model": "openai-community/gpt2",
    "generation": "0.8",
    "status": "COMPLETED",
    "reason": "",
    "received": _SOME_TIME,
    "ended": _SOME_TIME + 0.45,
    "traceparent": "",
    "steps": [
        {"name": name, "by": by, "start": _SOME_TIME + start, "end": _SOME_TIME + end}
        for name, by, start, end in (
            ("receive", "gateway", -0.01, 0.0),
            ("received", "queue", 0.0, 0.01),
            ("queued", "queue", 0.01, 0.1),
            ("running", "replica", 0.12, 0.43),
            ("execute", "runner", 0.13, 0.42),
            ("deliver", "queue", 0.43, 0.45),
        )
    ],
}
"""The steps of one job, for examples."""


@answer(example={**OWN_TRACE, "user": "ada@example.org"})
class Trace(OwnTrace):
    """A job, its steps and its user."""

    user: str

    @classmethod
    def of(cls, record: JobRecord) -> Trace:
        """Return the steps of an ended job."""
        return project(cls, record, status=_status(record), steps=TraceStep.of(record.steps))
