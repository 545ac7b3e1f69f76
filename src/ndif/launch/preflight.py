"""Checks before a server starts: all problems are reported at once, and nothing is left behind."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ndif.config.reference import name_of
from ndif.config.settings import Settings
from ndif.errors import NdifError
from ndif.host.runtimes import SUPPORTED, Runtimes
from ndif.launch.services import Role
from ndif.launch.services.plan import plan_services
from ndif.launch.services.requirements import disk_space_problem
from ndif.launch.services.service import Service
from ndif.net import StartError, listen
from ndif.sandbox.confinement.confinement import ConfinementError, verify
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.deployment_file import DeploymentFileError, from_variable, read_file
from ndif.schema.deployment_settings import parse_checkpoint
from ndif.stores.accounts import FileAccounts, KeysError


@dataclass(frozen=True)
class Prepared:
    """Outcome of the checks of a server, with the port that they took."""

    listening: socket.socket
    deployments: tuple[DeploymentConfig, ...]
    services: tuple[Service, ...]
    """Services to start, in this order."""


@dataclass(frozen=True)
class ServerOptions:
    """Options of `ndif start` that describe the server."""

    host: str
    port: int
    checkpoints: tuple[str, ...]
    deployment_file: Path | None
    role: Role = "all"


def preflight(options: Settings, server: ServerOptions) -> Prepared:
    """Check that a server can start, and take its port.

    Raises:
        StartError: With every problem that was found.
    """
    runtimes = Runtimes(options.runtimes).installed()
    problems = [
        *_session_root_problems(options),
        *_host_problems(options),
        *_account_problems(options),
    ]
    deployments, unreadable = _deployments(options, server)
    problems += unreadable
    problems += _unserved(deployments, runtimes)
    plan = plan_services(options, server.role)
    problems += plan.problems
    try:
        listening = listen(
            server.host, server.port, "Choose another with --port, or stop what uses it."
        )
    except StartError as error:
        raise StartError(_numbered([str(error), *problems])) from error
    if problems:
        listening.close()
        raise StartError(_numbered(problems))
    return Prepared(listening, deployments, plan.to_start)


def preflight_of_services(options: Settings, role: Role) -> tuple[Service, ...]:
    """Check that services can start without a server, and return them.

    Raises:
        StartError: With every problem that was found.
    """
    plan = plan_services(options, role)
    problems = [
        *_session_root_problems(options),
        *(_host_problems(options) if role in ("ray", "worker") else ()),
        *plan.problems,
    ]
    if problems:
        raise StartError(_numbered(problems, "It"))
    return plan.to_start


def _numbered(problems: list[str], subject: str = "The server") -> str:
    if len(problems) == 1:
        return problems[0]
    return "\n".join(
        [f"{subject} cannot start:", *(f"  {n}. {text}" for n, text in enumerate(problems, 1))]
    )


def _session_root_problems(options: Settings) -> Iterator[str]:
    root = options.session_root.expanduser().absolute()
    problem = disk_space_problem(root, "Sessions and results", name_of("session_root"))
    if problem is not None:
        yield problem


def _host_problems(options: Settings) -> Iterator[str]:
    """Check what a machine that runs models, and untrusted code next to them, must have."""
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
    found: dict[str, DeploymentConfig] = {}
    problems: list[str] = []

    def add(configs: Iterable[DeploymentConfig]) -> None:
        found.update((str(config.key).lower(), config) for config in configs)

    try:
        add(replace(config, dedicated=True) for config in from_variable(options.deployments))
    except DeploymentFileError as error:
        problems += error.problems
    if server.deployment_file is not None:
        try:
            add(read_file(server.deployment_file))
        except DeploymentFileError as error:
            problems += error.problems
    for checkpoint in server.checkpoints:
        try:
            add([replace(parse_checkpoint(checkpoint), dedicated=True)])
        except NdifError as error:
            problems.append(str(error))
    return tuple(found.values()), problems


def _unserved(deployments: Iterable[DeploymentConfig], installed: Iterable[str]) -> Iterator[str]:
    for config in deployments:
        for generation in config.deployed_for:
            if generation not in installed:
                yield (
                    f"{config.repo_id} is deployed for nnsight {generation}, which is not installed: "
                    f"run `ndif runtime add {generation}`."
                )
