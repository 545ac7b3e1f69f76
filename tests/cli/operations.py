"""A stand-in for a server's control plane, and the gateway over it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from starlette.types import ASGIApp

from ndif.config.settings import Settings
from ndif.control.operations import (
    CollectGarbage,
    Deploy,
    Evict,
    Export,
    GetJobs,
    GetQueue,
    GetStatus,
    GetTrace,
    GetUsage,
    Kill,
    KillKey,
    ListAlerts,
    ListCallbacks,
    ListEvents,
    ListKept,
    Operation,
    Restart,
    RetryCallbacks,
    Scale,
    SendTestAlerts,
    Stop,
)
from ndif.gateway.admin import AdminRoutes
from ndif.gateway.app import create_app
from ndif.gateway.header_wire import SocketIoSubscriptions
from ndif.gateway.health import HealthRoutes
from ndif.gateway.hf_mirror import HfMirror
from ndif.gateway.open_channels import OpenChannels
from ndif.gateway.openapi import example_of
from ndif.gateway.operator import Operators
from ndif.gateway.sessions import Sessions
from ndif.host.runtimes import Runtimes
from ndif.schema.alerts import Alerts
from ndif.schema.answer import adapter, from_plain
from ndif.schema.deployment import DeploymentConfig, OperationError
from ndif.schema.deployment_file import to_entry
from ndif.schema.deployment_settings import DeploymentChange, differences
from ndif.schema.job_state import OWN_TRACE, JobList, Queues, Trace
from ndif.schema.server_state import ServerState
from ndif.stores.accounts import Accounts, OpenAccounts
from ndif.stores.broker import MemoryBroker
from ndif.stores.events import OperatorsEvent
from tests.gateway.catalogue import KnownCatalogue
from tests.waiting import time_passes_async

TOKEN = "opens-it"
GIB = 1024**3
OPERATORS = Operators(TOKEN, Sessions((TOKEN,), "", 3600))
MAX_REPLICAS = 3
"""Replicas for which there is room."""

ALERTS: dict[str, Any] = adapter(Alerts).json_schema()["examples"][0]


@dataclass
class Deployed:
    config: DeploymentConfig
    generation: str
    replicas: list[str] = field(default_factory=list)
    level: str = "HOT"


class Table:
    """A control plane whose deployments are rows of a table, without models."""

    def __init__(self) -> None:
        self.deployed: dict[str, Deployed] = {}
        self.waiting = ["request-2", "request-3"]
        self.running = ["request-1"]
        self.waited_for: list[bool] = []
        self.windows: list[dict[str, str]] = []
        """Windows of the calendar."""
        self.events: list[OperatorsEvent] = []
        self.given_up = ["request-4", "request-5"]
        self.called_again: list[str] = []
        self.incidents = ALERTS["open"]
        self.tested = [{"to": "https://example.org/…", "form": "json", "problem": None}]
        self.killed_keys: list[str] = []
        self.jobs_of_keys = 0
        self.leads = True
        self.stopped = False
        self.loading_s = 0.0
        self.down_s: float | None = None
        """Seconds for which a model called org/down is down."""
        self._replicas = iter(f"r{n}" for n in range(1, 1000))

    async def perform(self, operation: Operation) -> Any:
        answer, kind = await self._perform(operation), operation.answer
        return from_plain(kind, answer)

    async def _perform(self, operation: Operation) -> dict[str, Any]:
        match operation:
            case Deploy():
                return {"models": await self._deploy(operation)}
            case Evict():
                if operation.all:
                    return {"evicted": self._evict_all(), "scheduled": ["org/booked"]}
                return {"evicted": self._evict(operation)}
            case Scale(model=name, replicas=replicas, generation=generation):
                entry = self._of(name)
                outcome = self._set(entry.config, replicas, generation or "0.8")
                return {"models": [{**outcome, "evicted": []}]}
            case Restart(model=name, generation=generation):
                entry = self._of(name)
                if generation not in (None, entry.generation):
                    raise OperationError(404, f"There is no replica for nnsight {generation}.")
                return {"restarted": self._keys(entry)}
            case Kill():
                self._kill(operation)
                return {"killed": True, "request_id": operation.request_id}
            case KillKey(account=account):
                if not self.leads:
                    raise OperationError(503, "No process of this server leads at the moment.")
                self.killed_keys.append(account)
                return {"killed": self.jobs_of_keys}
            case GetStatus():
                return from_plain(ServerState, await self.status())
            case GetQueue():
                return from_plain(Queues, await self.queue())
            case GetJobs():
                return from_plain(JobList, example_of(JobList))
            case GetTrace(job_id=job_id):
                return from_plain(Trace, {**OWN_TRACE, "id": job_id, "user": "ada"})
            case GetUsage(by=by, since=since):
                return {"by": by, "since": since, "usage": []}
            case CollectGarbage(dry_run=dry_run):
                return {"expired": {"results": 0}, "dry_run": dry_run}
            case Export():
                return {"version": 1, "deployments": self._export()}
            case ListKept():
                return {
                    "kept": {
                        deployment.config.repo_id: "deployed"
                        for deployment in self.deployed.values()
                    }
                }
            case ListCallbacks():
                return self._list_callbacks()
            case RetryCallbacks():
                return {"retried": self._retry(operation)}
            case ListAlerts():
                return {**ALERTS, "open": self.incidents}
            case ListEvents():
                return {"events": [asdict(event) for event in reversed(self.events)]}
            case SendTestAlerts():
                return {"destinations": self.tested}
            case Stop():
                self.stopped = True
                return {"stopping": True}
        raise AssertionError(operation)

    async def record(self, events: Sequence[OperatorsEvent]) -> None:
        self.events += events

    async def _deploy(self, operation: Deploy) -> list[dict[str, Any]]:
        self.waited_for.append(operation.wait)
        if operation.generation == "9.9":
            raise OperationError(
                409, "nnsight 9.9 is not installed here: run `ndif runtime add 9.9`."
            )
        if operation.wait:
            await time_passes_async(self.loading_s)
        named = {change.config.repo_id.lower() for change in operation.deployments}
        removed = [name for name in self.deployed if name not in named] if operation.sync else []
        evicted = [
            {"model": self.deployed[name].config.repo_id, "replica_id": replica}
            for name in removed
            for replica in self.deployed[name].replicas
        ]
        for name in removed:
            del self.deployed[name]
        generation = operation.generation or "0.8"
        return [
            {**self._deploy_one(change, generation), "evicted": evicted}
            for change in operation.deployments
        ]

    def _deploy_one(self, change: DeploymentChange, generation: str) -> dict[str, Any]:
        deployment = self.deployed.get(change.config.repo_id.lower())
        if deployment is None:
            outcome = self._set(change.config, change.config.replicas, generation)
            if change.config.repo_id == "org/down":
                return {**outcome, "is_down": True, "down_s": self.down_s}
            return outcome
        config = change.applied_to(deployment.config)
        changes = [asdict(difference) for difference in differences(deployment.config, config)]
        return {**self._set(config, config.replicas, generation), "changes": changes}

    def _set(self, config: DeploymentConfig, count: int, generation: str) -> dict[str, Any]:
        entry = self.deployed.setdefault(config.repo_id.lower(), Deployed(config, generation))
        entry.config = config
        others = sum(len(other.replicas) for other in self.deployed.values()) - len(entry.replicas)
        possible = min(count, MAX_REPLICAS - others)
        more = (next(self._replicas) for _ in range(MAX_REPLICAS))
        entry.replicas = [*entry.replicas, *more][:possible]
        problem = f"There is room for {possible} of {count} replicas." if possible < count else None
        return {
            "repo_id": config.repo_id,
            "generation": generation,
            "replicas": list(entry.replicas),
            "problem": problem,
        }

    def _of(self, model: str) -> Deployed:
        if model.lower() not in self.deployed:
            raise OperationError(404, f"{model} is not deployed; `ndif status` shows what is.")
        return self.deployed[model.lower()]

    @staticmethod
    def _keys(entry: Deployed) -> list[dict[str, str]]:
        key = str(entry.config.key)
        return [{"model_key": key, "replica_id": replica_id} for replica_id in entry.replicas]

    def _evict(self, operation: Evict) -> list[dict[str, str]]:
        if operation.model is None:
            raise OperationError(
                400, "Name either one model, and optionally a replica of it, or all."
            )
        entry = self._of(operation.model)
        chosen = [
            replica
            for replica in self._keys(entry)
            if operation.replica in (None, replica["replica_id"])
        ]
        if not chosen:
            raise OperationError(404, f"{operation.model} has no replica {operation.replica}.")
        if operation.cold:
            removed = {replica["replica_id"] for replica in chosen}
            entry.replicas = [
                replica_id for replica_id in entry.replicas if replica_id not in removed
            ]
        else:
            entry.level = "WARM"
        return chosen

    def _evict_all(self) -> list[dict[str, str]]:
        evicted = [key for entry in self.deployed.values() for key in self._keys(entry)]
        self.deployed.clear()
        return evicted

    def _kill(self, operation: Kill) -> None:
        for requests in (self.waiting, self.running):
            if operation.request_id in requests:
                requests.remove(operation.request_id)
                return
        raise OperationError(
            404,
            f"No request {operation.request_id!r} waits or runs here; `ndif queue` lists those.",
        )

    def _list_callbacks(self) -> dict[str, Any]:
        rows = [
            {
                "request_id": request_id,
                "to": "https://example.org/…",
                "status": "COMPLETED",
                "state": "given up" if request_id in self.given_up else "waiting",
                "attempts": 3,
                "created": 1_700_000_000,
                "due": 1_700_000_000,
                "problem": "it answered 500",
            }
            for request_id in (*self.given_up, *self.called_again)
        ]
        waiting, dead = len(self.called_again), len(self.given_up)
        return {"waiting": waiting, "given_up": dead, "callbacks": rows}

    def _retry(self, operation: RetryCallbacks) -> list[str]:
        if operation.all == (operation.request_id is not None):
            raise OperationError(400, "Name either one request, or all.")
        chosen = [e for e in self.given_up if operation.all or e == operation.request_id]
        if not chosen and not operation.all:
            raise OperationError(
                404, f"No webhook or mail of a request {operation.request_id!r} is here."
            )
        self.given_up = [request_id for request_id in self.given_up if request_id not in chosen]
        self.called_again += chosen
        return chosen

    async def status(self) -> dict[str, Any]:
        memory = {"bytes": 24 * GIB, "free_bytes": 10 * GIB}
        return {
            "nodes": [
                {
                    "id": "n1",
                    "name": "this-machine",
                    "gpus": [{**memory, "uuid": None, "withdrawn": False}],
                    "gpu_context_bytes": 0,
                    "cpu": memory,
                }
            ],
            "models": [*self._models()],
            "schedule": {
                "source": "plan.ics" if self.windows else None,
                "problems": [],
                "next_change": None,
                "read_every_s": 30.0,
                "windows": self.windows,
            },
            "problems": ["[one] of the disks is slow."],
        }

    def _models(self) -> Iterator[dict[str, Any]]:
        for entry in self.deployed.values():
            yield {
                "model_key": str(entry.config.key),
                "repo_id": entry.config.repo_id,
                "revision": entry.config.revision,
                "task": None,
                "generation": entry.generation,
                "metrics_label": entry.config.repo_id,
                "dedicated": entry.config.dedicated,
                "size_bytes": 5 * 10**8,
                "desired_replicas": len(entry.replicas),
                "processor": "READY" if entry.replicas else None,
                "waiting": len(self.waiting),
                "problem": None,
                "probe": None,
                "replicas": [
                    {
                        "replica_id": replica_id,
                        "node_id": "n1",
                        "level": entry.level,
                        "state": "DEPLOYING" if entry.config.repo_id == "org/slow" else "RUNNING",
                        "deployed": 1_700_000_000,
                        "gpu_mem_bytes_by_id": {"0": 10**9},
                        "on_cpu": False,
                        "dedicated": entry.config.dedicated,
                        "done": 25,
                        "total": 100,
                        "request_id": None,
                    }
                    for replica_id in entry.replicas
                ],
            }

    async def queue(self) -> dict[str, Any]:
        return {
            "models": [
                {
                    "model_key": "k",
                    "repo_id": "org/a",
                    "generation": "0.8",
                    "processor": "BUSY",
                    "running": [
                        {
                            "request_id": request_id,
                            "user": "ann",
                            "replica_id": "r1",
                            "since": 1_700_000_000,
                        }
                        for request_id in self.running
                    ],
                    "waiting": [
                        {
                            "request_id": request_id,
                            "user": "bob",
                            "position": place,
                            "received": 1_700_000_000,
                            "expected_start_s": 75.0 if place == 1 else None,
                        }
                        for place, request_id in enumerate(self.waiting, 1)
                    ],
                }
            ]
        }

    def _export(self) -> list[dict[str, Any]]:
        return [
            {**to_entry(deployment.config), "replicas": len(deployment.replicas)}
            for deployment in self.deployed.values()
        ]


def application(
    table: Table, options: Settings | None = None, accounts: Accounts | None = None
) -> ASGIApp:
    """Return the gateway over a table."""
    options = options or Settings()
    accounts = accounts or OpenAccounts(hotswapping=True)
    routes = [
        *AdminRoutes(table.perform, OPERATORS, options, accounts.registry, table.record).routes(),
        *HealthRoutes(KnownCatalogue(), accounts, Runtimes(options.runtimes)).routes(),
    ]
    return create_app(
        routes,
        SocketIoSubscriptions(MemoryBroker(), OpenChannels(options), options),
        HfMirror(share_weights=False),
        None,  # type: ignore[arg-type]
        options,
        host="127.0.0.1",
    )
