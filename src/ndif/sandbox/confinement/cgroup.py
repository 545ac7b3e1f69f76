"""A cgroup for each runner, where this server may create cgroups (cgroups(7), version 2).

The kernel then also counts shared memory, page tables and the kernel's own memory, which a process cannot
hide. Cgroups are optional: the resource watchdog and the system-call filter work without them.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_SERVER = "ndif-server"
"""The cgroup of the server's own processes: a cgroup that contains processes cannot have children."""
_RUNNER = "ndif-runner-"
_CONTROLLERS = ("memory", "pids")
_DELEGATED = ("user.delegate", "trusted.delegate")
"""Extended attributes by which systemd marks a cgroup whose owner may create children."""


class CgroupError(Exception):
    """This server cannot create cgroups; the message is a clause with the reason."""


@dataclass(frozen=True, slots=True)
class RunnerCgroups:
    """The cgroup delegated to this server, and the runners' cgroups below it."""

    base: Path

    @classmethod
    def find(cls, root: Path = _ROOT, own: Path = _OWN) -> RunnerCgroups:
        """Return the cgroup in which this server may create others; change nothing.

        Raises:
            CgroupError: If there is none.
        """
        if not (root / "cgroup.controllers").is_file():
            raise CgroupError("this machine has controllers of version 1")
        lines = own.read_text().splitlines()
        path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
        base = root / path.lstrip("/")
        if base.name == _SERVER:
            base = base.parent
        lacking = set(_CONTROLLERS) - set((base / "cgroup.controllers").read_text().split())
        if lacking:
            raise CgroupError(f"its cgroup has no controller {min(lacking)!r}")
        if not (_is_delegated(base) or _is_of_a_container(base, path)):
            raise CgroupError("its cgroup is not delegated to it")
        if not all(os.access(base / entry, os.W_OK) for entry in (".", "cgroup.procs")):
            raise CgroupError(f"it may not write to {base}")
        return cls(base)

    def prepare(self) -> None:
        """Move this cgroup's processes into a child cgroup, and enable the controllers for children."""
        server = self.base / _SERVER
        server.mkdir(exist_ok=True)
        for pid in (self.base / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (server / "cgroup.procs").write_text(pid)
        (self.base / "cgroup.subtree_control").write_text(
            " ".join(f"+{controller}" for controller in _CONTROLLERS)
        )

    def place(self, pid: int, memory_bytes: int, max_tasks: int) -> None:
        """Move process `pid` into a new cgroup with limits; its memory stays charged to the old one."""
        self.remove_empty()
        cgroup = self.base / f"{_RUNNER}{pid}-{os.urandom(4).hex()}"
        cgroup.mkdir()
        limits = {
            "memory.max": memory_bytes,
            "memory.swap.max": 0,
            "memory.oom.group": 1,
            "pids.max": max_tasks,
        }
        for name, limit in limits.items():
            with contextlib.suppress(FileNotFoundError):  # a kernel without swap has no swap limit
                (cgroup / name).write_text(str(limit))
        (cgroup / "cgroup.procs").write_text(str(pid))

    def remove_empty(self) -> None:
        """Remove the cgroups of runners that have ended or have moved to another cgroup."""
        for cgroup in self.base.glob(f"{_RUNNER}*"):
            with contextlib.suppress(OSError):  # a process is still in it
                cgroup.rmdir()


def _is_delegated(base: Path) -> bool:
    for name in _DELEGATED:
        with contextlib.suppress(OSError):
            if os.getxattr(base, name) == b"1":
                return True
    return False


def _is_of_a_container(base: Path, path: str) -> bool:
    """Return True for the root of a cgroup namespace: unlike the machine's root, it has a `cgroup.type`."""
    return path == "/" and (base / "cgroup.type").exists()
