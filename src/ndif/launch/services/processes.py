"""The running processes of a service, which other commands find in /proc."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ndif.launch.services.service import REAPER
from ndif.server.process_config import GATEWAY_MODULE, LEADER_MODULE

_MODULES = {"api": GATEWAY_MODULE, "dispatcher": LEADER_MODULE}


def processes_of(supervisor: int, name: str) -> list[int]:
    """Return the processes of a service that the process `supervisor` has started, sorted by PID."""
    module = _MODULES.get(name)
    words = ["-m", module] if module else ["-m", REAPER, name]
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            arguments = (folder / "cmdline").read_text().split("\0")
            if parent == str(supervisor) and arguments[1 : 1 + len(words)] == words:
                pids.append(int(folder.name))
    return sorted(pids)
