"""Answers of operations. Answers with the state of the server are in `ndif.schema`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from ndif.schema.answer import JsonObject, answer
from ndif.schema.deployment_file import AsInFile
from ndif.schema.deployment_settings import SettingDifference
from ndif.schema.job_state import A_JOB
from ndif.schema.model_key import A_MODEL
from ndif.stores.events import OperatorsEvent
from ndif.stores.usage import Group, UsageTotal

_VARIANT = f"{A_MODEL}@0.8"
_REPLICA = "5f0c2a7d"
_SOME_TIME = 1_785_000_000.0
_REPLICA_KEY: JsonObject = {"model_key": _VARIANT, "replica_id": _REPLICA}


@answer(
    example={
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
class Exported:
    """A deployment file of the current deployments; deploying the file restores them."""

    version: Literal[1]
    deployments: Annotated[list[Any], AsInFile()]


@answer()
class EvictedReplica:
    """A replica that was evicted to free memory, or a model that had no replica yet."""

    model: str
    replica_id: str | None
    """Null for a model that was waiting for a place, or that did not load."""


@answer()
class DeployedModel:
    """The current replicas of one model in one nnsight generation."""

    repo_id: str
    generation: str
    replicas: list[str]
    """Ids of the replicas."""
    evicted: list[EvictedReplica]
    problem: str | None
    """The reason, as a sentence, if a replica could not be provided; null otherwise."""
    changes: tuple[SettingDifference, ...] = ()
    """The settings of the model that the operation has changed."""
    is_down: bool = False
    """True if no replica serves for a time, because old and new replicas did not fit at once."""
    down_s: float | None = None
    """Seconds without a serving replica: expected ones if the answer does not wait; null if unknown."""


@answer(
    example={
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
class Outcomes:
    """The outcome for each model."""

    models: list[DeployedModel]


@answer()
class ReplicaKey:
    """One replica."""

    model_key: str
    """The model's key, `@` and the nnsight generation."""
    replica_id: str


@answer()
class EvictedKey:
    """One evicted replica, or a model that had no replica yet."""

    model_key: str
    """The model's key, `@` and the nnsight generation."""
    replica_id: str | None
    """Null for a model that was waiting for a place, or that did not load."""


@answer(example={"evicted": [_REPLICA_KEY]})
class Evicted:
    """The evicted replicas."""

    evicted: list[EvictedKey]
    scheduled: tuple[str, ...] = ()
    """With `all`: models that stay, because the calendar has deployed them."""


@answer(example={"restarted": [_REPLICA_KEY]})
class Restarted:
    """The replicas that are being replaced."""

    restarted: list[ReplicaKey]


@answer(example={"killed": True, "request_id": A_JOB})
class Killed:
    """The job that the operation ended."""

    killed: Literal[True]
    request_id: str


@answer(example={"killed": 2})
class KilledJobs:
    """The jobs that the operation ended."""

    killed: int
    """Number of jobs."""


@answer(
    example={
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
class UsageReport:
    """Sums over ended jobs. Days are in order of time; users and models in order of execution seconds."""

    by: Group
    since: str | None
    """First day that counts; null: all days."""
    usage: list[UsageTotal]


@answer(
    example={
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
class Collected:
    """The number of expired entries by kind."""

    expired: dict[str, int]
    """Number of deleted objects by folder, and of deleted records of jobs."""
    dry_run: bool
    """True if the entries were only counted."""


@answer(example={"retried": [A_JOB]})
class Retried:
    """The requests whose webhooks and mails are sent again."""

    retried: list[str]
    """Ids of the requests."""


@answer(
    example={
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
class Events:
    """The last events, newest first."""

    events: list[OperatorsEvent]


@answer(example={"kept": {"openai-community/gpt2": "deployed"}})
class KeptRepositories:
    """The repositories that `ndif cache` deletes from no machine."""

    kept: dict[str, Literal["deployed", "booked"]]
    """The reason by repository name."""


@answer(example={"stopping": True})
class Stopping:
    """Confirmation that the server stops."""

    stopping: Literal[True]
