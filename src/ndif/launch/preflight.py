"""Checks before a server starts: all problems are reported at once, and nothing is left behind."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ndif.config.reference import name_of
from ndif.config.settings import Settings
from ndif.errors import NdifError
from ndif.host.runtimes import SUPPORTED, Runtimes
from ndif.launch.services import Role
from ndif.launch.services.plan import plan_services
from ndif.launch.services.service import Service, disk_space_problem
from ndif.net import StartError, listen
from ndif.sandbox.confinement.confinement import ConfinementError, verify
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.deployment_file import from_variable, read_file
from ndif.schema.deployment_settings import parse_checkpoint
from ndif.stores.accounts import FileAccounts, KeysError


@dataclass(frozen=True)
class ServerOptions:
    """Options of `ndif start` that say what to start."""

    host: str
    port: int | None
    checkpoints: tuple[str, ...]
    deployment_file: Path | None
    role: Role = "all"

    @property
    def is_server(self) -> bool:
        """Return False if only services are started."""
        return self.role in ("all", "api")


@dataclass(frozen=True)
class Prepared:
    """Outcome of the checks of a server, with the port that they took."""

    server: ServerOptions
    listening: socket.socket
    port: int
    deployments: tuple[DeploymentConfig, ...]
    services: tuple[Service, ...]
    """Services to start, in this order."""


def preflight(options: Settings, server: ServerOptions) -> Prepared:
    """Check that a server can start, and take its port; a StartError names every problem."""
    deployments, unreadable = _deployments(options, server)
    installed = Runtimes(options.runtimes).installed()
    services, lacking = plan_services(options, server.role)
    problems = [
        *_machine_problems(options),
        *_account_problems(options),
        *unreadable,
        *(
            f"{config.repo_id} is deployed for nnsight {generation}, which is not installed: "
            f"run `ndif runtime add {generation}`."
            for config in deployments
            for generation in config.deployed_for
            if generation not in installed
        ),
        *lacking,
    ]
    try:
        port = server.port or options.api_port
        listening = listen(server.host, port, "Choose another with --port, or stop what uses it.")
    except StartError as error:
        raise StartError(_numbered([str(error), *problems])) from error
    if problems:
        listening.close()
        raise StartError(_numbered(problems))
    return Prepared(server, listening, listening.getsockname()[1], deployments, services)


def preflight_of_services(options: Settings, role: Role) -> tuple[Service, ...]:
    """Check that services can start without a server, and return them; a StartError names every problem."""
    services, problems = plan_services(options, role)
    problems = [*_machine_problems(options, runs_models=role in ("ray", "worker")), *problems]
    if problems:
        raise StartError(_numbered(problems, "It"))
    return services


def _numbered(problems: list[str], subject: str = "The server") -> str:
    if len(problems) == 1:
        return problems[0]
    return "\n".join(
        [f"{subject} cannot start:", *(f"  {n}. {text}" for n, text in enumerate(problems, 1))]
    )


def _machine_problems(options: Settings, *, runs_models: bool = True) -> Iterator[str]:
    """Check the disk, and what a machine that runs models, and untrusted code next to them, must have."""
    root = options.session_root.expanduser().absolute()
    problem = disk_space_problem(root, "Sessions and results", name_of("session_root"))
    if problem is not None:
        yield problem
    if not runs_models:
        return
    try:
        verify(options.sandbox)
    except ConfinementError as error:
        yield str(error)
    if not Runtimes(options.runtimes).installed():
        yield f"No nnsight is installed: run `pip install '{next(iter(SUPPORTED.values()))}'`."


def _account_problems(options: Settings) -> Iterator[str]:
    if options.api_keys is not None:
        try:
            FileAccounts(options.api_keys.expanduser())
        except KeysError as error:
            yield f"The API keys cannot be used: {error}"


def _deployments(
    options: Settings, server: ServerOptions
) -> tuple[tuple[DeploymentConfig, ...], list[str]]:
    """Return the deployments of the variable, the file and the arguments, and what is wrong with them.

    Where a model is named twice, the arguments win over the file, and the file over the variable. Models of
    the variable and the arguments are dedicated; the file says so for each.
    """
    sources: list[Callable[[], Iterable[DeploymentConfig]]] = [
        lambda: (replace(c, dedicated=True) for c in from_variable(options.deployments))
    ]
    if server.deployment_file is not None:
        sources.append(partial(read_file, server.deployment_file))
    sources += [partial(_of_argument, checkpoint) for checkpoint in server.checkpoints]
    found: dict[str, DeploymentConfig] = {}
    problems: list[str] = []
    for source in sources:
        try:
            found.update((str(config.key).lower(), config) for config in source())
        except NdifError as error:
            problems += str(error).splitlines()
    return tuple(found.values()), problems


def _of_argument(checkpoint: str) -> Iterator[DeploymentConfig]:
    yield replace(parse_checkpoint(checkpoint), dedicated=True)
