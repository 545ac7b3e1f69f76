"""Which services a start needs, which of them it starts, and what is in the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ndif.config import Settings
from ndif.services.broker import broker
from ndif.services.object_store import object_store
from ndif.services.ray_node import ray_head, ray_worker
from ndif.services.roles import Role
from ndif.services.service import Service, ServiceError
from ndif.variables import name_of, without_secrets

_BROKER = name_of("broker_url")
_STORE = name_of("object_store_url")
_RAY = name_of("ray_address")
_WORKERS = name_of("api_workers")
_EXAMPLES = {
    "broker": (_BROKER, "redis://127.0.0.1:6379/0"),
    "object-store": (_STORE, "http://127.0.0.1:9000"),
    "ray": (_RAY, "127.0.0.1:6380"),
}


@dataclass(frozen=True)
class Needed:
    """What a start needs of services."""

    to_start: tuple[Service, ...]
    """In the order in which they are started."""
    problems: tuple[str, ...]


def needed(options: Settings, role: Role) -> Needed:
    """Look at every service that `role` needs."""
    problems = list(_contradictions(options, role))
    found: list[Service] = []
    may_start = role == "all"

    def find(look: Callable[[], Service | None]) -> None:
        try:
            service = look()
        except ServiceError as error:
            problems.append(str(error))
        else:
            if service is not None:
                found.append(service)

    if role in ("all", "api", "worker"):
        find(lambda: broker(options, may_start=may_start))
        find(lambda: object_store(options, may_start=may_start))
    if role in ("all", "api"):
        find(lambda: ray_head(options, may_start=may_start))
    elif role == "worker":
        if options.ray_address:
            find(lambda: ray_worker(options))
    else:
        find(lambda: _alone(options, role))
    return Needed(tuple(found), tuple(problems))


def addresses(options: Settings) -> dict[str, str]:
    """Where the services are, as the variables have it, without secrets."""
    found = {
        "broker": without_secrets(options.broker_url),
        "object-store": options.object_store_url,
        "ray": options.ray_address,
    }
    return {name: address for name, address in found.items() if address}


def _alone(options: Settings, role: Role) -> Service:
    """The one that is to be started, and must not be there yet."""
    variable, example = _EXAMPLES[role]
    address = addresses(options).get(role)
    if address is None:
        raise ServiceError(f"{variable} says where: set it, as {variable}={example}.")
    make = {"broker": broker, "object-store": object_store, "ray": ray_head}[role]
    service = make(options, may_start=True)
    if service is None:
        raise ServiceError(f"Something answers at {address} already ({variable}).")
    return service


def _contradictions(options: Settings, role: Role) -> Iterator[str]:
    if role in ("all", "api") and options.api_workers > 1 and not options.broker_url:
        yield (
            f"{_WORKERS}={options.api_workers} needs {_BROKER}: several processes are one "
            "server through a broker."
        )
    if role in ("broker", "object-store"):
        return
    if role == "worker" and not options.ray_address:
        yield f"A worker joins the cluster that {_RAY} names: set it to HOST:PORT of its head."
    if role != "worker" and not options.ray_address:
        return
    missing = [
        variable
        for variable, value in (
            (_BROKER, options.broker_url),
            (_STORE, options.object_store_url),
        )
        if not value
    ]
    if missing:
        yield (
            f"Replicas on a Ray cluster's nodes need {' and '.join(missing)}: by them requests come and "
            "results go."
        )
