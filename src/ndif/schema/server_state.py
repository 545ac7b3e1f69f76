"""The state of a server: its nodes, models, replicas, calendar and problems."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ndif.schema.answer import JsonObject, answer
from ndif.schema.model_key import A_MODEL
from ndif.schema.states import DeploymentLevel, ProbeKind, ProcessorStatus

_KEY = str(A_MODEL)
_SOME_TIME = 1_785_000_000.0
_GIB = 1024**3


class ProblemKind(str, Enum):
    """Kinds of problems of a server."""

    STORE_AWAY = "store-away"
    NODE_LOST = "node-lost"
    GPU_WITHDRAWN = "gpu-withdrawn"
    DISK = "disk"
    NO_REPLICA = "no-replica"
    UNHEALTHY = "unhealthy"
    LOAD_FAILED = "load-failed"
    REPLICAS_LOST = "replicas-lost"
    PROBE = "probe"
    QUEUE_STUCK = "queue-stuck"
    ERROR_RATE = "error-rate"
    EVICTIONS = "evictions"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a server. Its text may change while the problem persists; kind and subject do not."""

    kind: ProblemKind
    subject: str
    """The model, node, GPU, disk or calendar that has the problem."""
    text: str
    """Description of the problem, as a sentence."""


@answer()
class MemoryState:
    """Memory of a GPU, or CPU memory of a node."""

    bytes: int
    free_bytes: int


@answer()
class GpuState(MemoryState):
    """A GPU of a node."""

    uuid: str | None
    withdrawn: bool
    """True if the GPU failed repeatedly, and takes no models for a while."""


@answer()
class NodeState:
    """A machine that runs replicas."""

    id: str
    name: str
    gpus: list[GpuState]
    gpu_context_bytes: int
    cpu: MemoryState


@answer()
class ReplicaStatus:
    """A replica of a model."""

    replica_id: str
    node_id: str
    level: DeploymentLevel
    state: str
    deployed: float
    gpu_mem_bytes_by_id: dict[str, int]
    on_cpu: bool
    dedicated: bool
    done: int | None
    """Bytes loaded so far; null if the replica is not loading."""
    total: int | None
    """Bytes to load; null if the replica is not loading."""
    request_id: str | None
    """Id of the job that the replica runs; null if no job runs."""


@answer()
class PublicProbe:
    """The server's own probes of a model in one nnsight generation, during the last day.

    Outcomes `loading` and `unsupported` do not count.
    """

    outcome: ProbeKind
    """Outcome of the last probe."""
    at: float
    """Unix time of the last probe."""
    seconds: float | None
    """Seconds from sending the last probe's trace to its value; null if no value came."""
    up: bool | None
    """True if the last counted probe succeeded; null if no probe has counted yet."""
    up_share: float | None
    """Fraction of counted probes that succeeded; null without counted probes."""
    probes: int
    """Number of counted probes."""


@answer()
class Probe(PublicProbe):
    """The server's own probes of a model, for its operator."""

    reason: str | None
    """Explanation of the last outcome, as a sentence; null if the probe succeeded."""


@answer()
class ModelState:
    """A model in one nnsight generation."""

    model_key: str
    repo_id: str
    revision: str | None
    task: str | None
    generation: str | None
    """Null for a model without replicas and requests."""
    metrics_label: str = "other"
    """Label in metrics: `other` until it is deployed, or begins to load."""
    dedicated: bool
    size_bytes: int | None
    desired_replicas: int
    processor: ProcessorStatus | None
    waiting: int
    problem: str | None
    probe: Probe | None = None
    """Null if the model is not probed."""
    replicas: list[ReplicaStatus]

    @property
    def label(self) -> str:
        """Return the repository, followed by `@` and the revision if one was named."""
        return self.repo_id + (f"@{self.revision}" if self.revision else "")

    @property
    def subject(self) -> str:
        """Return the subject of problems of this model in this generation."""
        return subject_of(self.label, self.generation)


def subject_of(label: str, generation: str | None) -> str:
    """Return the subject of problems of a model in one nnsight generation."""
    return f"{label} (nnsight {generation})" if generation else label


@answer()
class BookedWindow:
    """A time window in which the calendar dedicates a model, in ISO 8601."""

    model: str
    start: str
    end: str


@answer()
class ScheduleState:
    """The state of the calendar."""

    source: str | None
    problems: list[str]
    next_change: str | None
    read_every_s: float
    """Maximum seconds until the server reads a change of the calendar."""
    windows: list[BookedWindow]


_EXAMPLE: JsonObject = {
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
            "metrics_label": "openai-community/gpt2",
            "dedicated": True,
            "size_bytes": 593_000_000,
            "desired_replicas": 1,
            "processor": "READY",
            "waiting": 0,
            "problem": None,
            "probe": None,
            "replicas": [
                {
                    "replica_id": "5f0c2a7d",
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


@answer(example=_EXAMPLE)
class ServerState:
    """Nodes, models, replicas and the calendar."""

    nodes: list[NodeState]
    models: list[ModelState]
    problems: list[str]
    """One sentence for each problem of the server."""
    schedule: ScheduleState


@dataclass(frozen=True, slots=True)
class QueueWait:
    """The waiting jobs of a model in one nnsight generation, and their times."""

    label: str
    """Repository of the model, followed by `@` and the revision if one was named."""
    generation: str
    waiting: int
    oldest: float | None
    """Unix time at which the longest waiting job arrived; None if no job waits."""
    last_dispatched: float | None
    """Unix time of the last dispatch among the running jobs; None if no job runs."""
