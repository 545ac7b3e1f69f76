"""Replicas: what each replica of a model does, as its processor sees it (specification, section 4.2)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from ndif.host.port import Actor
from ndif.queue.line import Entry
from ndif.schema.request import Request


class ProcessorStatus(str, Enum):
    """What a processor, or one of its replicas, is doing."""

    UNINITIALIZED = "UNINITIALIZED"
    PROVISIONING = "PROVISIONING"
    DEPLOYING = "DEPLOYING"
    READY = "READY"
    BUSY = "BUSY"
    CANCELLED = "CANCELLED"


_FURTHEST = (
    ProcessorStatus.BUSY,
    ProcessorStatus.READY,
    ProcessorStatus.DEPLOYING,
    ProcessorStatus.PROVISIONING,
)


@dataclass(slots=True)
class Run:
    """What a replica is running."""

    entry: Entry[Request]
    actor: Actor
    since: float
    """Seconds of the event loop's clock."""
    answered: bool = False
    """Its answer is on its way: it can no longer be ended."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once nothing of it is left to do."""


@dataclass(slots=True, eq=False)
class Replica:
    """One replica, for as long as it is HOT; its id is opaque."""

    id: str
    status: ProcessorStatus = ProcessorStatus.DEPLOYING
    run: Run | None = None
    leaving: bool = False
    """It is to take nothing more."""

    @property
    def serving(self) -> bool:
        """Whether it has its model."""
        return self.status in (ProcessorStatus.READY, ProcessorStatus.BUSY)


class Replicas:
    """The replicas of one processor."""

    def __init__(self) -> None:
        self._replicas: list[Replica] = []

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    def __len__(self) -> int:
        """How many there are that stay."""
        return len(self.ids)

    @property
    def ids(self) -> list[str]:
        """Those that stay."""
        return [replica.id for replica in self._replicas if not replica.leaving]

    def set_replica_ids(self, ids: Iterable[str]) -> list[Replica]:
        """Have a replica for each of these beside those there are; the new ones."""
        known = self.ids
        new = [Replica(replica_id) for replica_id in ids if replica_id not in known]
        self._replicas += new
        return new

    def find(self, replica_id: str) -> Replica | None:
        """The replica of this id, unless it is leaving."""
        return next((r for r in self._replicas if r.id == replica_id and not r.leaving), None)

    def remove(self, replica: Replica) -> None:
        """Forget one."""
        self._replicas.remove(replica)

    @property
    def status(self) -> ProcessorStatus:
        """How far the furthest is."""
        statuses = {replica.status for replica in self._replicas}
        return next((s for s in _FURTHEST if s in statuses), ProcessorStatus.UNINITIALIZED)

    @property
    def runs(self) -> list[Run]:
        """What runs now."""
        return [replica.run for replica in self._replicas if replica.run is not None]

    @property
    def serving(self) -> int:
        """How many have their model, and keep it."""
        return sum(replica.serving and not replica.leaving for replica in self._replicas)
