"""How a server is brought to its end: asked first, and then told."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from ndif.cli.admin import CommandError, Server, options

if TYPE_CHECKING:
    from ndif.session.folder import Sessions
    from ndif.session.record import Record

PATIENCE_S = 30
_AFTER_SIGNAL_S = 60
_POLL_S = 0.1


def end(server: Server, patience_s: float = PATIENCE_S) -> Literal["asked", "signal"]:
    """Ask a server to end, and wait until it is gone; one of this machine is signalled if it stays.

    Raises:
        CommandError: if it stays.
    """
    if not server.is_local:
        server.post("/admin/stop", {})
        if not _within(patience_s, lambda: not _answers(server)):
            raise CommandError(
                f"The server at {server.url} said that it stops, and still answers after "
                f"{patience_s:g} s."
            )
        return "asked"

    from ndif.session.folder import Sessions

    running = Sessions(options().session_root).running()
    if running is None:
        return "asked"
    _, record = running
    # One that does not answer, or does not know its token, still hears a signal.
    with contextlib.suppress(CommandError):
        server.post("/admin/stop", {}, timeout_s=_POLL_S * 50)
        if _within(patience_s, lambda: not record.is_alive):
            return "asked"
    terminate(record)
    return "signal"


def end_worker(record: Record) -> Literal["signal"]:
    """End a node of a cluster, which answers nobody here.

    Raises:
        CommandError: if it stays.
    """
    terminate(record)
    return "signal"


def services(sessions: Sessions) -> list[tuple[str, Record]]:
    """Those that run without a server, in the order in which they are ended."""
    from ndif.services.roles import ALONE

    found = ((name, sessions.of(name).running()) for name in reversed(ALONE))
    return [(name, running[1]) for name, running in found if running is not None]


def terminate(record: Record) -> None:
    """SIGTERM, to the process that the session is of and to no other.

    Raises:
        CommandError: if it stays.
    """
    try:
        if record.is_alive:
            os.kill(record.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise CommandError(f"Process {record.pid} is another user's.") from error
    if not _within(_AFTER_SIGNAL_S, lambda: not record.is_alive):
        raise CommandError(
            f"Process {record.pid} has not ended {_AFTER_SIGNAL_S} s after it was told to. Its log says "
            f"what it does (`ndif logs`); `kill -9 {record.pid}` ends it at once."
        )


def _answers(server: Server) -> bool:
    try:
        server.get("/ping")
    except CommandError:
        return False
    return True


def _within(seconds: float, happens: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not happens():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
