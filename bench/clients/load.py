"""Concurrent clients of one server; each sends its next job when its last one has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import uvloop

from bench.sampling import Samples, in_turn
from bench.servers.processes import cpu_s


class Client(Protocol):
    """A client, such as `bench.clients.user.User`."""

    async def connect(self) -> None:
        """Open the client's connections."""

    async def run(self, payload: bytes) -> None:
        """Send a job, and wait for its result."""

    def close(self) -> None:
        """Close the client's connections."""


@dataclass
class Load:
    """Clients, and the payload of their jobs."""

    users: Sequence[Client]
    payload: bytes
    jobs: int
    pid: int | None = None
    """The server's process, if its processor time is measured."""
    cpu_s: list[float] = field(default_factory=list)
    """Core-seconds of the server's processes per job, one value per run."""

    async def run(self) -> float:
        """Send the jobs; return the seconds."""
        left = iter(range(self.jobs))

        async def send(user: Client) -> None:
            for _ in left:
                await user.run(self.payload)

        await asyncio.gather(*(user.connect() for user in self.users))
        before, began = self._used_s(), time.perf_counter()
        await asyncio.gather(*map(send, self.users))
        took = time.perf_counter() - began
        self.cpu_s.append((self._used_s() - before) / self.jobs)
        for user in self.users:
            user.close()
        return took

    def _used_s(self) -> float:
        return cpu_s(self.pid) if self.pid else 0.0


def loads_in_turn(loads: Mapping[str, Load], rounds: int, pause_s: float = 0.15) -> Samples:
    """Return the seconds of each load, measured in turn after a warm-up round."""
    loop = uvloop.new_event_loop()
    samples = in_turn(
        {way: lambda load=load: loop.run_until_complete(load.run()) for way, load in loads.items()},
        rounds=rounds,
        warm_up=1,
        pause_s=pause_s,
    )
    loop.close()
    return samples
