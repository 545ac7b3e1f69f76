"""A small trace on one machine: one layer and the last logits, by client and by confinement.

The limit is the time of the same block in the client's process, after the same pause, plus the client's own
time with a server that answers at once.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator

from bench.figures import Figure
from bench.sampling import Samples, quantile
from bench.scenario import Site
from bench.servers.machine import machine
from bench.servers.processes import NAME, server
from bench.traces import HERE, INSTANT, sample

_ROUNDS = 25


def measure(site: Site) -> Iterator[Figure]:
    """Measure local mode and one machine with its keys, trusted and sandboxed, and peers."""
    with contextlib.ExitStack() as servers:
        local, _, _ = servers.enter_context(server(site.folder, site.environment))
        host = servers.enter_context(machine({NAME: site.folder}, site.environment))
        ways = {
            HERE: {"folder": str(site.folder)},
            "local mode": {"url": local},
            "one machine, sandboxed": {"url": host.url, "key": host.key},
        }
        for nnsight in site.clients:
            peers = {peer.name: peer.way for peer in site.peers_of(nnsight)}
            samples = sample(
                "small",
                local,
                ways | peers,
                generation=nnsight,
                rounds=_ROUNDS,
                with_instant=True,
            )
            for way in [way for way in ways | peers if way != HERE]:
                yield from added(samples, way, nnsight)
            for peer in peers:
                yield from _beside(samples, peer, nnsight)


def _beside(samples: Samples, peer: str, nnsight: str) -> Iterator[Figure]:
    """Compare a peer with local mode: whole traces, and the time added to the client's own time."""
    whole = samples.per_round(lambda theirs, ours: theirs / ours, peer, "local mode")
    name = f"small trace, {nnsight}: {peer} / local mode"
    yield Figure.of(name, whole, None, "x", at_most=False)
    theirs, ours = (
        statistics.median(
            samples.per_round(lambda a, local, floor: a - local - floor, way, HERE, INSTANT)
        )
        for way in (peer, "local mode")
    )
    # A smaller difference is not measurable.
    ratio = theirs / max(ours, 1e-3)
    how = f"{theirs * 1e3:.1f} and {ours * 1e3:.1f} ms more; at least 1 ms is counted; {samples.summary}"
    name = f"small trace, {nnsight}: what {peer} adds / local mode"
    yield Figure(name, ratio, 3, "x", at_most=False, how=how)


LIMITS_MS = {"local mode": 5.0, "one machine, sandboxed": 8.0, "many machines": 20.0}


def added(samples: Samples, way: str, generation: str) -> Iterator[Figure]:
    """Compare a way with the client's process plus the instant server."""
    extra = samples.per_round(lambda a, local, floor: 1e3 * (a - local - floor), way, HERE, INSTANT)
    name = f"small trace, {generation}: {way}"
    how = (
        f"{samples.median(way) * 1e3:.1f} - in process {samples.median(HERE) * 1e3:.1f} "
        f"- client's floor {samples.median(INSTANT) * 1e3:.1f} ms; {samples.summary}"
    )
    yield Figure.of(name, extra, LIMITS_MS.get(way), "ms more", how=how)
    if way == "local mode":
        limit = samples.per_round(lambda local, floor: local + floor, HERE, INSTANT)
        p95 = quantile(samples.seconds[way], 0.95) - quantile(limit, 0.95)
        yield Figure(
            f"{name}, p95", p95 * 1e3, 10, "ms more", how="between the two 95th percentiles"
        )
