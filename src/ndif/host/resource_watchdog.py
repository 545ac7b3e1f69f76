"""Watches what a running request takes, for what no limit of the kernel counts by process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_EVERY_S = 0.05
_KIB = 1024


@dataclass(frozen=True, slots=True)
class Taken:
    """What a process holds now."""

    memory_bytes: int
    """Anonymous and shared memory: what files back the kernel can take away."""
    threads: int

    @classmethod
    def by(cls, pid: int) -> Taken | None:
        """What process `pid` holds; None if there is none."""
        try:
            text = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return None
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        if "RssAnon" not in fields:
            return None  # it is ending
        pages = int(fields["RssAnon"].split()[0]) + int(fields["RssShmem"].split()[0])
        return cls(pages * _KIB, int(fields["Threads"]))


@dataclass(frozen=True, slots=True)
class Watch:
    """The most that a request may take, beyond what its runner held before."""

    memory_bytes: int
    max_threads: int

    def exceeded(self, before: Taken, now: Taken) -> str | None:
        """What to tell the user of a request that took too much; None if it did not."""
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

    async def over(self, pid: int, end: Callable[[str], None]) -> None:
        """Call `end` with the reason once process `pid` takes too much; return when it is gone."""
        before = Taken.by(pid)
        while before is not None and (now := Taken.by(pid)) is not None:
            if reason := self.exceeded(before, now):
                end(reason)
                return
            await asyncio.sleep(_EVERY_S)
