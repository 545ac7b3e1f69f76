"""A service that this machine runs: where it is, and how its program is started and stopped."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ndif.errors import NdifError
from ndif.launch.run_folder import RunFolder
from ndif.net import is_loopback
from ndif.server.supervised import ProcessSpec, Supervisor

_CONNECT_TIMEOUT_S = 1.0
_REAPER_S = 10.0
"""Seconds that the reaper has, beside the program's own, to stop the program's children."""
_LOG_LINES = 15


class ServiceError(NdifError):
    """A service cannot be used or started."""


@dataclass(frozen=True)
class Program:
    """The program of a service."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables beside those of this process."""


@dataclass(frozen=True)
class Service:
    """A service that starts before the server and stops after it."""

    name: str
    """Name on the command line, in `ndif start` and `ndif logs`."""
    address: str
    """Address as its variable gives it, without secrets."""
    host: str
    port: int
    program: Callable[[RunFolder], Awaitable[Program]]
    """Writes the program's configuration into the run folder and returns the program."""
    answers: Callable[[RunFolder], bool]
    """Returns True once the service can be used."""
    start_timeout_s: float
    stop_grace_s: float
    """Seconds between SIGTERM and SIGKILL of the program."""

    async def start(self, supervisor: Supervisor, run_folder: RunFolder) -> None:
        """Start the service and return once it answers.

        Raises:
            ServiceError: If it does not come up, with the last lines of its log.
        """
        program = await self.program(run_folder)
        log = run_folder.log(self.name)
        log.parent.mkdir(parents=True, exist_ok=True)

        def command(parent_pipe: int) -> Sequence[str]:
            reaper = (sys.executable, "-m", "ndif.launch.services.reaper", str(parent_pipe))
            return [*reaper, str(self.stop_grace_s), *program.command]

        process = ProcessSpec(
            self.name,
            command,
            log,
            must_start=True,
            stop_timeout_s=self.stop_grace_s + _REAPER_S,
            environment={**os.environ, **program.environment},
        )
        try:
            await supervisor.start(
                [process], lambda: self.answers(run_folder), self.start_timeout_s
            )
        except (RuntimeError, asyncio.TimeoutError) as error:
            raise ServiceError(self._failure(run_folder)) from error

    def _failure(self, run_folder: RunFolder) -> str:
        try:
            text = run_folder.log(self.name).read_text(errors="replace")
        except OSError:
            text = ""
        sentence = f"The {self.name} at {self.address} did not come up"
        lines = text.splitlines()[-_LOG_LINES:]
        return "\n".join(
            [f"{sentence}. The end of its log:", *lines] if lines else [f"{sentence}."]
        )


def accepts_connections(host: str, port: int) -> bool:
    """Return True if something listens at the address."""
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False


def is_local(host: str) -> bool:
    """Return True if the address is one of this machine's own."""
    if is_loopback(host):
        return True
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        for family, kind, _, _, address in found:
            with socket.socket(family, kind) as probe:
                probe.bind(address)
    except OSError:
        return False
    return bool(found)
