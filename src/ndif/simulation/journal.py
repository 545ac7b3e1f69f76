"""The record of a simulation, written by its broker and its replicas."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ndif.schema.model_key import Variant
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.simulation.trace import TraceRequest
from ndif.stores.broker import MemoryBroker

HOUR_S = 3600.0


class Meter:
    """The integral of a level over time, in unit-seconds per hour."""

    __slots__ = ("_level", "_since", "hours")

    def __init__(self) -> None:
        self.hours: list[float] = []
        """Unit-seconds in each hour, up to the last `read`."""
        self._level = 0.0
        self._since = 0.0

    def change(self, now: float, by: float) -> None:
        """Change the level by `by` from `now` on."""
        self.read(now)
        self._level += by

    def read(self, now: float) -> float:
        """Return the unit-seconds until `now`."""
        while self._since < now:
            hour = int(self._since // HOUR_S)
            until = min((hour + 1) * HOUR_S, now)
            self.hours += [0.0] * (hour + 1 - len(self.hours))
            self.hours[hour] += self._level * (until - self._since)
            self._since = until
        return sum(self.hours)


@dataclass(slots=True)
class RequestOutcome:
    """The outcome of one request, in seconds since the simulation began."""

    asked: TraceRequest
    received: float
    dispatched: float | None = None
    """Time of the last dispatch; None while the request waits, also after the loss of its replica."""
    ended: float | None = None
    """None while the request waits or runs."""
    error: str | None = None
    on_cpu: bool = False
    """True if the request last ran without GPUs."""


@dataclass(slots=True)
class NodeUsage:
    """The usage of one node, or of one model."""

    cold_loads: int = 0
    warm_returns: int = 0
    evicted_warm: int = 0
    """Evictions from HOT to WARM."""
    evicted_cold: int = 0
    """Evictions from HOT to COLD."""
    dropped: int = 0
    """Deletions of WARM replicas."""
    interrupted: int = 0
    """Requests that lost their replica during execution."""
    loading_s: float = 0.0
    """Seconds during which replicas loaded, from disk or from memory."""
    gpus_held: Meter = field(default_factory=Meter)
    """GPUs held by replicas, fractions included."""
    gpus_busy: Meter = field(default_factory=Meter)
    """GPUs of replicas that run a request."""
    cpu_bytes: Meter = field(default_factory=Meter)


class Journal:
    """The outcome of every request, and the usage of every model and node."""

    def __init__(self, trace: Sequence[TraceRequest]) -> None:
        origin = trace[0].at
        self.outcomes = [RequestOutcome(request, request.at - origin) for request in trace]
        self.by_model: defaultdict[Variant, NodeUsage] = defaultdict(NodeUsage)
        self.by_node: defaultdict[str, NodeUsage] = defaultdict(NodeUsage)
        self.statuses: Counter[Status] = Counter()
        """Updates sent, by status."""
        self.all_ended = asyncio.Event()
        self.ended_s = 0.0
        """Time at which the simulation ended."""
        self._open = len(trace)

    def close(self, now: float) -> None:
        """Record the end, and read every meter."""
        self.ended_s = now
        for usage in (*self.by_model.values(), *self.by_node.values()):
            for meter in (usage.gpus_held, usage.gpus_busy, usage.cpu_bytes):
                meter.read(now)

    def of(self, request: Request) -> RequestOutcome:
        """Return the outcome of a request; the request's id is its position in the trace."""
        return self.outcomes[int(request.id)]

    def record(self, request: Request, response: Response, now: float) -> None:
        """Record an update to a client; raise a RuntimeError if the request ends twice."""
        self.statuses[response.status] += 1
        if response.status is Status.DISPATCHED:
            self.of(request).dispatched = now
        elif response.status.terminal:
            outcome = self.of(request)
            if outcome.ended is not None:
                raise RuntimeError(f"request {request.id} has ended twice")
            outcome.ended = now
            if response.status is Status.ERROR:
                outcome.error = response.description
            self._open -= 1
            if not self._open:
                self.all_ended.set()


class JournalBroker(MemoryBroker):
    """An in-memory broker whose clients stay connected, and that records every update."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal
        self._left = asyncio.Event()

    async def publish(self, request: Request, response: Response) -> bool:
        """Record the update; see `Broker.publish`."""
        self._journal.record(request, response, asyncio.get_running_loop().time())
        return True

    async def disconnected(self, sessions: Iterable[str]) -> set[str]:
        """Return no session: every client is connected. See `Broker.disconnected`."""
        return set()

    async def until_disconnected(self, session: str) -> None:
        """Wait forever: no client leaves. See `Broker.until_disconnected`."""
        await self._left.wait()
