"""Jobs per second of trusted clients, with shared and with separate forward passes.

Each of eight clients sends a small trace once its last one has ended: to a server that joins up to eight
requests, and to a server that joins none. Rounds of both alternate. The bound for a pass of eight is also
measured: the same traces in one process without a server.
"""

from __future__ import annotations

import base64
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator

from bench.clients.load import Load, loads_in_turn
from bench.clients.user import User
from bench.figures import Figure
from bench.scenario import CLIENTS, Site
from bench.servers.machine import TRUSTED, machine
from bench.servers.processes import NAME, ROOT, client

_CLIENTS, _JOBS, _ROUNDS = 8, 64, 5
_TOGETHER, _ALONE = "together", "alone"


def measure(site: Site) -> Iterator[Figure]:
    """Measure the demo model in one process, then on the servers."""
    yield _at_best(site)
    models = {NAME: site.folder}
    joining = {**site.environment, "NDIF_CO_BATCH": str(_CLIENTS)}
    with machine(models, joining) as joined, machine(models, site.environment) as other:
        request = json.loads(client("payload", CLIENTS[0], joined.url, "small", runs=NAME).stdout)
        payload = base64.b64decode(request["payload"])
        loads = {
            way: Load(
                [User(at.port, request["key"], at.keys[TRUSTED]) for _ in range(_CLIENTS)],
                payload,
                _JOBS,
                at.pid,
            )
            for way, at in ((_TOGETHER, joined), (_ALONE, other))
        }
        samples = loads_in_turn(loads, _ROUNDS, 0.5)
    rates = {way: f"{_JOBS / samples.median(way):.1f}" for way in samples.seconds}
    yield Figure.of(
        "jobs a second that share forward passes / that do not",
        samples.per_round(lambda alone, together: alone / together, _ALONE, _TOGETHER),
        1.5,
        "x",
        at_most=False,
        how=f"{rates[_TOGETHER]} and {rates[_ALONE]} jobs/s; {_CLIENTS} trusted clients; {samples.summary}",
    )


def _at_best(site: Site) -> Figure:
    process = subprocess.run(
        [sys.executable, "-m", "bench.clients.one_pass", str(site.folder), str(2 * _ROUNDS)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    took = json.loads(process.stdout.splitlines()[-1])
    alone, together = took["one_by_one"], took["together"]
    return Figure.of(
        "eight traces one by one / in one pass, in one process",
        [a / b for a, b in zip(alone, together, strict=True)],
        None,
        "x",
        how=f"{statistics.median(alone) * 1e3:.0f} and {statistics.median(together) * 1e3:.0f} ms",
    )
