"""Answers of operations, as models: what `GET /openapi.json` says of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict

from ndif.placement.replica import DeploymentLevel
from ndif.probe.outcome import Kind
from ndif.queue.replicas import ProcessorStatus
from ndif.schema.deployment_file import AsInFile
from ndif.schema.deployment_settings import SettingDifference
from ndif.schema.status import Status
from ndif.stores.usage import Group

_KEY = (
    "nnsight.modeling.transformers.TransformersModel:"
    '{"repo_id": "openai-community/gpt2", "revision": null, "task": "text-generation"}'
)
_VARIANT = f"{_KEY}@0.8"
A_JOB = _REQUEST = "0d9ff6ea-2f0c-4b1f-8f4e-6c1d5a7b9e21"
_REPLICA = "5f0c2a7d"
_SOME_TIME = 1_785_000_000.0
_GIB = 1024**3
_REPLICA_KEY: dict[str, Any] = {"model_key": _VARIANT, "replica_id": _REPLICA}


def _with(example: Any = None) -> ConfigDict:
    return ConfigDict(
        extra="forbid",
        protected_namespaces=(),
        use_attribute_docstrings=True,
        json_schema_extra=None if example is None else {"examples": [example]},
    )


class Memory(BaseModel):
    """Memory of a machine."""

    model_config = _with()

    bytes: int
    free_bytes: int


class Gpu(Memory):
    """A GPU of a machine."""

    uuid: str | None
    withdrawn: bool
    """True for a GPU that failed again and again, and takes no model for a while."""


class Node(BaseModel):
    """A machine that runs replicas."""

    model_config = _with()

    id: str
    name: str
    gpus: list[Gpu]
    gpu_context_bytes: int
    cpu: Memory


class ReplicaStatus(BaseModel):
    """One copy of a model."""

    model_config = _with()

    replica_id: str
    node_id: str
    level: DeploymentLevel
    state: str
    deployed: float
    gpu_mem_bytes_by_id: dict[str, int]
    on_cpu: bool
    dedicated: bool
    done: int | None
    """Bytes that are loaded, while it loads."""
    total: int | None
    request_id: str | None
    """The job that it runs."""


class PublicProbe(BaseModel):
    """The server's own probes of a model, in one nnsight generation, of the last day."""

    model_config = _with()

    outcome: Kind
    """Outcome of the last one. `loading` and `unsupported` are neither up nor down."""
    at: float
    """Unix time of it."""
    seconds: float | None
    """Seconds from sending the trace to its value; null if no value came."""
    up: bool | None
    """True if the last one that counts succeeded; null if none counted yet."""
    up_share: float | None
    """Share of those that succeeded."""
    probes: int
    """Number of those that count."""


class Probe(PublicProbe):
    """The server's own probes of a model, for its operator."""

    reason: str | None
    """Sentence on the last one; null if it succeeded."""


class DeployedModel(BaseModel):
    """A model in one nnsight generation."""

    model_config = _with()

    model_key: str
    repo_id: str
    revision: str | None
    task: str | None
    generation: str | None
    """None for a model that no replica and no request uses."""
    dedicated: bool
    size_bytes: int | None
    desired_replicas: int
    processor: ProcessorStatus | None
    waiting: int
    problem: str | None
    probe: Probe | None = None
    """None if it is not probed."""
    replicas: list[ReplicaStatus]


class Window(BaseModel):
    """A time in which the calendar has a model dedicated."""

    model_config = _with()

    model: str
    start: str
    end: str


class Schedule(BaseModel):
    """The calendar."""

    model_config = _with()

    source: str | None
    problems: list[str]
    next_change: str | None
    read_every_s: float
    """Seconds after which at the latest a change of the calendar is known."""
    windows: list[Window]


class ServerState(BaseModel):
    """Machines, models, replicas and the calendar."""

    model_config = _with(
        {
            "nodes": [
                {
                    "id": "n1",
                    "name": "gpu-1",
                    "gpus": [
                        {
                            "bytes": 80 * _GIB,
                            "free_bytes": 79 * _GIB,
                            "uuid": "GPU-5c3b1f2e-0000-4a4a-9d57-3b1e0a2b7c11",
                            "withdrawn": False,
                        }
                    ],
                    "gpu_context_bytes": 3 * _GIB // 4,
                    "cpu": {"bytes": 128 * _GIB, "free_bytes": 120 * _GIB},
                }
            ],
            "models": [
                {
                    "model_key": _KEY,
                    "repo_id": "openai-community/gpt2",
                    "revision": None,
                    "task": "text-generation",
                    "generation": "0.8",
                    "dedicated": True,
                    "size_bytes": 593_000_000,
                    "desired_replicas": 1,
                    "processor": "READY",
                    "waiting": 0,
                    "problem": None,
                    "probe": None,
                    "replicas": [
                        {
                            "replica_id": _REPLICA,
                            "node_id": "n1",
                            "level": "HOT",
                            "state": "RUNNING",
                            "deployed": _SOME_TIME,
                            "gpu_mem_bytes_by_id": {"0": 593_000_000},
                            "on_cpu": False,
                            "dedicated": True,
                            "done": None,
                            "total": None,
                            "request_id": None,
                        }
                    ],
                }
            ],
            "problems": [],
            "schedule": {
                "source": None,
                "problems": [],
                "next_change": None,
                "read_every_s": 30.0,
                "windows": [],
            },
        }
    )

    nodes: list[Node]
    models: list[DeployedModel]
    problems: list[str]
    """A sentence for each problem of the server."""
    schedule: Schedule


class RunningRequest(BaseModel):
    """A job that runs."""

    model_config = _with()

    request_id: str
    user: str
    replica_id: str
    since: float
    """Unix time at which it was sent to the replica."""


class WaitingRequest(BaseModel):
    """A job that waits."""

    model_config = _with()

    request_id: str
    user: str
    position: int
    received: float
    expected_start_s: float | None


class ModelQueue(BaseModel):
    """The queue of a model in one nnsight generation."""

    model_config = _with()

    model_key: str
    repo_id: str
    generation: str
    processor: ProcessorStatus
    running: list[RunningRequest]
    waiting: list[WaitingRequest]


class Queues(BaseModel):
    """Running and waiting jobs, model by model."""

    model_config = _with(
        {
            "models": [
                {
                    "model_key": _KEY,
                    "repo_id": "openai-community/gpt2",
                    "generation": "0.8",
                    "processor": "BUSY",
                    "running": [
                        {
                            "request_id": _REQUEST,
                            "user": "ada@example.org",
                            "replica_id": _REPLICA,
                            "since": _SOME_TIME,
                        }
                    ],
                    "waiting": [],
                }
            ]
        }
    )

    models: list[ModelQueue]


class Exported(BaseModel):
    """A deployment file that deploys again what is deployed now."""

    model_config = _with(
        {
            "version": 1,
            "deployments": [
                {
                    "repo_id": "openai-community/gpt2",
                    "task": "text-generation",
                    "dedicated": True,
                }
            ],
        }
    )

    version: Literal[1]
    deployments: Annotated[list[Any], AsInFile()]


class EvictedReplica(BaseModel):
    """A replica that made room, or a model of which none was there yet."""

    model_config = _with()

    model: str
    replica_id: str | None
    """Null for a model that was on its way, or did not load."""


class Outcome(BaseModel):
    """Replicas that one model in one nnsight generation has now."""

    model_config = _with()

    repo_id: str
    generation: str
    replicas: list[str]
    """Ids of the replicas."""
    evicted: list[EvictedReplica]
    problem: str | None
    """A sentence, if not every replica could be had."""
    changes: list[SettingDifference] = []
    """The settings of the model that this has changed."""
    is_down: bool = False
    """True if no replica serves for a time: there was no room for old and new ones at once."""
    down_s: float | None = None
    """Seconds of that time, expected ones where the answer does not wait; null if they are not known."""


class Outcomes(BaseModel):
    """The outcome for each model."""

    model_config = _with(
        {
            "models": [
                {
                    "repo_id": "openai-community/gpt2",
                    "generation": "0.8",
                    "replicas": [_REPLICA],
                    "evicted": [],
                    "problem": None,
                    "changes": [],
                    "is_down": False,
                    "down_s": None,
                }
            ]
        }
    )

    models: list[Outcome]


class ReplicaKey(BaseModel):
    """One replica."""

    model_config = _with()

    model_key: str
    """The model's key, `@` and the nnsight generation."""
    replica_id: str


class EvictedKey(BaseModel):
    """One replica that was evicted, or a model of which none was there yet."""

    model_config = _with()

    model_key: str
    """The model's key, `@` and the nnsight generation."""
    replica_id: str | None
    """Null for a model that was on its way, or did not load."""


class Evicted(BaseModel):
    """Replicas that were taken off their devices."""

    model_config = _with({"evicted": [_REPLICA_KEY]})

    evicted: list[EvictedKey]
    scheduled: list[str] = []
    """With `all`: models that the calendar keeps."""


class Restarted(BaseModel):
    """Replicas that others replace."""

    model_config = _with({"restarted": [_REPLICA_KEY]})

    restarted: list[ReplicaKey]


class Killed(BaseModel):
    """A job that is ended."""

    model_config = _with({"killed": True, "request_id": _REQUEST})

    killed: Literal[True]
    request_id: str


class KilledJobs(BaseModel):
    """Jobs that are ended."""

    model_config = _with({"killed": 2})

    killed: int
    """Number of jobs."""


class OwnJob(BaseModel):
    """A job, as its user is told of it."""

    model_config = _with()

    id: str
    model: str
    """Repository, and the revision behind an `@` where one was named."""
    generation: str
    status: Status | Literal["CANCELLED", "ENDED"]
    """CANCELLED: its user or an operator ended it, or its client left. ENDED: the process that ran it is
    gone."""
    received: float | None
    dispatched: float | None
    """Unix time at which it was sent to a replica; null if it never was."""
    ended: float | None
    """Null for a job that waits or runs."""
    position: int | None = None
    """Place of a job that waits."""
    expected_start_s: float | None = None
    """Seconds until a job that waits may start; null where none has run yet."""
    execution_s: float | None = None
    """Seconds that the block of an ended job ran, to its end or until it was stopped."""
    reason: str | None = None
    """The sentence for which a job was cancelled; empty for one that was not."""
    result_bytes: int | None = None
    """Size of an ended job's result, as it was sent or downloaded."""


class Job(OwnJob):
    """A job."""

    user: str


OWN_JOBS: list[dict[str, Any]] = [
    {
        "id": _REQUEST,
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
"""Two jobs of one user, one that waits and one that has ended, for examples."""


class Jobs(BaseModel):
    """The unfinished jobs, the newest first, and those that ended last."""

    model_config = _with({"jobs": [{**job, "user": "ada@example.org"} for job in OWN_JOBS]})

    jobs: list[Job]


class TraceStep(BaseModel):
    """A step of a job. Steps of different parts of the server overlap."""

    model_config = _with()

    name: str
    by: str
    """The part of the server that took it: gateway, queue, replica or runner."""
    start: float
    """Unix seconds, by the clock of the machine on which it was."""
    end: float
    """The present for a step that has not ended."""


class OwnTrace(BaseModel):
    """The steps of a job, as its user is told of them."""

    model_config = _with()

    id: str
    model: str
    """Repository, and the revision behind an `@` where one was named."""
    generation: str
    status: Status | Literal["CANCELLED", "ENDED"]
    """CANCELLED: its user or an operator ended it, or its client left. ENDED: the process that ran it is
    gone."""
    reason: str
    """The sentence for which a job was cancelled; empty for one that was not."""
    received: float
    ended: float | None
    """Null for a job that waits or runs."""
    traceparent: str
    """The trace of which the client's request was a part, as W3C Trace Context has it; empty for none."""
    steps: list[TraceStep]
    """In the order of their beginning."""


OWN_TRACE: dict[str, Any] = {
    "id": _REQUEST,
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


class Trace(OwnTrace):
    """The steps of a job."""

    model_config = _with({**OWN_TRACE, "user": "ada@example.org"})

    user: str


class UsageTotal(BaseModel):
    """The sum over the ended jobs of a user, a model or a day."""

    model_config = _with()

    name: str
    """The user, the model, or the day as YYYY-MM-DD in UTC."""
    jobs: int
    errors: int
    """Jobs among them that failed."""
    execution_s: float
    result_bytes: int


class Usage(BaseModel):
    """Sums over ended jobs; days are in order, others by their seconds."""

    model_config = _with(
        {
            "by": "model",
            "since": "2026-07-01",
            "usage": [
                {
                    "name": "openai-community/gpt2",
                    "jobs": 12,
                    "errors": 1,
                    "execution_s": 3.72,
                    "result_bytes": 49152,
                }
            ],
        }
    )

    by: Group
    since: str | None
    """First day that counts; null: all count."""
    usage: list[UsageTotal]


class Collected(BaseModel):
    """The number of things whose time is over, by their kind."""

    model_config = _with(
        {
            "expired": {
                "results": 3,
                "responses": 5,
                "ends": 2,
                "requests": 0,
                "owners": 0,
                "records": 40,
            },
            "dry_run": False,
        }
    )

    expired: dict[str, int]
    """Deleted objects by their folder, and deleted records of jobs."""
    dry_run: bool
    """True if they were only counted."""


class ListedCallback(BaseModel):
    """A call-back that was not delivered yet."""

    model_config = _with()

    request_id: str
    to: str
    """Address of the call-back, without what may be secret in it."""
    status: str
    """Status of the job that it tells of."""
    state: Literal["waiting", "given up"]
    attempts: int
    created: float
    due: float
    """Unix time of the next attempt; of the last one if it was given up."""
    problem: str
    """Reason for which the last attempt failed; empty if there was none."""


class Callbacks(BaseModel):
    """The call-backs that wait, and those that were given up; not more than some of many are listed."""

    model_config = _with(
        {
            "waiting": 0,
            "given_up": 1,
            "callbacks": [
                {
                    "request_id": _REQUEST,
                    "to": "https://lab.example.org/…",
                    "status": "COMPLETED",
                    "state": "given up",
                    "attempts": 12,
                    "created": _SOME_TIME,
                    "due": _SOME_TIME + 86_400,
                    "problem": "it answered 500",
                }
            ],
        }
    )

    waiting: int
    given_up: int
    callbacks: list[ListedCallback]


class Retried(BaseModel):
    """Requests whose call-backs are made again."""

    model_config = _with({"retried": [_REQUEST]})

    retried: list[str]
    """Ids of the requests."""


class AlertCause(BaseModel):
    """One thing that is or was wrong."""

    model_config = _with()

    kind: str
    """Kind of the cause, as `no-replica`."""
    subject: str
    """The model, machine, GPU or store that it is about."""
    sentence: str
    since: float
    over: float | None
    """Unix time from which it is no longer so; null while it is."""


class AlertIncident(BaseModel):
    """Causes that are told together, from the first message to the one that says they are over."""

    model_config = _with()

    id: str
    kind: str
    severity: Literal["critical", "warning"]
    opened: float
    resolved: float | None
    """Null while a cause of it holds."""
    causes: list[AlertCause]


class AlertDestination(BaseModel):
    """A webhook or mailbox that gets alerts."""

    model_config = _with()

    to: str
    """Address without what is secret in it."""
    form: Literal["slack", "discord", "json", "email"]
    waiting: int
    """Number of messages that it was not brought yet."""
    problem: str | None
    """Reason for which the last attempt failed; null if it did not."""


class OperatorsEvent(BaseModel):
    """One event of an operator's log."""

    model_config = _with()

    at: float
    """Unix time; of events that are told together, the last one's."""
    kind: str
    """Word for the event, such as `deployed` or `failed login`."""
    subject: str
    """Model, key, tier or address that it is about."""
    text: str
    """Sentence on it; may be empty."""
    by: str
    """`login`, `command line`, `token`, `calendar`, `autoscaler` or `server`."""
    count: int
    """Number of events that are told together."""


class Events(BaseModel):
    """The last events, the newest first."""

    model_config = _with(
        {
            "events": [
                {
                    "at": _SOME_TIME,
                    "kind": "deployed",
                    "subject": "openai-community/gpt2",
                    "text": "1 replica for nnsight 0.8.",
                    "by": "command line",
                    "count": 1,
                }
            ]
        }
    )

    events: list[OperatorsEvent]


class KeptRepositories(BaseModel):
    """The repositories that `ndif cache` deletes from no machine."""

    model_config = _with({"kept": {"openai-community/gpt2": "deployed"}})

    kept: dict[str, Literal["deployed", "booked"]]
    """Reason by name."""


class Alerts(BaseModel):
    """Incidents that are open, those of the last day that are over, and who is told."""

    model_config = _with(
        {
            "open": [
                {
                    "id": "1f3a09c2",
                    "kind": "store-away",
                    "severity": "critical",
                    "opened": _SOME_TIME,
                    "resolved": None,
                    "causes": [
                        {
                            "kind": "store-away",
                            "subject": "broker",
                            "sentence": "The broker does not answer: jobs are refused, and those "
                            "that run go on.",
                            "since": _SOME_TIME - 60,
                            "over": None,
                        }
                    ],
                }
            ],
            "resolved": [],
            "destinations": [
                {
                    "to": "https://hooks.slack.com/…",
                    "form": "slack",
                    "waiting": 0,
                    "problem": None,
                }
            ],
        }
    )

    open: list[AlertIncident]
    resolved: list[AlertIncident]
    """The last first."""
    destinations: list[AlertDestination]


class TestedAlertDestination(BaseModel):
    """The outcome of a test message to one destination."""

    model_config = _with()

    to: str
    form: Literal["slack", "discord", "json", "email"]
    problem: str | None
    """Null if it took the message."""


class TestedAlerts(BaseModel):
    """The outcome of a test message to each destination."""

    model_config = _with(
        {
            "destinations": [
                {"to": "https://hooks.slack.com/…", "form": "slack", "problem": None},
                {
                    "to": "o…@example.org",
                    "form": "email",
                    "problem": "the mail server answered 451",
                },
            ]
        }
    )

    destinations: list[TestedAlertDestination]


class Stopping(BaseModel):
    """The server stops."""

    model_config = _with({"stopping": True})

    stopping: Literal[True]
