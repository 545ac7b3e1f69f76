"""Answers of operations; those with the state of the server are in `ndif.schema`."""

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
    """A deployment file that deploys again what is deployed now."""

    version: Literal[1]
    deployments: Annotated[list[Any], AsInFile()]


@answer()
class EvictedReplica:
    """A replica that made room, or a model of which none was there yet."""

    model: str
    replica_id: str | None
    """Null for a model that was on its way, or did not load."""


@answer()
class DeployedModel:
    """Replicas that one model in one nnsight generation has now."""

    repo_id: str
    generation: str
    replicas: list[str]
    """Ids of the replicas."""
    evicted: list[EvictedReplica]
    problem: str | None
    """A sentence, if not every replica could be had."""
    changes: tuple[SettingDifference, ...] = ()
    """The settings of the model that this has changed."""
    is_down: bool = False
    """True if no replica serves for a time: there was no room for old and new ones at once."""
    down_s: float | None = None
    """Seconds of that time, expected ones where the answer does not wait; null if they are not known."""


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
    """One replica that was evicted, or a model of which none was there yet."""

    model_key: str
    """The model's key, `@` and the nnsight generation."""
    replica_id: str | None
    """Null for a model that was on its way, or did not load."""


@answer(example={"evicted": [_REPLICA_KEY]})
class Evicted:
    """Replicas that were taken off their devices."""

    evicted: list[EvictedKey]
    scheduled: tuple[str, ...] = ()
    """With `all`: models that the calendar keeps."""


@answer(example={"restarted": [_REPLICA_KEY]})
class Restarted:
    """Replicas that others replace."""

    restarted: list[ReplicaKey]


@answer(example={"killed": True, "request_id": A_JOB})
class Killed:
    """A job that is ended."""

    killed: Literal[True]
    request_id: str


@answer(example={"killed": 2})
class KilledJobs:
    """Jobs that are ended."""

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
    """Sums over ended jobs; days are in order, others by their seconds."""

    by: Group
    since: str | None
    """First day that counts; null: all count."""
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
    """The number of things whose time is over, by their kind."""

    expired: dict[str, int]
    """Deleted objects by their folder, and deleted records of jobs."""
    dry_run: bool
    """True if they were only counted."""


@answer(example={"retried": [A_JOB]})
class Retried:
    """Requests whose call-backs are made again."""

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
    """The last events, the newest first."""

    events: list[OperatorsEvent]


@answer(example={"kept": {"openai-community/gpt2": "deployed"}})
class KeptRepositories:
    """The repositories that `ndif cache` deletes from no machine."""

    kept: dict[str, Literal["deployed", "booked"]]
    """Reason by name."""


@answer(example={"stopping": True})
class Stopping:
    """The server stops."""

    stopping: Literal[True]
