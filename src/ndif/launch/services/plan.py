"""The services that a start needs and itself starts, and the status of running services."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from ndif.config.reference import name_of, without_secrets
from ndif.config.settings import Settings
from ndif.launch.cluster_secret import cluster_secrets, missing_secret
from ndif.launch.run_folder import RunFolders
from ndif.launch.services import STANDALONE, Role
from ndif.launch.services.object_store import object_store
from ndif.launch.services.ray import ray_head, ray_worker
from ndif.launch.services.redis import NAME as BROKER
from ndif.launch.services.redis import broker, obstacle_to, url_with_password
from ndif.launch.services.service import Service, ServiceError, accepts_connections

_BROKER = name_of("broker_url")
_STORE = name_of("object_store_url")
_RAY = name_of("ray_address")
_WORKERS = name_of("api_workers")
SERVICES: dict[str, tuple[Callable[..., Service | None], str, str]] = {
    "broker": (broker, _BROKER, "redis://127.0.0.1:6379/0"),
    "object-store": (object_store, _STORE, "http://127.0.0.1:9000"),
    "ray": (ray_head, _RAY, "127.0.0.1:6380"),
}
"""For each service: its function, its variable, and an example of the value."""


def plan_services(options: Settings, role: Role) -> tuple[tuple[Service, ...], list[str]]:
    """Return the services that this process starts for `role`, in order, and all problems."""
    may_start, is_worker = role == "all", role == "worker"
    checks: list[Callable[[], Service | None]] = []
    if role in ("all", "api", "worker"):
        checks += [
            lambda: broker(options, may_start=may_start, needs_password=not is_worker),
            lambda: object_store(options, may_start=may_start),
        ]
    if role in ("all", "api"):
        checks.append(lambda: ray_head(options, may_start=may_start, leads=True))
    elif role != "worker":
        checks.append(lambda: _standalone(options, role))
    elif options.ray_address:
        checks.append(lambda: ray_worker(options))
    problems = list(contradictions(options, role))
    services = []
    for check in checks:
        try:
            services.append(check())
        except ServiceError as error:
            problems.append(str(error))
    starts = tuple(service for service in services if service is not None)
    if role in ("all", "api") and options.broker_url and not problems:
        problems += secret_problems(options, starts)
    return starts, problems


def secret_problems(options: Settings, starts: Iterable[Service]) -> Iterator[str]:
    """Yield problems of the secret that this server shares with others on the same broker."""
    try:
        secrets = cluster_secrets(options)
    except ServiceError as error:
        yield str(error)
        return
    if any(service.name == BROKER for service in starts):
        return
    if not secrets:
        yield missing_secret(without_secrets(options.broker_url))
    elif why := obstacle_to(url_with_password(options), secrets):
        yield f"The server that leads at {without_secrets(options.broker_url)} {why}."


def addresses(options: Settings) -> dict[str, str]:
    """Return the address of each configured service, without secrets."""
    configured = {
        "broker": without_secrets(options.broker_url),
        "object-store": options.object_store_url,
        "ray": options.ray_address,
    }
    return {name: address for name, address in configured.items() if address}


def _standalone(options: Settings, role: Role) -> Service:
    """Return the service to start; raise a ServiceError if it is not configured or runs already."""
    make, variable, example = SERVICES[role]
    address = addresses(options).get(role)
    if address is None:
        raise ServiceError(
            f"{variable} gives its address: set it, for example {variable}={example}."
        )
    service = make(options, may_start=True)
    if service is None:
        raise ServiceError(f"Something answers at {address} already ({variable}).")
    return service


def contradictions(options: Settings, role: Role) -> Iterator[str]:
    """Yield a sentence for each variable that needs another variable, which is not set."""
    if role in ("all", "api") and options.api_workers > 1 and not options.broker_url:
        yield (
            f"{_WORKERS}={options.api_workers} needs {_BROKER}: several processes share "
            "their state through a broker."
        )
    if role == "worker" and not options.ray_address:
        yield f"A worker joins the cluster that {_RAY} names: set it to HOST:PORT of its head."
    elif role in ("broker", "object-store") or not options.ray_address:
        return
    values = {_BROKER: options.broker_url, _STORE: options.object_store_url}
    missing = [variable for variable, value in values.items() if not value]
    if missing:
        yield (
            f"Replicas on a Ray cluster need {' and '.join(missing)}: they receive requests and deliver "
            "results that way."
        )


_DEFAULT_PORTS = {"redis": 6379, "rediss": 6379, "http": 80, "https": 443, "ray": 10001, "": 6379}


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """Status of a running service, as seen from this machine."""

    address: str
    whose: str
    """Phrase on the run that started the service, such as "of this session"."""
    answers: bool | None
    """True if something listens at the address; None if it names no host, such as Ray's `auto`."""


def service_status(run_folders: RunFolders) -> dict[str, ServiceStatus]:
    """Return the status of running services, by name."""
    services: dict[str, tuple[str, str]] = {}
    running = run_folders.running()
    if running is not None:
        for name, service in running[1].services.items():
            origin = "of this session" if service.ours else "not of this session"
            services[name] = service.address, origin
    for name in STANDALONE:
        standalone = run_folders.of_service(name).running()
        if standalone is not None:
            origin = f"started alone (process {standalone[1].pid})"
            services[name] = standalone[1].url, origin
    return {
        name: ServiceStatus(address, origin, _answers(address))
        for name, (address, origin) in services.items()
    }


def _answers(address: str) -> bool | None:
    parts = urlsplit(address if "://" in address else f"//{address}")
    if not parts.hostname or address == "auto":
        return None
    return accepts_connections(parts.hostname, parts.port or _DEFAULT_PORTS.get(parts.scheme, 0))
