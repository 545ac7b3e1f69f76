"""Why a replica has no place: what would have to go for it, and until when that is protected."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ndif.cluster.deployment import Deployment
from ndif.cluster.eviction import in_order, least, smallest_first
from ndif.cluster.ledger import CpuLedger, GpuLedger, Ledger
from ndif.cluster.level import DeploymentLevel
from ndif.cluster.node import Node
from ndif.cluster.search import Nodes, Search


class Hold(str, Enum):
    """What keeps a replica that is in the way."""

    NOTHING = "nothing"
    """It could go; without the others that is no use."""
    YOUNG = "young"
    """It has not been HOT for the minimum deployment time."""
    TOGETHER = "together"
    """It is asked for together with the newcomer."""
    DEDICATED = "dedicated"
    """It goes only when its operator says so."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """One replica that would have to go."""

    model_key: str
    replica_id: str
    hold: Hold
    protected_s: float = 0.0
    """How much longer it is protected, where it is young."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Replicas of one model that have no place, and how near the best node comes."""

    model_key: str
    replicas: int
    """How many of them."""
    size_bytes: int
    on_cpu: bool
    """Of which memory the rest speaks."""
    node_name: str | None = None
    """The node that comes nearest; None if none has such memory at all."""
    room_bytes: int = 0
    """The largest model that fits there as things are."""
    capacity_bytes: int = 0
    """The largest that would fit there if nobody else were."""
    obstacles: tuple[Obstacle, ...] = ()
    """Who would have to go; nobody if the model is too large for every node."""
    retry_after_s: float | None = None
    """When time alone will have made room; None if it will not."""

    def describe(self) -> dict[str, Any]:
        """It, for JSON."""
        return {
            "model_key": self.model_key,
            "replicas": self.replicas,
            "size_bytes": self.size_bytes,
            "on_cpu": self.on_cpu,
            "node_name": self.node_name,
            "room_bytes": self.room_bytes,
            "capacity_bytes": self.capacity_bytes,
            "obstacles": [
                {
                    "model_key": obstacle.model_key,
                    "replica_id": obstacle.replica_id,
                    "hold": obstacle.hold.value,
                    "protected_s": obstacle.protected_s,
                }
                for obstacle in self.obstacles
            ],
            "retry_after_s": self.retry_after_s,
        }


_TIME, _OTHERS, _TOO_SMALL = range(3)
"""What a node is short of, the easiest to come by first."""


def refuse(nodes: Nodes, search: Search, replicas: int) -> Refusal:
    """Why `replicas` of what was searched for have no place: as the nearest node has it."""
    wanted = search.wanted
    ways = [
        (_distance(node, search, on_cpu), node, on_cpu)
        for on_cpu in wanted.on_cpu
        for node in nodes.values()
        if node.outlook(search.rules).capacity(on_cpu)
    ]
    if not ways:
        return Refusal(wanted.model_key, replicas, wanted.size_bytes, wanted.on_cpu[0])
    (short_of, _), node, on_cpu = min(ways, key=lambda way: way[0])
    obstacles = () if short_of == _TOO_SMALL else _obstacles(node, search, on_cpu)
    patience = bool(obstacles) and all(o.hold in (Hold.NOTHING, Hold.YOUNG) for o in obstacles)
    outlook = node.outlook(search.rules)
    return Refusal(
        model_key=wanted.model_key,
        replicas=replicas,
        size_bytes=wanted.size_bytes,
        on_cpu=on_cpu,
        node_name=node.name,
        room_bytes=outlook.room(on_cpu),
        capacity_bytes=outlook.capacity(on_cpu),
        obstacles=obstacles,
        retry_after_s=max(o.protected_s for o in obstacles) if patience else None,
    )


def _distance(node: Node, search: Search, on_cpu: bool) -> tuple[int, float]:
    """How far a node is from having room: what it is short of, and how much."""
    outlook, size = node.outlook(search.rules), search.wanted.size_bytes
    if size > outlook.capacity(on_cpu):
        return _TOO_SMALL, -outlook.capacity(on_cpu)
    steps = search.steps(node, on_cpu)
    displaced_by = steps.displaced_by(size)
    if displaced_by < math.inf:
        return _TIME, displaced_by - search.displaces
    return _OTHERS, -steps.room(math.inf)


def _obstacles(node: Node, search: Search, on_cpu: bool) -> tuple[Obstacle, ...]:
    """Who would have to go from a node: first those that can, then those that time will let go."""
    rank = list(Hold).index

    def readiness(deployment: Deployment) -> tuple[int, float]:
        hold = _hold(deployment, search)
        return rank(hold), deployment.deployed if hold is Hold.YOUNG else 0.0

    hot = [d for replicas in node.deployments.values() for d in replicas.values()]
    in_the_way = in_order(d for d in hot if d.on_cpu == on_cpu)
    ledger: Ledger = GpuLedger(node.resources, search.rules)
    if on_cpu:
        cached = [d for replicas in node.cache.values() for d in replicas.values()]
        in_the_way = [*smallest_first(cached), *in_the_way]
        ledger = CpuLedger(node.resources.free_cpu_bytes)
    going = least(sorted(in_the_way, key=readiness), ledger, search.wanted.size_bytes) or []
    return tuple(
        _obstacle(deployment, search)
        for deployment in going
        # Nobody misses what is WARM and may go.
        if deployment.level is DeploymentLevel.HOT or _hold(deployment, search) is not Hold.NOTHING
    )


def _hold(deployment: Deployment, search: Search) -> Hold:
    if deployment.level is DeploymentLevel.WARM:
        others = search.together - {search.wanted.model_key}
        return Hold.TOGETHER if deployment.model_key in others else Hold.NOTHING
    if deployment.dedicated:
        return Hold.DEDICATED
    if deployment.model_key in search.together:
        return Hold.TOGETHER
    return Hold.YOUNG if deployment.deployed > search.displaces else Hold.NOTHING


def _obstacle(deployment: Deployment, search: Search) -> Obstacle:
    hold = _hold(deployment, search)
    protected_s = deployment.deployed - search.displaces if hold is Hold.YOUNG else 0.0
    return Obstacle(deployment.model_key, deployment.replica_id, hold, protected_s)
