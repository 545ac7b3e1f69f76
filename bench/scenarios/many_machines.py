"""A small trace on a default server of many machines: through Redis, S3 and a Ray node.

All services run on this machine. See `small_trace` for the method.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from bench.figures import Figure
from bench.scenario import Site
from bench.scenarios.small_trace import added
from bench.servers.machine import machine
from bench.servers.processes import NAME
from bench.servers.services import services
from bench.traces import HERE, sample

_ROUNDS = 40
_ONE, _MANY = "one machine, sandboxed", "many machines"


def measure(site: Site) -> Iterator[Figure]:
    """Measure many machines and one machine, both with keys and a sandbox."""
    models = {NAME: site.folder}
    with contextlib.ExitStack() as servers:
        host = servers.enter_context(machine(models, site.environment))
        settings, _ = servers.enter_context(services(site.environment, accounts={}))
        many = servers.enter_context(machine(models, settings))
        ways = {
            HERE: {"folder": str(site.folder)},
            _ONE: {"url": host.url, "key": host.key},
            _MANY: {"url": many.url, "key": many.key},
        }
        for generation in ("0.8", "0.7"):
            samples = sample(
                "small", host.url, ways, generation=generation, rounds=_ROUNDS, with_instant=True
            )
            for way in (_ONE, _MANY):
                yield from added(samples, way, generation)
