"""A gateway that one client without a key tries to keep busy: `/ping` and another user's jobs meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import uvloop

from bench.clients.user import User, pings
from bench.figures import Figure
from bench.sampling import quantile
from bench.scenario import Site
from bench.servers.machine import Machine
from bench.servers.no_op import no_op_machine
from bench.servers.processes import ROOT

_ATTACKS = ("pings", "texts", "idle connections", "slow bodies")
"""Attacks of `bench.clients.misbehaving`."""
_PINGS = 300
_JOBS = 200
_BEGUN_S = 2.0
"""Seconds until an attack has opened its connections."""


async def _jobs_s(user: User) -> float:
    """Return the median seconds of a no-op job."""
    samples = []
    for _ in range(_JOBS):
        began = time.perf_counter()
        await user.run()
        samples.append(time.perf_counter() - began)
    return statistics.median(samples)


@contextlib.contextmanager
def _attacker(port: int, attack: str) -> Iterator[None]:
    command = [sys.executable, "-m", "bench.clients.misbehaving", str(port), attack]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(site: Site) -> Iterator[Figure]:
    """Measure `/ping` and no-op jobs, alone and beside each attack."""
    with no_op_machine({**site.environment}) as machine:
        yield from uvloop.run(_measure(machine))


async def _measure(machine: Machine) -> list[Figure]:
    user = User(machine.port, api_key=next(iter(machine.keys.values())))
    await user.connect()
    await _jobs_s(user)
    figures = []
    for attack in _ATTACKS:
        alone = await _jobs_s(user)
        with _attacker(machine.port, attack):
            await asyncio.sleep(_BEGUN_S)
            latencies = sorted(await pings(machine.port, _PINGS))
            beside = await _jobs_s(user)
        p50, p99 = (quantile(latencies, part) * 1e3 for part in (0.5, 0.99))
        figures += [
            Figure(
                f"p99 of /ping beside {attack}",
                p99,
                100,
                "ms",
                how=f"{_PINGS} pings, p50 {p50:.1f}, slowest {latencies[-1] * 1e3:.1f} ms",
            ),
            Figure(
                f"a no-op job beside {attack} / alone",
                beside / alone,
                2,
                "x",
                how=f"{beside * 1e3:.1f} and {alone * 1e3:.1f} ms; medians of {_JOBS}",
            ),
        ]
    user.close()
    return figures
