"""The state of a server as everybody may see it: no user, job or key is named in it."""

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
    """An nnsight generation whose clients are served."""

    generation: str
    version: str
    requirement: str
    """The requirement of a client's package, as pip reads it."""


@answer()
class Facts:
    """The server, as its clients need to know it."""

    version: str
    access: str
    """`public` or `login`."""
    needs_key: bool
    generations: list[InstalledGeneration]


@answer()
class ShownReplica:
    """One copy of a model."""

    id: str
    node: str
    level: DeploymentLevel
    state: str
    busy: bool
    """True while a job runs on it."""
    deployed: float
    """Unix time at which it last became HOT."""
    done: int | None
    """Bytes that are loaded, while it loads."""
    total: int | None


@answer()
class ShownGeneration:
    """A model in one nnsight generation: its replicas and its queue."""

    generation: str
    processor: str | None
    desired: int
    """Number of replicas that there should be."""
    waiting: int
    running: int
    oldest: float | None
    """Unix time at which the job arrived that waits longest."""
    wait_s: float | None
    """Seconds that a job may wait that is sent now; null where none has run yet."""
    last_used: float | None
    replicas: list[ShownReplica]


@answer()
class ShownModel:
    """A model."""

    key: str
    repo_id: str
    revision: str | None
    task: str | None
    level: DeploymentLevel
    state: str
    dedicated: bool
    """True if it is not evicted for other models."""
    parameters: int | None
    size_bytes: int | None
    protected_until: float | None
    """Unix time until which no model that is not dedicated may take its place."""
    last_used: float | None
    """Unix time at which a job last ran on it, since the server started."""
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
    """Memory of a machine."""

    held: list[Held]


@answer()
class ShownGpu(ShownMemory):
    """A GPU."""

    withdrawn: bool
    """True for a GPU that failed again and again, and takes no model for a while."""


@answer()
class ShownNode:
    """A machine that runs replicas."""

    id: str
    name: str
    cpu: ShownMemory
    gpus: list[ShownGpu]


@answer()
class ShownWindow:
    """A time in which the calendar has a model dedicated."""

    model: str
    title: str
    start: float
    end: float


@answer()
class ShownInterval:
    """The jobs that ended in a stretch of time."""

    start: float
    jobs: int
    errors: int
    """Jobs among them that did not complete."""
    total_s: list[float] | None
    """Median and 95th percentile of the seconds from arrival to end; null without any."""
    wait_s: list[float] | None
    """The same of the seconds from arrival to dispatch."""


@answer()
class JobHistory:
    """The course of jobs over the last hours; intervals without any are left out."""

    since: float
    step_s: float
    intervals: list[ShownInterval]


@answer()
class PublicState:
    """The state of the server, without whose jobs there are."""

    models: list[ShownModel]
    nodes: list[ShownNode]
    problems: list[str]
    """A sentence for each problem of the server."""
    schedule: list[ShownWindow]
    """The next seven days."""
    history: JobHistory


@answer()
class NextState:
    """The state and some users' unfinished jobs, or nothing but the name of those that are known."""

    name: str
    """Name of the state and the jobs."""
    state: PublicState | None = None
    """None if the name is that of the state that was seen before."""
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
    """The state of the server, without whose jobs there are."""

    server: Facts
