"""The public state of a server, which names no user, job or key."""

from __future__ import annotations

from dataclasses import field

from ndif.schema.answer import answer
from ndif.schema.job_state import OwnJob
from ndif.schema.model_key import A_MODEL
from ndif.schema.server_state import MemoryState, PublicProbe
from ndif.schema.states import DeploymentLevel

_GIB = 1024**3
_SOME_TIME = 1_785_000_000.0
_REPO = "openai-community/gpt2"


@answer()
class InstalledGeneration:
    """An installed nnsight generation, whose clients the server serves."""

    generation: str
    version: str
    requirement: str
    """The version of nnsight that a client needs, as a requirement for pip."""


@answer()
class Facts:
    """Facts about the server for its clients."""

    version: str
    access: str
    """Viewers of the dashboard: `public` or `login`."""
    needs_key: bool
    generations: list[InstalledGeneration]


@answer()
class ShownReplica:
    """A replica of a model."""

    id: str
    node: str
    level: DeploymentLevel
    state: str
    busy: bool
    """True while a job runs on the replica."""
    deployed: float
    """Unix time at which the replica last became HOT."""
    done: int | None
    """Bytes loaded so far; null if the replica is not loading."""
    total: int | None
    """Bytes to load; null if the replica is not loading."""


@answer()
class ShownGeneration:
    """A model in one nnsight generation: its replicas and its queue."""

    generation: str
    processor: str | None
    desired: int
    """Desired number of replicas."""
    waiting: int
    running: int
    oldest: float | None
    """Unix time at which the longest waiting job arrived; null if no job waits."""
    wait_s: float | None
    """Expected wait of a job sent now, in seconds; null if no job has run yet."""
    last_used: float | None
    replicas: list[ShownReplica]


@answer()
class ShownModel:
    """A model and its nnsight generations."""

    key: str
    repo_id: str
    revision: str | None
    task: str | None
    level: DeploymentLevel
    state: str
    dedicated: bool
    """True if the model is not evicted for other models."""
    parameters: int | None
    size_bytes: int | None
    protected_until: float | None
    """Unix time until which the model is evicted only for a dedicated model."""
    last_used: float | None
    """Unix time at which a job last ran on the model, since the server started."""
    problems: list[str]
    probes: dict[str, PublicProbe]
    generations: list[ShownGeneration]


@answer()
class Held:
    """Memory that a replica holds."""

    model: str
    replica: str
    level: DeploymentLevel
    bytes: int


@answer()
class ShownMemory(MemoryState):
    """Memory of a GPU, or CPU memory of a node, with the replicas that hold it."""

    held: list[Held]


@answer()
class ShownGpu(ShownMemory):
    """A GPU of a node."""

    withdrawn: bool
    """True if the GPU failed repeatedly, and takes no models for a while."""


@answer()
class ShownNode:
    """A machine that runs replicas."""

    id: str
    name: str
    cpu: ShownMemory
    gpus: list[ShownGpu]


@answer()
class ShownWindow:
    """A time window in which the calendar dedicates a model."""

    model: str
    title: str
    start: float
    end: float


@answer()
class ShownInterval:
    """The jobs that ended in one interval."""

    start: float
    jobs: int
    errors: int
    """Number of these jobs that failed."""
    total_s: list[float] | None
    """Median and 95th percentile of the seconds from arrival to end; null without jobs."""
    wait_s: list[float] | None
    """Median and 95th percentile of the seconds from arrival to dispatch; null without jobs."""


@answer()
class JobHistory:
    """The ended jobs of the last hours by interval; intervals without jobs are left out."""

    since: float
    step_s: float
    intervals: list[ShownInterval]


@answer()
class PublicState:
    """The state of the server, without names of users and jobs."""

    models: list[ShownModel]
    nodes: list[ShownNode]
    problems: list[str]
    """One sentence for each problem of the server."""
    schedule: list[ShownWindow]
    """Windows in the next seven days."""
    history: JobHistory


@answer()
class NextState:
    """The state and some users' unfinished jobs, or only the name if the caller has both already."""

    name: str
    """Name of this state and these jobs."""
    state: PublicState | None = None
    """None if the caller has the state and the jobs with this name already."""
    jobs: dict[str, list[OwnJob]] = field(default_factory=dict)


@answer(
    example={
        "server": {
            "version": "0.1.0",
            "access": "public",
            "needs_key": True,
            "generations": [
                {"generation": "0.8", "version": "0.8.1", "requirement": "nnsight>=0.8,<0.9"}
            ],
        },
        "models": [
            {
                "key": str(A_MODEL),
                "repo_id": _REPO,
                "revision": None,
                "task": "text-generation",
                "level": "HOT",
                "state": "RUNNING",
                "dedicated": False,
                "parameters": 124_439_808,
                "size_bytes": 593_000_000,
                "protected_until": _SOME_TIME + 3600,
                "last_used": _SOME_TIME + 60,
                "problems": [],
                "probes": {},
                "generations": [
                    {
                        "generation": "0.8",
                        "processor": "READY",
                        "desired": 1,
                        "waiting": 0,
                        "running": 0,
                        "oldest": None,
                        "wait_s": 0.0,
                        "last_used": _SOME_TIME + 60,
                        "replicas": [
                            {
                                "id": "5f0c2a7d",
                                "node": "n1",
                                "level": "HOT",
                                "state": "RUNNING",
                                "busy": False,
                                "deployed": _SOME_TIME,
                                "done": None,
                                "total": None,
                            }
                        ],
                    }
                ],
            }
        ],
        "nodes": [
            {
                "id": "n1",
                "name": "gpu-1",
                "cpu": {"bytes": 128 * _GIB, "free_bytes": 128 * _GIB, "held": []},
                "gpus": [
                    {
                        "bytes": 80 * _GIB,
                        "free_bytes": 79 * _GIB,
                        "withdrawn": False,
                        "held": [
                            {"model": _REPO, "replica": "5f0c2a7d", "level": "HOT", "bytes": _GIB}
                        ],
                    }
                ],
            }
        ],
        "problems": [],
        "schedule": [
            {"model": _REPO, "title": _REPO, "start": _SOME_TIME, "end": _SOME_TIME + 3600}
        ],
        "history": {
            "since": _SOME_TIME - 21_600,
            "step_s": 300.0,
            "intervals": [
                {
                    "start": _SOME_TIME - 300,
                    "jobs": 12,
                    "errors": 1,
                    "total_s": [0.45, 1.2],
                    "wait_s": [0.05, 0.6],
                }
            ],
        },
    }
)
class State(PublicState):
    """The state of the server, without names of users and jobs."""

    server: Facts
