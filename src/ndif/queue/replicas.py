"""The replicas of one processor, and the current activity of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ndif.host.job import Job
from ndif.schema.states import ProcessorStatus

_RANK = {status: rank for rank, status in enumerate(ProcessorStatus)}


@dataclass(slots=True, eq=False)
class ReplicaWorker:
    """One replica, for as long as it is HOT. The id is opaque."""

    id: str
    status: ProcessorStatus = ProcessorStatus.DEPLOYING
    runs: list[Job] = field(default_factory=list)
    """Jobs that it runs now: several where they share a forward pass."""
    leaving: bool = False
    """True once the replica may take no further request."""

    @property
    def serving(self) -> bool:
        """Return True if the replica has loaded its model."""
        return self.status in (ProcessorStatus.READY, ProcessorStatus.BUSY)


class Replicas(list[ReplicaWorker]):
    """The replicas of one processor, including leaving replicas."""

    @property
    def staying(self) -> list[ReplicaWorker]:
        """Return the replicas that are not leaving."""
        return [replica for replica in self if not replica.leaving]

    def add(self, ids: Iterable[str]) -> list[ReplicaWorker]:
        """Add a worker for each of these replicas that has none, and return the new workers."""
        new = [ReplicaWorker(replica_id) for replica_id in ids if self.find(replica_id) is None]
        self += new
        return new

    def find(self, replica_id: str) -> ReplicaWorker | None:
        """Return the worker of a replica, unless the replica is leaving."""
        return next((replica for replica in self.staying if replica.id == replica_id), None)

    @property
    def status(self) -> ProcessorStatus:
        """Return the status of the most advanced replica."""
        statuses = (replica.status for replica in self)
        return max(statuses, key=_RANK.__getitem__, default=ProcessorStatus.UNINITIALIZED)

    @property
    def runs(self) -> list[Job]:
        """Return the requests that run now."""
        return [run for replica in self for run in replica.runs]

    @property
    def busy(self) -> list[float]:
        """Return the event-loop time at which each busy replica began its run."""
        return [replica.runs[0].run_since for replica in self if replica.runs]

    @property
    def serving(self) -> int:
        """Return the number of replicas that have loaded their model and are not leaving."""
        return sum(replica.serving for replica in self.staying)
