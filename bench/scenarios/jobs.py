"""Jobs per second of eight clients at once, and the processor time of each job.

Light clients send payloads that nnsight 0.8 has serialized. They use one trusted key on one server; on
another server, one sandboxed key, and eight sandboxed keys. A trusted job ends sandboxed processes that
wait for their user's next job. A peer on this machine with Socket.IO clients is measured in turn with these
servers, with payloads of its own nnsight.
"""

from __future__ import annotations

import base64
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from tests.tiny_models import make_gpt2

from bench.clients.load import Load, loads_in_turn
from bench.clients.socket_io_user import SocketIoUser
from bench.clients.user import User
from bench.figures import Figure
from bench.sampling import Samples
from bench.scenario import CLIENTS, Server, Site
from bench.servers.machine import TRUSTED, Machine, machine
from bench.servers.processes import NAME, client

_CLIENTS, _ROUNDS = 8, 5
_ONE, _EIGHT = "one user", "eight users"


def measure(site: Site) -> Iterator[Figure]:
    """Measure the demo model, and a tiny one whose forward pass takes a few milliseconds."""
    with tempfile.TemporaryDirectory() as scratch:
        tiny = make_gpt2(Path(scratch))
        models = {NAME: site.folder, "bench/tiny": tiny}
        with (
            machine(models, site.environment) as sandboxing,
            machine(models, site.environment) as other,
        ):
            for kind, name, block, jobs, limits in (
                ("", NAME, "small", 16, (0.9, 0.75, 1.2)),
                (" of a tiny model", "bench/tiny", "tiny", 64, (0.85, 0.45, None)),
            ):
                yield from _figures(
                    kind, _sample(sandboxing, other, name, block, jobs), limits, jobs
                )
            for peer in site.peers:
                if peer.clients != CLIENTS:
                    yield from _beside(peer, sandboxing, other, 16)


def _sample(trusting: Machine, sandboxing: Machine, name: str, block: str, jobs: int) -> Samples:
    request = json.loads(client("payload", CLIENTS[0], sandboxing.url, block, runs=name).stdout)
    sandboxed = [key for user, key in sandboxing.keys.items() if user != TRUSTED]
    ways = {
        TRUSTED: (trusting, [trusting.keys[TRUSTED]] * _CLIENTS),
        _ONE: (sandboxing, sandboxed[:1] * _CLIENTS),
        _EIGHT: (sandboxing, sandboxed),
    }
    loads = {
        way: Load(
            [User(at.port, request["key"], key) for key in keys],
            base64.b64decode(request["payload"]),
            jobs,
            at.pid,
        )
        for way, (at, keys) in ways.items()
    }
    samples = loads_in_turn(loads, _ROUNDS, 0.5)
    samples.more = {way: load.cpu_s[1:] for way, load in loads.items()}
    return samples


def _beside(peer: Server, trusting: Machine, sandboxing: Machine, jobs: int) -> Iterator[Figure]:
    """Compare the small trace's jobs per second with a peer's, for each nnsight that the peer serves."""
    request = json.loads(client("payload", peer.clients[0], sandboxing.url, "small").stdout)
    ways = {
        peer.name: (urlsplit(peer.url).port or 80, peer.key),
        TRUSTED: (trusting.port, trusting.keys[TRUSTED]),
        _ONE: (sandboxing.port, sandboxing.key),
    }
    payload = base64.b64decode(request["payload"])
    loads = {
        way: Load(
            [SocketIoUser(port, request["key"], request["nnsight"], key) for _ in range(_CLIENTS)],
            payload,
            jobs,
        )
        for way, (port, key) in ways.items()
    }
    samples = loads_in_turn(loads, _ROUNDS, 0.5)
    rates = ", ".join(f"{way} {jobs / samples.median(way):.1f}" for way in ways)
    for way in (TRUSTED, _ONE):
        yield Figure.of(
            f"jobs a second, {way}, nnsight {request['nnsight']} / {peer.name}",
            samples.per_round(lambda theirs, ours: theirs / ours, peer.name, way),
            3,
            "x",
            at_most=False,
            how=f"{rates} jobs/s; {_CLIENTS} clients; {samples.summary}",
        )


def _figures(
    kind: str, samples: Samples, limits: tuple[float, float, float | None], jobs: int
) -> Iterator[Figure]:
    rates = {way: f"{jobs / samples.median(way):.1f}" for way in samples.seconds}
    for way, limit in ((_ONE, limits[0]), (_EIGHT, limits[1])):
        ratio = samples.per_round(lambda trusted, own: trusted / own, TRUSTED, way)
        how = (
            f"{rates[way]}, trusted {rates[TRUSTED]} jobs/s; {_CLIENTS} clients; {samples.summary}"
        )
        name = f"jobs a second{kind}, {way} / trusted"
        yield Figure.of(name, ratio, limit, "x", at_most=False, how=how)
        used, least = samples.more[way], samples.more[TRUSTED]
        ratio = [own / trusted for own, trusted in zip(used, least, strict=True)]
        how = (
            f"{1e3 * statistics.median(used):.0f} ms, trusted {1e3 * statistics.median(least):.0f}"
        )
        yield Figure.of(
            f"processor time of a job{kind}, {way} / trusted", ratio, limits[2], "x", how=how
        )
