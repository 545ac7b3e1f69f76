"""What happened in a simulation, as its broker and its replicas tell it."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.schema.variant import Variant
from ndif.simulation.meter import Meter
from ndif.simulation.trace import TraceRequest
from ndif.stores.broker import MemoryBroker


@dataclass(slots=True)
class Outcome:
    """What became of one request; seconds since the simulation began."""

    asked: TraceRequest
    received: float
    dispatched: float | None = None
    """For the last time: one that lost its replica is dispatched again."""
    ended: float | None = None
    """None while it waits or runs."""
    error: str | None = None
    on_cpu: bool = False
    """It ran without GPUs, when it was last dispatched."""


@dataclass(slots=True)
class Usage:
    """What was done on a node, or for a model."""

    cold_loads: int = 0
    warm_returns: int = 0
    evicted_warm: int = 0
    """From HOT to WARM."""
    evicted_cold: int = 0
    """From HOT to nothing."""
    dropped: int = 0
    """From WARM to nothing."""
    interrupted: int = 0
    """Requests that lost their replica while they ran."""
    loading_s: float = 0.0
    """Seconds that replicas were on their way, from disk or from memory."""
    gpus_held: Meter = field(default_factory=Meter)
    """GPUs, shares of them counted as such."""
    gpus_busy: Meter = field(default_factory=Meter)
    """Those of replicas that run a request."""
    cpu_bytes: Meter = field(default_factory=Meter)


class Journal:
    """Every request's outcome, and the usage of every model and node."""

    def __init__(self, trace: Sequence[TraceRequest]) -> None:
        origin = trace[0].at
        self.outcomes = [Outcome(asked, asked.at - origin) for asked in trace]
        self.by_model: defaultdict[Variant, Usage] = defaultdict(Usage)
        self.by_node: defaultdict[str, Usage] = defaultdict(Usage)
        self.statuses: Counter[Status] = Counter()
        """How many updates of each kind were sent."""
        self.all_ended = asyncio.Event()
        self.ended_s = 0.0
        """When the simulation ended."""
        self._open = len(trace)

    def close(self, now: float) -> None:
        """Bring every meter up to the end."""
        self.ended_s = now
        for usage in (*self.by_model.values(), *self.by_node.values()):
            for meter in (usage.gpus_held, usage.gpus_busy, usage.cpu_bytes):
                meter.read(now)

    def of(self, request: Request) -> Outcome:
        """What becomes of a request of the simulation, whose id is its place in the trace."""
        return self.outcomes[int(request.id)]

    def told(self, request: Request, response: Response, now: float) -> None:
        """Note an update that a client was sent."""
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
    """The broker of one process; all clients listen to the end, and what they hear is noted."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal
        self._left = asyncio.Event()

    async def publish(self, request: Request, response: Response) -> bool:
        """See `Broker.publish`."""
        self._journal.told(request, response, asyncio.get_running_loop().time())
        return True

    async def absent(self, sessions: Iterable[str]) -> set[str]:
        """See `Broker.absent`."""
        return set()

    async def departed(self, session: str) -> None:
        """See `Broker.departed`."""
        await self._left.wait()
