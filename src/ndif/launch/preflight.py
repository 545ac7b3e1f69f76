"""Checks before a server starts: all problems are reported at once, and a failure leaves nothing behind."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ndif.config.groups import OperatorSettings
from ndif.config.reference import name_of
from ndif.config.settings import Settings
from ndif.distribution import install_command
from ndif.errors import NdifError
from ndif.host.runtimes import Runtimes, how_to_add
from ndif.launch.access import access_problems, access_warning, exposure_problem
from ndif.launch.services import Role
from ndif.launch.services.plan import plan_services
from ndif.launch.services.service import Service, disk_space_problem
from ndif.net import StartError, listen
from ndif.sandbox.confinement.confinement import ConfinementError, verify
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.deployment_file import from_variable, read_file
from ndif.schema.deployment_settings import parse_checkpoint


@dataclass(frozen=True)
class ServerOptions:
    """Options of `ndif start` that select the parts to start."""

    host: str
    port: int | None
    checkpoints: tuple[str, ...]
    deployment_file: Path | None
    role: Role = "all"
    insecure: bool = False
    """Admit other machines even if no key is needed."""

    @property
    def is_server(self) -> bool:
        """Return True if a server starts, not only services or a worker."""
        return self.role in ("all", "api")


@dataclass(frozen=True)
class Prepared:
    """Result of the checks before a start, with the listening sockets."""

    server: ServerOptions
    services: tuple[Service, ...]
    """Services to start, in this order."""
    listening: socket.socket | None
    """Socket of a server; None if only services are started."""
    port: int
    deployments: tuple[DeploymentConfig, ...]
    admin: socket.socket | None = None
    """Socket of the operator's routes; None if they are on the server's."""
    warning: str | None = None
    """Warning on the API keys, which does not prevent the start."""


def preflight(options: Settings, server: ServerOptions) -> Prepared:
    """Check a start, and listen on a server's ports; raise a StartError that lists every problem."""
    services, lacking = plan_services(options, server.role)
    problems = list(_machine_problems(options, server))
    deployments: tuple[DeploymentConfig, ...] = ()
    warning: str | None = None
    listening, admin, port = None, None, 0
    if server.is_server:
        deployments, unusable = _deployments(options, server)
        warning = access_warning(options)
        exposed = None if server.insecure else exposure_problem(options, server.host)
        problems += [*access_problems(options), *([exposed] if exposed else []), *unusable]
        port = server.port or options.api_port
        try:
            advice = "Choose another with --port, or stop the process that uses it."
            listening = listen(server.host, port, advice)
        except StartError as error:
            problems.insert(0, str(error))
        try:
            admin = _listen_for_operators(options, port)
        except StartError as error:
            problems.append(str(error))
    problems += lacking
    if not problems:
        return Prepared(server, services, listening, port, deployments, admin, warning)
    for listener in (listening, admin):
        if listener is not None:
            listener.close()
    if len(problems) == 1:
        raise StartError(problems[0])
    numbered = [f"  {number}. {text}" for number, text in enumerate(problems, 1)]
    subject = "The server" if server.is_server else "It"
    raise StartError("\n".join([f"{subject} cannot start:", *numbered]))


def _listen_for_operators(options: OperatorSettings, port: int) -> socket.socket | None:
    """Return the socket of the operator's routes, if they have a port of their own."""
    if options.admin_port is None:
        return None
    variable = name_of("admin_port")
    if options.admin_port == port:
        raise StartError(f"{variable} must be another port than the server's, {port}.")
    return listen(options.admin_host, options.admin_port, f"Choose another with {variable}.")


def _machine_problems(options: Settings, server: ServerOptions) -> Iterator[str]:
    """Yield problems of the disk and, if models run here, of the confinement and the runtimes."""
    problem = disk_space_problem(options.root, "Sessions and results", name_of("session_root"))
    if problem is not None:
        yield problem
    if server.role in ("broker", "object-store"):
        return
    try:
        verify(options.sandbox)
    except ConfinementError as error:
        yield str(error)
    if not Runtimes(options.runtimes).installed():
        yield f"No nnsight is installed: run `{install_command('nnsight')}`."


def _deployments(
    options: Settings, server: ServerOptions
) -> tuple[tuple[DeploymentConfig, ...], list[str]]:
    """Return the deployments of the variable, the file and the arguments, and their problems.

    For one model, arguments override the file, and the file overrides the variable. Models of the variable
    and the arguments are dedicated; the file decides for each of its models.
    """
    sources: list[Callable[[], Iterable[DeploymentConfig]]] = [
        lambda: (replace(config, dedicated=True) for config in from_variable(options.deployments))
    ]
    if server.deployment_file is not None:
        sources.append(partial(read_file, server.deployment_file))
    sources += [partial(_of_argument, checkpoint) for checkpoint in server.checkpoints]
    configs: dict[str, DeploymentConfig] = {}
    problems: list[str] = []
    for source in sources:
        try:
            configs.update((str(config.key).lower(), config) for config in source())
        except NdifError as error:
            problems += str(error).splitlines()
    installed = Runtimes(options.runtimes).installed()
    problems += [
        f"{config.repo_id} is deployed for nnsight {generation}, which is not installed. "
        f"{how_to_add(generation)}"
        for config in configs.values()
        for generation in config.deployed_for
        if generation not in installed
    ]
    return tuple(configs.values()), problems


def _of_argument(checkpoint: str) -> Iterator[DeploymentConfig]:
    yield replace(parse_checkpoint(checkpoint), dedicated=True)
