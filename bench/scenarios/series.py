"""Longer work of one client: traces and large results one after the other, a session, 64 tokens.

A trusted job ends waiting sandboxed processes, so each user has a server. The two servers are equal and are
used in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import truediv

from bench.figures import Figure
from bench.sampling import Samples
from bench.scenario import Site
from bench.servers.machine import SANDBOXED, TRUSTED, trusted_and_sandboxed
from bench.traces import HERE, sample

_ROUNDS = 10
_LIMITS = {"20 traces in a row": 1.1}


def measure(site: Site) -> Iterator[Figure]:
    """Measure a trusted and a sandboxed user; for the generation, also the client's own process."""
    with trusted_and_sandboxed(site) as ways:
        local_way = {HERE: {"folder": str(site.folder)}}
        for block, subject, taken in (
            ("series", "20 traces in a row", ways),
            ("many_large", "10 results of 16 MB in a row", ways),
            ("session", "a session of 20 traces", ways),
            ("generation", "64 tokens", ways | local_way),
        ):
            samples = sample(block, ways[TRUSTED]["url"], taken, rounds=_ROUNDS, warm_up=1)
            yield _ratio(subject, samples, SANDBOXED, TRUSTED, _LIMITS.get(subject))
            if HERE in taken:
                yield _ratio(subject, samples, SANDBOXED, HERE)
                yield _ratio(subject, samples, TRUSTED, HERE)


def _ratio(
    subject: str, samples: Samples, own: str, peer: str, limit: float | None = None
) -> Figure:
    how = f"{samples.median(own):.2f} / {samples.median(peer):.2f} s; {samples.summary}"
    return Figure.of(
        f"{subject}, {own} / {peer}", samples.per_round(truediv, own, peer), limit, "x", how=how
    )
