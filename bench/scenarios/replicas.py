"""The throughput of one and of two replicas, with one thread each.

Light clients send payloads that nnsight 0.8 has serialized, so that the models can use the cores.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

from bench.clients.load import Load, loads_in_turn
from bench.clients.user import User
from bench.figures import Figure
from bench.scenario import Site
from bench.servers.processes import client, server

_CLIENTS, _JOBS, _ROUNDS = 8, 4, 2
_ONE, _TWO = "one", "two replicas of one thread"


def measure(site: Site) -> Iterator[Figure]:
    """Measure generations on one replica and on two."""
    threads = ("--threads", "1")
    with (
        server(site.folder, site.environment, *threads) as (single, one_pid, _),
        server(site.folder, site.environment, *threads, "--replicas", "2") as (two, two_pid, _),
    ):
        request = json.loads(client("payload", "0.8", single, "generation").stdout)
        payload = base64.b64decode(request["payload"])
        loads = {
            way: Load(
                [User(int(url.rpartition(":")[2]), request["key"]) for _ in range(_CLIENTS)],
                payload,
                _JOBS,
                pid,
            )
            for way, url, pid in ((_ONE, single, one_pid), (_TWO, two, two_pid))
        }
        samples = loads_in_turn(loads, _ROUNDS)
    ratio = samples.per_round(lambda single_s, two: single_s / two, _ONE, _TWO)
    how = (
        f"{_JOBS} generations of {_CLIENTS} clients: {samples.median(_TWO):.1f} and "
        f"{samples.median(_ONE):.1f} s; {samples.summary}"
    )
    yield Figure.of(f"{_TWO} / {_ONE}", ratio, 1.8, "x", at_most=False, how=how)
