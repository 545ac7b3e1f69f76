"""Replicas: what each replica of a model does, as its processor sees it (specification, section 4.2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from ndif.host.actor import ModelActor
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


@dataclass(frozen=True, slots=True)
class Run:
    """What a replica is running."""

    entry: Entry[Request]
    actor: ModelActor
    since: float
    """Monotonic seconds."""


@dataclass(slots=True, eq=False)
class Replica:
    """One replica; its id is opaque."""

    id: str
    status: ProcessorStatus = ProcessorStatus.UNINITIALIZED
    run: Run | None = None
    failed: bool = False
    """It could not be started, and is left alone for a while."""

    @property
    def serving(self) -> bool:
        """Whether it has its model."""
        return self.status in (ProcessorStatus.READY, ProcessorStatus.BUSY)

    @property
    def coming(self) -> bool:
        """Whether it is being set up."""
        return self.status in (ProcessorStatus.PROVISIONING, ProcessorStatus.DEPLOYING)


class Replicas:
    """The replicas of one processor."""

    def __init__(self, ids: Iterable[str]) -> None:
        self._replicas = [Replica(replica_id) for replica_id in ids]

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

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
        """How many have their model."""
        return sum(replica.serving for replica in self._replicas)

    def others(self, replica: Replica) -> list[Replica]:
        """All but one."""
        return [other for other in self._replicas if other is not replica]
