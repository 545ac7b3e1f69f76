"""The time from WARM to HOT, compared with a load from the disk."""

from __future__ import annotations

import time
from collections.abc import Iterator

from bench.figures import Figure
from bench.sampling import in_turn
from bench.scenario import Site
from bench.servers.machine import Machine, machine
from bench.servers.processes import NAME

_ROUNDS = 5
_WARM, _COLD = "WARM to HOT", "COLD to HOT"
_SETTLED_S = 1.0


def measure(site: Site) -> Iterator[Figure]:
    """Measure WARM and COLD starts in turn, on the CPU."""
    with machine({}, site.environment) as host:
        host.deploy(NAME, site.folder)  # the server then knows the model's size
        samples = in_turn(
            {_WARM: lambda: _returned(host, site), _COLD: lambda: _returned(host, site, cold=True)},
            rounds=_ROUNDS,
            warm_up=1,
        )
    percent = samples.per_round(lambda warm, cold: 100 * warm / cold, _WARM, _COLD)
    how = f"{samples.median(_WARM) * 1e3:.0f} ms / {samples.median(_COLD):.2f} s; {samples.summary}"
    yield Figure.of(f"{_WARM} / {_COLD}", percent, 5, "%", how=how)


def _returned(host: Machine, site: Site, *, cold: bool = False) -> float:
    """Evict the model; return the seconds until it serves again."""
    host.evict(NAME, cold=cold)
    time.sleep(_SETTLED_S)
    return host.deploy(NAME, site.folder)
