"""A trace that reads all thirty layers and edits ten of them: the confinement's cost per access.

A trusted job ends waiting sandboxed processes, so each user has a server. The two servers are equal and are
used in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import truediv

from bench.figures import Figure
from bench.scenario import Site
from bench.servers.machine import SANDBOXED, TRUSTED, trusted_and_sandboxed
from bench.traces import sample

_ROUNDS = 25


def measure(site: Site) -> Iterator[Figure]:
    """Measure a trusted and a sandboxed user."""
    with trusted_and_sandboxed(site) as ways:
        samples = sample("every_layer", ways[TRUSTED]["url"], ways, rounds=_ROUNDS)
    how = (
        f"{samples.median(SANDBOXED) * 1e3:.1f} / {samples.median(TRUSTED) * 1e3:.1f} ms; "
        f"{samples.summary}"
    )
    ratios = samples.per_round(truediv, SANDBOXED, TRUSTED)
    yield Figure.of("30 reads and 10 edits, sandboxed / trusted", ratios, 1.03, "x", how=how)
