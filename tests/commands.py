"""Commands of `ndif`, each forked from a process that has imported the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from tests.fork_server import ForkServer
from tests.waiting import PATIENCE_S

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
"""Modules that the commands import, each as it is called."""

_STARTING = (["start"], ["restart"])
"""Commands that become a server, which is known by the environment that it was started with."""


@cache
def _server() -> ForkServer:
    return ForkServer("ndif.cli.main:cli", _IMPORTED)


def ndif(
    *arguments: str | Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in an environment; the result is that of `subprocess.run`."""
    given = [str(each) for each in arguments]
    if given[:1] in _STARTING:
        return subprocess.run(
            [NDIF, *given],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    code, output, errors = _server().fork(given, environment).communicate(PATIENCE_S)
    return subprocess.CompletedProcess([str(NDIF), *given], code, output, errors)
