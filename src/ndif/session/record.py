"""What a session was started with, and whether its process still lives."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_STARTED_FIELD = 19
"""Of /proc/PID/stat, counted from the state: when the process started, in ticks since boot."""


@dataclass(frozen=True)
class Record:
    """What `config.json` holds."""

    session_id: str
    pid: int
    pid_started: int
    """Tells the process from another one that was given its number later."""
    url: str
    """As clients may use it."""
    host: str
    """That it listens on."""
    port: int
    started: str
    version: str
    arguments: list[str] = field(default_factory=list)
    """Of `ndif start`, with whole paths."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Variables that are not as by default, without secrets."""
    node_type: str = "head"
    """Or `worker`: a node of another machine's cluster."""
    services: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name: the `address` of each, and whether it is `ours`, that is, ends with this session."""

    @property
    def is_alive(self) -> bool:
        """Whether its process lives."""
        return started_at(self.pid) == self.pid_started


def record_of(
    session_id: str,
    *,
    url: str,
    host: str,
    port: int,
    version: str,
    arguments: list[str],
    settings: Mapping[str, Any],
    node_type: str = "head",
    services: Mapping[str, dict[str, Any]] | None = None,
) -> Record:
    """A record of this process."""
    return Record(
        session_id=session_id,
        pid=os.getpid(),
        pid_started=started_at(os.getpid()) or 0,
        url=url,
        host=host,
        port=port,
        started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        version=version,
        arguments=arguments,
        settings=dict(settings),
        node_type=node_type,
        services=dict(services or {}),
    )


def started_at(pid: int) -> int | None:
    """When a process started, in ticks since boot; None if there is none."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # A process that has ended and was not waited for is none.
    return None if after_name[0] == "Z" else int(after_name[_STARTED_FIELD])
