"""A server's operations without its models: what is deployed is a table, and every request a row."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette

from ndif.cluster.models import Models
from ndif.config import Settings
from ndif.gateway.admin import Admin
from ndif.gateway.app import gateway
from ndif.gateway.catalogue import OwnCatalogue
from ndif.gateway.health import Health
from ndif.gateway.hub import Hub
from ndif.gateway.socket_io import SocketIo
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.deployment_entry import entry_of
from ndif.schema.operation import OperationError
from ndif.stores.accounts import OpenAccounts
from ndif.stores.broker import MemoryBroker

TOKEN = "opens-it"
GIB = 1024**3
ROOM = 3
"""Replicas that fit."""


@dataclass
class Deployed:
    config: DeploymentConfig
    generation: str
    replicas: list[str] = field(default_factory=list)
    level: str = "HOT"


class Table:
    """`Operations` on a table."""

    def __init__(self) -> None:
        self.deployed: dict[str, Deployed] = {}
        self.waiting = ["request-2", "request-3"]
        self.running = ["request-1"]
        self.waited_for: list[bool] = []
        self.stopped = False
        self.loading_s = 0.0
        self._replicas = iter(f"r{n}" for n in range(1, 1000))

    async def deploy(
        self, configs: Sequence[DeploymentConfig], generation: str | None, *, wait: bool, sync: bool
    ) -> list[dict[str, Any]]:
        self.waited_for.append(wait)
        if generation == "9.9":
            raise OperationError(
                409, "nnsight 9.9 is not installed here: run `ndif runtime add 9.9`."
            )
        if wait:
            await asyncio.sleep(self.loading_s)
        wanted = {config.repo_id.lower() for config in configs}
        gone = [name for name in self.deployed if name not in wanted] if sync else []
        evicted = [
            {"model": self.deployed[name].config.repo_id, "replica_id": replica}
            for name in gone
            for replica in self.deployed[name].replicas
        ]
        for name in gone:
            del self.deployed[name]
        return [
            {**self._set(config, config.replicas, generation or "0.8"), "evicted": evicted}
            for config in configs
        ]

    def _set(self, config: DeploymentConfig, count: int, generation: str) -> dict[str, Any]:
        entry = self.deployed.setdefault(config.repo_id.lower(), Deployed(config, generation))
        entry.config = config
        others = sum(len(each.replicas) for each in self.deployed.values()) - len(entry.replicas)
        possible = min(count, ROOM - others)
        entry.replicas = [*entry.replicas, *(next(self._replicas) for _ in range(ROOM))][:possible]
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

    async def evict(
        self, model: str, replica_id: str | None, *, cold: bool
    ) -> list[dict[str, Any]]:
        entry = self._of(model)
        chosen = [each for each in entry.replicas if replica_id in (None, each)]
        if not chosen:
            raise OperationError(404, f"{model} has no replica {replica_id}.")
        if cold:
            entry.replicas = [each for each in entry.replicas if each not in chosen]
        else:
            entry.level = "WARM"
        return [{"model_key": str(entry.config.key), "replica_id": each} for each in chosen]

    async def scale(
        self, model: str, replicas: int, generation: str | None
    ) -> list[dict[str, Any]]:
        entry = self._of(model)
        return [{**self._set(entry.config, replicas, generation or "0.8"), "evicted": []}]

    async def restart(self, model: str) -> list[dict[str, Any]]:
        entry = self._of(model)
        return [{"model_key": str(entry.config.key), "replica_id": each} for each in entry.replicas]

    async def kill(self, request_id: str) -> bool:
        for line in (self.waiting, self.running):
            if request_id in line:
                line.remove(request_id)
                return True
        return False

    async def status(self) -> dict[str, Any]:
        memory = {"bytes": 24 * GIB, "free_bytes": 10 * GIB}
        return {
            "nodes": [{"id": "n1", "name": "this-machine", "gpus": [memory], "cpu": memory}],
            "models": [*self._models()],
            "schedule": {"source": None, "problems": [], "next_change": None, "windows": []},
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
                "dedicated": entry.config.dedicated,
                "size_bytes": 5 * 10**8,
                "desired_replicas": len(entry.replicas),
                "processor": "READY",
                "waiting": len(self.waiting),
                "replicas": [
                    {
                        "replica_id": each,
                        "node_id": "n1",
                        "level": entry.level,
                        "state": "DEPLOYING" if entry.config.repo_id == "org/slow" else "RUNNING",
                        "deployed": 1_700_000_000,
                        "gpu_mem_bytes_by_id": {"0": 10**9},
                        "on_cpu": False,
                        "done": 25,
                        "total": 100,
                        "request_id": None,
                    }
                    for each in entry.replicas
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
                            "request_id": each,
                            "user": "ann",
                            "replica_id": "r1",
                            "since": 1_700_000_000,
                        }
                        for each in self.running
                    ],
                    "waiting": [
                        {
                            "request_id": each,
                            "user": "bob",
                            "position": place,
                            "received": 1_700_000_000,
                            "expected_start_s": 75.0 if place == 1 else None,
                        }
                        for place, each in enumerate(self.waiting, 1)
                    ],
                }
            ]
        }

    async def export(self) -> list[dict[str, Any]]:
        return [
            {**entry_of(each.config), "replicas": len(each.replicas)}
            for each in self.deployed.values()
        ]

    async def stop(self) -> None:
        self.stopped = True


def application(operations: Table, options: Settings | None = None) -> Starlette:
    """The gateway around it, as a server has it."""
    options = options or Settings()
    routes = [
        *Admin(operations, TOKEN, options).routes(),
        *Health(
            OwnCatalogue(Models(), dict, lambda: True), OpenAccounts(hotswapping=True)
        ).routes(),
    ]
    return gateway(
        routes,
        SocketIo(MemoryBroker(), options),
        Hub(share_weights=False),
        None,  # type: ignore[arg-type]
        loopback=True,
    )
