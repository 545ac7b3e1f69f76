"""Jobs per second by the number of clients, for one user and for one user per client.

Light clients send payloads that nnsight 0.8 has serialized, each its next job when its last one has ended.
They use one trusted key on one server; on another server, one sandboxed key, and a key per client.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

from bench.clients.load import Load, loads_in_turn
from bench.clients.user import User
from bench.figures import Figure
from bench.scenario import CLIENTS, Site
from bench.servers.machine import TRUSTED, USERS, machine
from bench.servers.processes import NAME, client

_NUMBERS = (1, 2, 8, 32)
_FEW, _MANY = 8, max(_NUMBERS)
_JOBS, _ROUNDS = 32, 3


def measure(site: Site) -> Iterator[Figure]:
    """Measure the demo model."""
    models = {NAME: site.folder}
    users = {TRUSTED: USERS[TRUSTED], **{f"user-{n}": None for n in range(_MANY)}}
    with (
        machine(models, site.environment, users=users) as trusting,
        machine(models, site.environment, users=users) as other,
    ):
        request = json.loads(client("payload", CLIENTS[0], other.url, "small", runs=NAME).stdout)
        sandboxed = [key for user, key in other.keys.items() if user != TRUSTED]
        ways = {}
        for count in _NUMBERS:
            ways[_trusted(count)] = trusting.port, [trusting.keys[TRUSTED]] * count
            ways[_of_one(count)] = other.port, sandboxed[:1] * count
            if count > 1:
                ways[_clients_and_users(count)] = other.port, sandboxed[:count]
        payload = base64.b64decode(request["payload"])
        loads = {
            way: Load([User(port, request["key"], key) for key in keys], payload, _JOBS)
            for way, (port, keys) in ways.items()
        }
        samples = loads_in_turn(loads, _ROUNDS, 0.5)
    rates = {way: _JOBS / samples.median(way) for way in ways}
    for count in _NUMBERS:
        for way in (_of_one(count), _clients_and_users(count)):
            if way in ways:
                yield Figure.of(
                    f"jobs a second of {way} / trusted",
                    samples.per_round(lambda trusted, own: trusted / own, _trusted(count), way),
                    None,
                    "x",
                    at_most=False,
                    how=f"{rates[way]:.1f}, trusted {rates[_trusted(count)]:.1f} jobs/s; {samples.summary}",
                )
    for name in (_trusted, _of_one, _clients_and_users):
        yield Figure.of(
            f"jobs a second of {name(_MANY)} / {name(_FEW)}",
            samples.per_round(lambda few, many: few / many, name(_FEW), name(_MANY)),
            0.9,
            "x",
            at_most=False,
            how=f"{rates[name(_MANY)]:.1f} and {rates[name(_FEW)]:.1f} jobs/s; {samples.summary}",
        )


def _trusted(clients: int) -> str:
    return f"{clients} trusted clients"


def _of_one(clients: int) -> str:
    return f"{clients} clients of one user"


def _clients_and_users(clients: int) -> str:
    return f"{clients} clients of as many users"
