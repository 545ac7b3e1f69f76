"""The state of a server: its machines, models, replicas and calendar, and what is wrong with it."""

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
    """Kinds of what may be wrong with a server."""

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
    """One thing that is wrong. The text may change while it holds; kind and subject do not."""

    kind: ProblemKind
    subject: str
    """The model, machine, GPU, disk or calendar that it is about."""
    text: str
    """A sentence."""


@answer()
class MemoryState:
    """Memory of a machine."""

    bytes: int
    free_bytes: int


@answer()
class GpuState(MemoryState):
    """A GPU of a machine."""

    uuid: str | None
    withdrawn: bool
    """True for a GPU that failed again and again, and takes no model for a while."""


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
    """One copy of a model."""

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


@answer()
class PublicProbe:
    """The server's own probes of a model, in one nnsight generation, of the last day."""

    outcome: ProbeKind
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


@answer()
class Probe(PublicProbe):
    """The server's own probes of a model, for its operator."""

    reason: str | None
    """Sentence on the last one; null if it succeeded."""


@answer()
class ModelState:
    """A model in one nnsight generation."""

    model_key: str
    repo_id: str
    revision: str | None
    task: str | None
    generation: str | None
    """None for a model that no replica and no request uses."""
    metrics_label: str = "other"
    """Label in metrics: `other` until it is deployed, or begins to load."""
    dedicated: bool
    size_bytes: int | None
    desired_replicas: int
    processor: ProcessorStatus | None
    waiting: int
    problem: str | None
    probe: Probe | None = None
    """None if it is not probed."""
    replicas: list[ReplicaStatus]

    @property
    def label(self) -> str:
        """Return the repository, and the revision behind an `@` where one is named."""
        return self.repo_id + (f"@{self.revision}" if self.revision else "")

    @property
    def subject(self) -> str:
        """Return the name under which problems are about it."""
        return subject_of(self.label, self.generation)


def subject_of(label: str, generation: str | None) -> str:
    """Return the name under which problems are about a model in one nnsight generation."""
    return f"{label} (nnsight {generation})" if generation else label


@answer()
class BookedWindow:
    """A time in which the calendar has a model dedicated."""

    model: str
    start: str
    end: str


@answer()
class ScheduleState:
    """The calendar."""

    source: str | None
    problems: list[str]
    next_change: str | None
    read_every_s: float
    """Seconds after which at the latest a change of the calendar is known."""
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
    """Machines, models, replicas and the calendar."""

    nodes: list[NodeState]
    models: list[ModelState]
    problems: list[str]
    """A sentence for each problem of the server."""
    schedule: ScheduleState


@dataclass(frozen=True, slots=True)
class QueueWait:
    """The time for which the queue of a model in one nnsight generation waits."""

    label: str
    """Repository of the model, and the revision behind an `@` where one is named."""
    generation: str
    waiting: int
    oldest: float | None
    """Unix time at which the job arrived that waits longest; None if none waits."""
    last_dispatched: float | None
    """Unix time at which the last of the running jobs was sent to its replica; None if none runs."""
