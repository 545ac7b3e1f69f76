"""Large results: the rate at which a client receives the result of its block.

The peer is the same client, which fetches and loads the same bytes, ready-made, from a server that answers
at once; no server can be faster. The block's own time is subtracted: the time of the same block on the same
model in the client's process, in the same round. If the block takes longer in the server's process, the
difference therefore counts against the server.

The client requests compression. On the server's own machine it gets a zstd frame that is hardly compressed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from bench.figures import MB, Figure
from bench.sampling import Samples
from bench.scenario import Site
from bench.servers.machine import machine
from bench.servers.processes import NAME, server
from bench.traces import HERE, INSTANT, sample

_ROUNDS = 3
_SANDBOXED, _LOCAL = "one machine, sandboxed", "local mode"
_LARGE = 256


def measure(site: Site) -> Iterator[Figure]:
    """Measure 256 MB on one machine; in full also smaller results, and local mode."""
    with contextlib.ExitStack() as servers:
        host = servers.enter_context(machine({NAME: site.folder}, site.environment))
        ways = {_SANDBOXED: {"url": host.url, "key": host.key}, HERE: {"folder": str(site.folder)}}
        if site.full:
            local, _, _ = servers.enter_context(server(site.folder, site.environment))
            ways[_LOCAL] = {"url": local}
        for size in (1, 64, _LARGE) if site.full else (_LARGE,):
            for nnsight in site.clients:
                peers = {peer.name: peer.way for peer in site.peers_of(nnsight)}
                for compress in (True, False):
                    samples = sample(
                        f"large-{size}",
                        host.url,
                        ways | peers,
                        generation=nnsight,
                        with_instant=True,
                        compress=compress,
                        rounds=_ROUNDS,
                        warm_up=1,
                        pause_s=0.3,
                    )
                    form = "compressed" if compress else "not compressed"
                    name = f"{size} MB bfloat16, {form}, {nnsight}"
                    for way in [way for way in ways | peers if way != HERE]:
                        yield _rate(name, size, samples, way)
                    for peer in peers:
                        yield _beside(name, samples, peer)


def _beside(name: str, samples: Samples, peer: str) -> Figure:
    """Compare the rate of a result with a peer's, including the block's time."""
    ratios = samples.per_round(lambda theirs, ours: theirs / ours, peer, _SANDBOXED)
    how = f"{samples.median(peer):.2f} and {samples.median(_SANDBOXED):.2f} s; {samples.summary}"
    name = f"rate of {name}, {_SANDBOXED} / {peer}"
    return Figure.of(name, ratios, 3, "x", at_most=False, how=how)


def _rate(name: str, size: int, samples: Samples, way: str) -> Figure:
    """Compare the rates of a computed and of a ready-made result."""
    took = samples.per_round(lambda remote_s, local_s: remote_s - local_s, way, HERE)
    ratios = [floor / net for floor, net in zip(samples.seconds[INSTANT], took, strict=True)]
    how = (
        f"{samples.median(way):.2f} s, {samples.median(HERE):.2f} s of it to make it; "
        f"ready-made {samples.median(INSTANT):.2f} s; "
        f"{samples.more['result_bytes'] / MB:.0f} MB sent; {samples.summary}"
    )
    limit = 0.8 if size == _LARGE and way in (_SANDBOXED, _LOCAL) else None
    name = f"rate of {name}, {way} / ready-made"
    return Figure.of(name, ratios, limit, "x", at_most=False, how=how)
