"""A watchdog for the memory and threads of a running request, which no kernel limit counts by process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_INTERVAL_S = 0.05
_KIB = 1024


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """The memory and threads of a process."""

    memory_bytes: int
    """Anonymous and shared memory; the kernel can reclaim the pages of files."""
    threads: int

    @classmethod
    def of(cls, pid: int) -> ResourceUsage | None:
        """Return the usage of process `pid`; None if it does not exist."""
        try:
            text = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return None
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        if "RssAnon" not in fields:
            return None  # the process is ending
        pages = int(fields["RssAnon"].split()[0]) + int(fields["RssShmem"].split()[0])
        return cls(pages * _KIB, int(fields["Threads"]))


@dataclass(frozen=True, slots=True)
class ResourceWatchdog:
    """The limits of a request's memory and threads, beyond its runner's own."""

    memory_bytes: int
    max_threads: int

    def exceeded(self, before: ResourceUsage, now: ResourceUsage) -> str | None:
        """Return the message for the user of a request that exceeds a limit; None if it does not."""
        if now.memory_bytes - before.memory_bytes > self.memory_bytes:
            return (
                f"The request took more than {self.memory_bytes:,} bytes of memory, the most that this "
                "server gives to one (NDIF_RUNNER_MEMORY_BYTES), and was ended. Compute less at once."
            )
        if now.threads > self.max_threads:
            return (
                f"The request started more than {self.max_threads} threads, the most that this server "
                "gives to one (NDIF_RUNNER_MAX_THREADS), and was ended."
            )
        return None

    async def enforce(self, pid: int, end: Callable[[str], None]) -> None:
        """Call `end` with the reason if process `pid` exceeds a limit; return when it has ended."""
        before = ResourceUsage.of(pid)
        while before is not None and (now := ResourceUsage.of(pid)) is not None:
            if reason := self.exceeded(before, now):
                end(reason)
                return
            await asyncio.sleep(_INTERVAL_S)
