"""What must be so before a server starts: all that is not is told at once, and nothing is left behind."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ndif.config import Settings
from ndif.gateway.serving import StartError, listen
from ndif.host.runtimes import SUPPORTED, Runtimes
from ndif.sandbox.confinement import ConfinementError, verify
from ndif.schema.checkpoints import CheckpointError, deployment_of
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.deployment_file import DeploymentFileError, from_variable, read_file
from ndif.services.needed import needed
from ndif.services.roles import Role
from ndif.services.room import lack_of_room
from ndif.services.service import Service
from ndif.stores.accounts import FileAccounts, KeysError
from ndif.variables import name_of


@dataclass(frozen=True)
class Ready:
    """What a server needs and has."""

    listening: socket.socket
    deployments: tuple[DeploymentConfig, ...]
    services: tuple[Service, ...]
    """That are to be started, in this order."""


@dataclass(frozen=True)
class Wanted:
    """What it is to start with."""

    host: str
    port: int
    checkpoints: tuple[str, ...]
    deployment_file: Path | None
    role: Role = "all"


def preflight(options: Settings, wanted: Wanted) -> Ready:
    """See that a server can start, and hold its port for it.

    Raises:
        StartError: with everything that is in its way.
    """
    runtimes = Runtimes(options.runtimes).installed()
    problems = [*_folder(options), *_host(options), *_keys(options)]
    deployments, unreadable = _deployments(options, wanted)
    problems += unreadable
    problems += _unserved(deployments, runtimes)
    services = needed(options, wanted.role)
    problems += services.problems
    try:
        listening = listen(
            wanted.host, wanted.port, "Choose another with --port, or end what uses it."
        )
    except StartError as error:
        raise StartError(_sentences([str(error), *problems])) from error
    if problems:
        listening.close()
        raise StartError(_sentences(problems))
    return Ready(listening, deployments, services.to_start)


def preflight_of_services(options: Settings, role: Role) -> tuple[Service, ...]:
    """See that services can start without a server.

    Raises:
        StartError: with everything that is in their way.
    """
    services = needed(options, role)
    problems = [
        *_folder(options),
        *(_host(options) if role in ("ray", "worker") else ()),
        *services.problems,
    ]
    if problems:
        raise StartError(_sentences(problems, "It"))
    return services.to_start


def _sentences(problems: list[str], what: str = "The server") -> str:
    if len(problems) == 1:
        return problems[0]
    return "\n".join(
        [f"{what} cannot start:", *(f"  {n}. {text}" for n, text in enumerate(problems, 1))]
    )


def _folder(options: Settings) -> Iterator[str]:
    root = options.session_root.expanduser().absolute()
    problem = lack_of_room(root, "Sessions and results", name_of("session_root"))
    if problem is not None:
        yield problem


def _host(options: Settings) -> Iterator[str]:
    """What runs models, and strangers' code next to them."""
    yield from _sandbox(options)
    if not Runtimes(options.runtimes).installed():
        yield f"No nnsight is installed: run `pip install '{next(iter(SUPPORTED.values()))}'`."


def _sandbox(options: Settings) -> Iterator[str]:
    try:
        verify(options.sandbox)
    except ConfinementError as error:
        yield str(error)


def _keys(options: Settings) -> Iterator[str]:
    if options.api_keys is not None:
        try:
            FileAccounts(options.api_keys.expanduser())
        except KeysError as error:
            yield f"The API keys cannot be used: {error}"


def _deployments(
    options: Settings, wanted: Wanted
) -> tuple[tuple[DeploymentConfig, ...], list[str]]:
    """Of the variable, the file and the arguments; what comes later in this order stands.

    What is named one by one is there to stay; a file says for each.
    """
    found: dict[str, DeploymentConfig] = {}
    problems: list[str] = []

    def add(configs: Iterable[DeploymentConfig]) -> None:
        found.update((str(config.key).lower(), config) for config in configs)

    try:
        add(replace(config, dedicated=True) for config in from_variable(options.deployments))
    except DeploymentFileError as error:
        problems += error.problems
    if wanted.deployment_file is not None:
        try:
            add(read_file(wanted.deployment_file))
        except DeploymentFileError as error:
            problems += error.problems
    for checkpoint in wanted.checkpoints:
        try:
            add([replace(deployment_of(checkpoint), dedicated=True)])
        except CheckpointError as error:
            problems.append(str(error))
    return tuple(found.values()), problems


def _unserved(deployments: Iterable[DeploymentConfig], installed: Iterable[str]) -> Iterator[str]:
    for config in deployments:
        for generation in config.deployed_for:
            if generation not in installed:
                yield (
                    f"{config.repo_id} is to be served to nnsight {generation}, which is not installed: "
                    f"run `ndif runtime add {generation}`."
                )
