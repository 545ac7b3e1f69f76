"""The replicas of one processor, and what each of them does now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from ndif.queue.fair_queue import Entry
from ndif.schema.request import Request


class ProcessorStatus(str, Enum):
    """State of a processor, or of one of its replicas; one that is further comes later."""

    UNINITIALIZED = "UNINITIALIZED"
    PROVISIONING = "PROVISIONING"
    DEPLOYING = "DEPLOYING"
    READY = "READY"
    BUSY = "BUSY"
    CANCELLED = "CANCELLED"


@dataclass(slots=True)
class Run:
    """A request on a replica."""

    entry: Entry[Request]
    since: float
    """Seconds of the event loop's clock."""


@dataclass(slots=True, eq=False)
class ReplicaWorker:
    """One replica, for as long as it is HOT. The id is opaque."""

    id: str
    status: ProcessorStatus = ProcessorStatus.DEPLOYING
    run: Run | None = None
    leaving: bool = False
    """True once the replica may take no further request."""

    @property
    def serving(self) -> bool:
        """Return True if the replica has loaded its model."""
        return self.status in (ProcessorStatus.READY, ProcessorStatus.BUSY)


class Replicas:
    """The replicas of one processor."""

    def __init__(self) -> None:
        self._replicas: list[ReplicaWorker] = []

    def __iter__(self) -> Iterator[ReplicaWorker]:
        return iter(self._replicas)

    def __len__(self) -> int:
        """Return the number of replicas that are not leaving."""
        return sum(not replica.leaving for replica in self._replicas)

    def add(self, ids: Iterable[str]) -> list[ReplicaWorker]:
        """Add a worker for each of these replicas that has none, and return the new workers."""
        new = [ReplicaWorker(replica_id) for replica_id in ids if self.find(replica_id) is None]
        self._replicas += new
        return new

    def find(self, replica_id: str) -> ReplicaWorker | None:
        """Return the worker of a replica, unless the replica is leaving."""
        return next((r for r in self._replicas if r.id == replica_id and not r.leaving), None)

    def remove(self, replica: ReplicaWorker) -> None:
        """Drop the worker of a replica that has left."""
        self._replicas.remove(replica)

    @property
    def status(self) -> ProcessorStatus:
        """Return the state of the replica that is furthest."""
        statuses = (replica.status for replica in self._replicas)
        rank = list(ProcessorStatus).index
        return max(statuses, key=rank, default=ProcessorStatus.UNINITIALIZED)

    @property
    def runs(self) -> list[Run]:
        """Return the requests that run now."""
        return [replica.run for replica in self._replicas if replica.run is not None]

    @property
    def serving(self) -> int:
        """Return the number of replicas that have loaded their model and are not leaving."""
        return sum(replica.serving and not replica.leaving for replica in self._replicas)
