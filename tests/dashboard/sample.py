"""An invented laboratory: the state of its server, and the dashboard, which the screenshots show."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard

from ndif.config.settings import Settings
from ndif.control.operations import GetJobs, GetTrace, GetUsage, Kill, Operation
from ndif.dashboard.dashboard import Dashboard
from ndif.gateway.admin import AdminRoutes
from ndif.gateway.app import create_app
from ndif.gateway.header_wire import SocketIoSubscriptions
from ndif.gateway.hf_mirror import HfMirror
from ndif.gateway.jobs import JobRoutes
from ndif.gateway.open_channels import OpenChannels
from ndif.gateway.operator import Operators
from ndif.gateway.results import ResponseRoute, ResultRoute
from ndif.host.runtimes import Runtimes
from ndif.schema.answer import from_plain
from ndif.schema.deployment import OperationError
from ndif.schema.job_state import JobList, Trace
from ndif.schema.public_state import NextState
from ndif.schema.status import Status
from ndif.stores.accounts import FileAccounts
from ndif.stores.broker import MemoryBroker
from ndif.stores.objects import FileStore
from ndif.stores.objects.port import end_key, result_key
from ndif.stores.responder import StoredResponse
from tests.serving import serving

GIB = 1024**3
KEY = "the-key-of-ada"
USER = "ada@example.org"
RUNNING, WAITING, DONE, FETCHED, FAILED = (
    f"{n}d9ff6ea-2f0c-4b1f-8f4e-6c1d5a7b9e21" for n in range(1, 6)
)
RESULT = b"PK\x03\x04" + bytes(3_000_000)
"""The result of `DONE`, in the form of `torch.save`."""
ERROR = """Traceback (most recent call last):
  File "trace.py", line 4, in <module>
    first = model.transformer.h[12].output.save()
IndexError: <b>12</b> is not the index of a block"""
_STEP_S = 300.0


def replica(number: int, node: str, age_s: float, now: float, **changed: Any) -> dict[str, Any]:
    """Return a replica that serves."""
    return {
        "id": f"{number:08x}",
        "node": node,
        "level": "HOT",
        "state": "RUNNING",
        "busy": False,
        "deployed": now - age_s,
        "done": None,
        "total": None,
        **changed,
    }


def in_generation(replicas: Sequence[dict[str, Any]], **changed: Any) -> dict[str, Any]:
    """Return a model's entry for nnsight 0.8."""
    return {
        "generation": "0.8",
        "processor": "READY",
        "desired": sum(entry["level"] == "HOT" for entry in replicas),
        "waiting": 0,
        "running": 0,
        "oldest": None,
        "wait_s": 0.0,
        "last_used": None,
        "replicas": list(replicas),
        **changed,
    }


def model(repo_id: str, size_gib: float | None, **changed: Any) -> dict[str, Any]:
    """Return a dedicated model that serves."""
    return {
        "key": f'nnsight.modeling.transformers.TransformersModel:{{"repo_id": "{repo_id}"}}',
        "repo_id": repo_id,
        "revision": None,
        "task": "text-generation",
        "level": "HOT",
        "state": "RUNNING",
        "dedicated": True,
        "parameters": None,
        "size_bytes": None if size_gib is None else int(size_gib * GIB),
        "protected_until": None,
        "last_used": None,
        "problems": [],
        "probes": {},
        "generations": [],
        **changed,
    }


def memory(total_gib: float, *held: tuple[str, str, float]) -> dict[str, Any]:
    """Return memory in use by models, given by name, level and GiB."""
    taken = sum(size for _, _, size in held)
    return {
        "bytes": int(total_gib * GIB),
        "free_bytes": int((total_gib - taken) * GIB),
        "held": [
            {"model": name, "replica": f"{index:08x}", "level": level, "bytes": int(size * GIB)}
            for index, (name, level, size) in enumerate(held)
        ],
    }


def gpu(total_gib: float, *held: tuple[str, str, float]) -> dict[str, Any]:
    return {**memory(total_gib, *held), "withdrawn": False}


def history(now: float) -> dict[str, Any]:
    """Return the history of six hours with rising load."""
    since = (now - 6 * 3600) // _STEP_S * _STEP_S
    intervals = []
    for index in range(int((now - since) // _STEP_S) + 1):
        busy = 18 + 14 * math.sin(index / 9) + 6 * math.sin(index * 2.3) + index / 3
        jobs = max(0, round(busy))
        wait = 0.1 + max(0.0, busy - 25) / 14
        intervals.append(
            {
                "start": since + index * _STEP_S,
                "jobs": jobs,
                "errors": round(jobs / 14) if index % 3 else 0,
                "total_s": [round(0.9 + wait, 2), round(3.1 + 2.6 * wait, 2)] if jobs else None,
                "wait_s": [round(wait, 2), round(2 * wait, 2)] if jobs else None,
            }
        )
    return {"since": since, "step_s": _STEP_S, "intervals": intervals}


def laboratory(now: float) -> dict[str, Any]:
    """Return the state of a server with two nodes and eight models."""
    llama70, llama8 = "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-8B-Instruct"
    qwen, gemma, gpt2 = "Qwen/Qwen2.5-32B", "google/gemma-2-9b", "openai-community/gpt2"
    olmo, pythia = "allenai/OLMo-2-1124-13B", "EleutherAI/pythia-6.9b-deduped"
    midnight = now // 86_400 * 86_400
    models = [
        model(
            llama70,
            148.0,
            parameters=70_553_706_496,
            last_used=now - 2,
            generations=[
                in_generation(
                    [replica(1, "n1", 90_000, now, busy=True)],
                    processor="BUSY",
                    running=1,
                    waiting=7,
                    oldest=now - 48,
                    wait_s=95.0,
                    last_used=now - 2,
                )
            ],
        ),
        model(
            llama8,
            18.6,
            parameters=8_030_261_248,
            last_used=now - 12,
            generations=[
                in_generation(
                    [replica(2, "n1", 50_000, now, busy=True), replica(3, "n2", 900, now)],
                    running=1,
                    waiting=0,
                    last_used=now - 12,
                ),
                in_generation(
                    [replica(4, "n2", 50_000, now)], generation="0.7", last_used=now - 700
                ),
            ],
        ),
        model(
            qwen,
            74.2,
            dedicated=False,
            state="DEPLOYING",
            parameters=32_763_876_352,
            generations=[
                in_generation(
                    [
                        replica(
                            5,
                            "n1",
                            20,
                            now,
                            state="DEPLOYING",
                            done=int(41.5 * GIB),
                            total=int(65 * GIB),
                        )
                    ],
                    processor="DEPLOYING",
                    waiting=2,
                    oldest=now - 20,
                    wait_s=None,
                )
            ],
            protected_until=now + 3580,
        ),
        model(
            gpt2,
            0.55,
            dedicated=False,
            parameters=124_439_808,
            last_used=now - 320,
            protected_until=now + 2100,
            generations=[in_generation([replica(6, "n2", 1500, now)], last_used=now - 320)],
        ),
        model(
            gemma,
            20.9,
            dedicated=False,
            level="WARM",
            state="NOT DEPLOYED",
            parameters=9_241_705_984,
            last_used=now - 5400,
            generations=[
                in_generation(
                    [replica(7, "n2", 9000, now, level="WARM", state="WARM")],
                    processor="NOT DEPLOYED",
                    wait_s=None,
                    last_used=now - 5400,
                )
            ],
        ),
        model(olmo, None, level="COLD", state="NOT DEPLOYED", dedicated=False, parameters=None),
        model(
            pythia,
            15.9,
            level="COLD",
            state="UNHEALTHY",
            problems=[
                "EleutherAI/pythia-6.9b-deduped cannot be loaded: there is no repository of that name, "
                "or it is gated."
            ],
        ),
    ]
    return {
        "models": models,
        "nodes": [
            {
                "id": "n1",
                "name": "gpu-1",
                "cpu": memory(460),
                "gpus": [
                    gpu(80, (llama70, "HOT", 75)),
                    gpu(80, (llama70, "HOT", 74)),
                    gpu(80, (llama8, "HOT", 19.1)),
                    gpu(80, (qwen, "HOT", 74.7)),
                ],
            },
            {
                "id": "n2",
                "name": "gpu-2",
                "cpu": memory(230, (gemma, "WARM", 20.9)),
                "gpus": [
                    gpu(48, (llama8, "HOT", 19.1), (llama8, "HOT", 19.1), (gpt2, "HOT", 1.0)),
                    gpu(48),
                ],
            },
        ],
        "problems": [],
        "schedule": [
            {
                "model": olmo,
                "title": "Reading group",
                "start": midnight + 86_400 * (1 + 2 * week) + 13 * 3600,
                "end": midnight + 86_400 * (1 + 2 * week) + 18 * 3600,
            }
            for week in range(3)
        ]
        + [
            {
                "model": llama70,
                "title": "Course on interpretability",
                "start": midnight + 8 * 3600 - 86_400,
                "end": midnight + 86_400 * 3,
            }
        ],
        "history": history(now),
    }


def own_jobs(now: float) -> list[dict[str, Any]]:
    """Return the jobs of one user: a running job, a waiting job, and some that have ended."""
    shared = {"user": USER, "model": "meta-llama/Llama-3.1-70B", "generation": "0.8"}
    waits = {"dispatched": None, "ended": None, "position": 3, "expected_start_s": 42.0}
    jobs: list[dict[str, Any]] = [
        {**shared, "id": WAITING, "status": "QUEUED", "received": now - 21, **waits},
        {
            **shared,
            "id": RUNNING,
            "status": "RUNNING",
            "received": now - 64,
            "dispatched": now - 9,
            "ended": None,
            "position": None,
            "expected_start_s": None,
        },
    ]
    for index, (name, ran_s, size) in enumerate(
        [("openai-community/gpt2", 0.31, 4096), ("meta-llama/Llama-3.1-70B", 6.4, 91_000_000)]
    ):
        received = now - 600 * (index + 1)
        jobs.append(
            {
                **shared,
                "id": DONE if index == 0 else FETCHED,
                "model": name,
                "status": "COMPLETED",
                "received": received,
                "dispatched": received + 1.2,
                "ended": received + 1.3 + ran_s,
                "execution_s": ran_s,
                "result_bytes": size,
            }
        )
    jobs.append({**jobs[-1], "id": FAILED, "status": "ERROR", "result_bytes": 0})
    return jobs


def trace_of(job: dict[str, Any]) -> dict[str, Any]:
    """Return the steps of a job."""
    start = job["received"]
    steps = (
        ("receive", "gateway", -0.02, 0.0),
        ("received", "queue", 0.0, 0.02),
        ("queued", "queue", 0.02, 1.2),
        ("dispatched", "queue", 1.2, 1.22),
        ("acquire", "replica", 1.2, 1.24),
        ("running", "replica", 1.24, 1.6),
        ("load", "runner", 1.25, 1.3),
        ("execute", "runner", 1.3, 1.55),
        ("store", "replica", 1.55, 1.6),
        ("deliver", "queue", 1.6, 1.63),
    )
    return {
        **{name: job[name] for name in ("id", "user", "model", "generation", "status")},
        "received": start,
        "ended": job["ended"],
        "reason": "",
        "traceparent": "",
        "steps": [
            {"name": name, "by": by, "start": start + begun, "end": start + ended}
            for name, by, begun, ended in steps
        ],
    }


@dataclass
class Laboratory:
    """A server whose state a test sets."""

    state: dict[str, Any] = field(default_factory=lambda: laboratory(time.time()))
    jobs: list[dict[str, Any]] = field(default_factory=lambda: own_jobs(time.time()))
    asked: int = 0
    version: int = 0
    killed: list[str] = field(default_factory=list)

    def change(self) -> None:
        """Publish the changed fields as the next state."""
        self.version += 1

    async def next(self, seen: str, users: Sequence[str]) -> NextState:
        """See `ndif.control.overview.Overview.next`."""
        self.asked += 1
        name = f"{self.version} {users}"
        until = time.monotonic() + 5
        while name == seen and time.monotonic() < until:
            await asyncio.sleep(0.05)
            name = f"{self.version} {users}"
        if name == seen:
            return NextState(name=name)
        unfinished = [
            {name: value for name, value in job.items() if name != "user"}
            for job in self.jobs
            if job["ended"] is None
        ]
        jobs = {USER: unfinished} if USER in users else {}
        return from_plain(NextState, {"name": name, "state": self.state, "jobs": jobs})

    async def perform(self, operation: Operation) -> Any:
        answer, kind = await self._perform(operation), operation.answer
        return from_plain(kind, answer)

    async def _perform(self, operation: Operation) -> Any:
        """Perform the operations of users."""
        match operation:
            case GetJobs():
                return from_plain(JobList, {"jobs": self.jobs})
            case GetTrace(job_id=job_id, user=user):
                for job in self.jobs:
                    if job["id"] == job_id and job["user"] == user:
                        return from_plain(Trace, trace_of(job))
                raise OperationError(404, f"There is no job {job_id!r}.")
            case GetUsage(by=by, since=since):
                rows = [
                    {
                        "name": name if by == "model" else f"2026-07-{29 + index}",
                        "jobs": 120 - 70 * index,
                        "errors": 3 * index,
                        "execution_s": 912.0 / (index + 1),
                        "result_bytes": 1_420_000_000 // (index + 1),
                    }
                    for index, name in enumerate(
                        ("meta-llama/Llama-3.1-70B", "openai-community/gpt2")
                    )
                ]
                return {"by": by, "since": since, "usage": rows}
            case Kill(request_id=request_id):
                (job,) = (job for job in self.jobs if job["id"] == request_id)
                if job["ended"] is not None:
                    raise OperationError(404, "No such job of yours waits or runs here.")
                job.update(status="ERROR", ended=time.time(), position=None, expected_start_s=None)
                self.killed.append(request_id)
                self.change()
                return {"killed": True, "request_id": request_id}
        raise AssertionError(operation)


def leave(store: FileStore, url: str) -> None:
    """Store the result of a completed job, and the end of both that job and a failed job."""
    completed = {"description": "", "data": store.url(result_key(DONE), url)}
    ends = {
        DONE: {"id": DONE, "status": "COMPLETED", **completed},
        FAILED: {"id": FAILED, "status": "ERROR", "description": ERROR},
    }
    contents = {end_key(job_id): StoredResponse(end, USER).encode() for job_id, end in ends.items()}
    contents[result_key(DONE)] = zstandard.ZstdCompressor().compress(RESULT)
    for key, content in contents.items():
        store.path(key).parent.mkdir(exist_ok=True)
        store.path(key).write_bytes(content)


async def _no_update(request_id: str, stored: Status | None) -> None:
    """Return nothing: all polled jobs have ended."""


async def _no_event(*_: Any, **__: Any) -> None:
    """Ignore the event."""


@contextlib.contextmanager
def served(
    server: Laboratory, folder: Path, mode: str = "public", operators: Operators | None = None
) -> Iterator[str]:
    """Serve the dashboard of a laboratory, in which Ada has a key; yield its address."""
    keys = folder / "keys.yaml"
    keys.write_text(f"keys:\n- {{key: {KEY}, user: {USER}}}\n")
    keys.chmod(0o600)
    settings = Settings(dashboard=mode)
    accounts = FileAccounts(keys)
    dashboard = Dashboard(
        settings, accounts, Runtimes(folder), server.next, host="127.0.0.1", many_users=True
    )
    store = FileStore(folder / "stored", 3600)
    app = create_app(
        [
            *dashboard.routes(),
            *JobRoutes(accounts, server.perform, store).routes(),
            *ResponseRoute(store, _no_update, accounts).routes(),
            *ResultRoute(store).routes(),
            *(
                AdminRoutes(server.perform, operators, settings, None, _no_event).routes()
                if operators
                else ()
            ),
        ],
        SocketIoSubscriptions(MemoryBroker(), OpenChannels(settings), settings),
        HfMirror(share_weights=False),
        None,  # type: ignore[arg-type]
        settings,
        host="127.0.0.1",
    )
    with serving(app) as url:
        leave(store, url)
        yield url
