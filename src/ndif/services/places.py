"""Where the services of this machine's session are, whose they are, and whether they run."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from ndif.services.roles import ALONE
from ndif.services.service import is_taken
from ndif.session.folder import Sessions

_PORTS = {"redis": 6379, "rediss": 6379, "http": 80, "https": 443, "ray": 10001, "": 6379}


def places(sessions: Sessions) -> dict[str, dict[str, Any]]:
    """By name: the address of each service, whose it is, and whether it answers there."""
    found: dict[str, dict[str, Any]] = {}
    running = sessions.running()
    if running is not None:
        for name, said in running[1].services.items():
            whose = "of this session" if said["ours"] else "not of this session"
            found[name] = {"address": said["address"], "whose": whose}
    for name in ALONE:
        alone = sessions.of(name).running()
        if alone is not None:
            whose = f"started alone (process {alone[1].pid})"
            found[name] = {"address": alone[1].url, "whose": whose}
    return {name: {**said, "answers": _answers(said["address"])} for name, said in found.items()}


def _answers(address: str) -> bool | None:
    """None where only the service's own clients can tell."""
    parts = urlsplit(address if "://" in address else f"//{address}")
    if not parts.hostname or address == "auto":
        return None
    return is_taken(parts.hostname, parts.port or _PORTS.get(parts.scheme, 0))
