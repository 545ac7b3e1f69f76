"""Commands of `ndif`, each forked from a process that has imported the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.fork_server import ForkServer
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from ndif.host.runtimes import Runtime

NDIF = Path(sys.executable).with_name("ndif")
_IMPORTED = (
    *(
        f"ndif.cli.{name}"
        for name in (
            *("alerts", "callbacks", "deploy", "events", "evict", "export", "info", "jobs", "keys"),
            *("kill", "logs", "model", "probe", "queue", "restart", "scale", "start", "status"),
            *("stop", "tiers", "trace", "usage", "users", "version"),
        )
    ),
    *("ndif.launch.preflight", "ndif.launch.start", "ndif.server.supervised"),
    *("ndif.cli.local", "ndif.server.local", "ndif.server.embedded"),
    *("ndif.control.account_operations", "ndif.stores.accounts.sql.accounts"),
    *("alembic.command", "dateutil.rrule", "httpcore", "httpx", "icalendar", "multiprocessing"),
)
"""Modules that the commands import lazily."""


@cache
def server_of_forks() -> ForkServer:
    """Return the fork server of `ndif` in this process."""
    return ForkServer(f"{__name__}:main", _IMPORTED, command=[sys.executable, str(NDIF)])


def ndif(
    *arguments: str | Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in an environment; return a result as `subprocess.run` does."""
    given = [str(word) for word in arguments]
    if not server_of_forks().takes(environment):
        return subprocess.run(
            [NDIF, *given],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    code, output, errors = server_of_forks().fork(given, environment).communicate(PATIENCE_S)
    return subprocess.CompletedProcess([str(NDIF), *given], code, output, errors)


def main() -> None:
    """Run `ndif`. A server of one model forks its model processes, as a server of many models does."""
    from ndif.cli.main import cli
    from ndif.host.fork_server import ForkServers

    if sys.argv[1:3] == ["local", "start"]:
        start = ForkServers.start

        async def fork(servers: ForkServers, runtime: Runtime, *rest: Any, **options: Any) -> Any:
            servers.prepare(runtime, untrusted=options["untrusted"])
            return await start(servers, runtime, *rest, **options)

        ForkServers.start = fork  # type: ignore[method-assign]
    cli()
