"""Clients of one server that send their jobs at once, each its next when its last has ended."""

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
        """Open its connections."""

    async def run(self, payload: bytes) -> None:
        """Send a job, and wait for its result."""

    def close(self) -> None:
        """Close its connections."""


@dataclass
class Load:
    """Clients, and what they send each time."""

    users: Sequence[Client]
    payload: bytes
    jobs: int
    pid: int | None = None
    """The server's process, if its processor time is asked for."""
    cpu_s: list[float] = field(default_factory=list)
    """Seconds of the server's processes a job, a value each time."""

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
    """Return the seconds of each way's load, in turn, after a round that does not count."""
    loop = uvloop.new_event_loop()
    samples = in_turn(
        {way: lambda load=load: loop.run_until_complete(load.run()) for way, load in loads.items()},
        rounds=rounds,
        warm_up=1,
        pause_s=pause_s,
    )
    loop.close()
    return samples
