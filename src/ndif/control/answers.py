"""Answers of operations, as models: what `GET /openapi.json` says of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict

from ndif.schema.deployment_file import AsInFile
from ndif.schema.deployment_settings import SettingDifference
from ndif.schema.job_state import A_JOB
from ndif.schema.model_key import A_MODEL
from ndif.stores.usage import Group

_VARIANT = f"{A_MODEL}@0.8"
_REQUEST = A_JOB
_REPLICA = "5f0c2a7d"
_SOME_TIME = 1_785_000_000.0
_REPLICA_KEY: dict[str, Any] = {"model_key": _VARIANT, "replica_id": _REPLICA}


def _with(example: Any = None) -> ConfigDict:
    return ConfigDict(
        extra="forbid",
        protected_namespaces=(),
        use_attribute_docstrings=True,
        json_schema_extra=None if example is None else {"examples": [example]},
    )


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
