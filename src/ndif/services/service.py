"""A service of this server: where it is, and how it is started where it is ours to start."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ndif.gateway.origin import is_loopback
from ndif.services.kept import Task
from ndif.session.folder import Session

_LOOK_S = 1.0


class ServiceError(Exception):
    """A service cannot be used or started; the message says what to do."""


@dataclass(frozen=True)
class Program:
    """What is run for a service."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside this process's."""


@dataclass(frozen=True)
class Service:
    """One that is started here, and ends with the session."""

    name: str
    """As `ndif start` and `ndif logs` call it."""
    address: str
    """As its variable has it, without secrets."""
    host: str
    port: int
    program: Callable[[Session], Awaitable[Program]]
    """Looks at the machine and writes what the program reads; the session is there by then."""
    answers: Callable[[Session], bool]
    comes_up_within_s: float
    ends_within_s: float

    async def task(self, session: Session) -> Task:
        """The process that there is to be."""
        program = await self.program(session)
        log = session.log(self.name)
        log.parent.mkdir(parents=True, exist_ok=True)

        def command(lifeline: int) -> Sequence[str]:
            guard = (sys.executable, "-m", "ndif.services.guard", str(lifeline))
            return [*guard, str(self.ends_within_s), *program.command]

        return Task(
            self.name,
            command,
            log,
            gives_up=True,
            environment={**os.environ, **program.environment},
        )


def is_taken(host: str, port: int) -> bool:
    """Whether something takes connections there."""
    try:
        with socket.create_connection((host, port), timeout=_LOOK_S):
            return True
    except OSError:
        return False


def is_here(host: str) -> bool:
    """Whether an address is one of this machine's own."""
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


def folder(session: Session, name: str) -> Path:
    """Where a service of a session keeps its data, which ends with it."""
    path = session.data / name
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path
