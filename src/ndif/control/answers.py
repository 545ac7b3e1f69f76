"""Answers of operations, as models: what `GET /openapi.json` says of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict

from ndif.placement.replica import DeploymentLevel
from ndif.queue.replicas import ProcessorStatus
from ndif.schema.deployment_file import AsInFile

_KEY = (
    "nnsight.modeling.transformers.TransformersModel:"
    '{"repo_id": "openai-community/gpt2", "revision": null, "task": "text-generation"}'
)
_VARIANT = f"{_KEY}@0.8"
_REQUEST = "0d9ff6ea-2f0c-4b1f-8f4e-6c1d5a7b9e21"
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


class Fields(BaseModel):
    """A JSON object."""

    model_config = ConfigDict(extra="allow")


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
                    "gpu_context_bytes": _GIB // 2,
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
            "schedule": {"source": None, "problems": [], "next_change": None, "windows": []},
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
    """A replica that made room."""

    model_config = _with()

    model: str
    replica_id: str


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


class Evicted(BaseModel):
    """Replicas that were taken off their devices."""

    model_config = _with({"evicted": [_REPLICA_KEY]})

    evicted: list[ReplicaKey]
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


class Stopping(BaseModel):
    """The server stops."""

    model_config = _with({"stopping": True})

    stopping: Literal[True]
