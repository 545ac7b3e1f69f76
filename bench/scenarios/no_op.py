"""Jobs per second of a model that does nothing, of an empty FastAPI route, and of a Ray Serve deployment.

The server of this project has its default features: keys and their limits, users' runners, records of
usage, a log and metrics. The route runs on the gateway's own stack. The same number of clients sends the
same bytes to each.
"""

from __future__ import annotations

from collections.abc import Iterator

import uvloop

from bench.clients.load import Load
from bench.clients.poster import Poster
from bench.clients.user import SMALL, User
from bench.figures import Figure
from bench.sampling import Samples, in_turn
from bench.scenario import Site
from bench.servers.no_op import empty_route, no_op_machine, ray_serve

_CLIENTS, _ROUNDS = 8, 7
_OURS, _EMPTY, _SERVE = "one machine", "an empty FastAPI route", "Ray Serve"
_JOBS = {_OURS: 400, _EMPTY: 1600, _SERVE: 200}
"""Jobs per round, so that the rounds of each server take about equally long."""


def measure(site: Site) -> Iterator[Figure]:
    """Measure the three servers in turn."""
    with (
        no_op_machine(site.environment) as ours,
        empty_route() as (empty, empty_pid),
        ray_serve() as (deployed, deployed_pid),
    ):
        keys = [*ours.keys.values()][:_CLIENTS]
        posters = range(_CLIENTS)
        samples = _sample(
            {
                _OURS: ([User(ours.port, api_key=key) for key in keys], ours.pid),
                _EMPTY: ([Poster(empty) for _ in posters], empty_pid),
                _SERVE: ([Poster(deployed) for _ in posters], deployed_pid),
            }
        )
    for peer, limit in ((_EMPTY, 0.25), (_SERVE, 3.0)):
        ratio = samples.per_round(lambda theirs, own: theirs / own, peer, _OURS)
        how = (
            f"{1 / samples.median(_OURS):.0f} and {1 / samples.median(peer):.0f} a second; "
            f"{_CLIENTS} clients; {samples.summary}"
        )
        name = f"no-op jobs a second: {_OURS} / {peer}"
        yield Figure.of(name, ratio, limit, "x", at_most=False, how=how)


def _sample(ways: dict[str, tuple[list[User] | list[Poster], int]]) -> Samples:
    """Return the seconds per job."""
    loads = {way: Load(users, SMALL, _JOBS[way], pid) for way, (users, pid) in ways.items()}
    loop = uvloop.new_event_loop()
    samples = in_turn(
        {
            way: lambda load=load: loop.run_until_complete(load.run()) / load.jobs
            for way, load in loads.items()
        },
        rounds=_ROUNDS,
    )
    loop.close()
    return samples
