"""Signs of life of a process, which distinguish a frozen process from a busy one and a sleeping host.

Every running process uses CPU time. A process that waits for a disk cannot be ended and is
not frozen. Only the running time of the host process counts, so that a laptop may sleep, and a server may
be stopped and continued.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from pathlib import Path

FROZEN_S = 30.0
"""Seconds without a sign of life after which a process counts as frozen."""
_SAMPLES = 20
"""Samples of a process within `frozen_s` seconds."""
_CPU_CLOCK = 2
"""CPUCLOCK_SCHED: the part of a clock's number that asks for all CPU time of a process."""


def sign_of_life(pid: int) -> Hashable:
    """Return a value that changes while process `pid` runs, or waits for a disk."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if stat[0] != "D":
            # clock_getcpuclockid(3) numbers the clocks of other processes like this.
            return time.clock_gettime_ns(~pid << 3 | _CPU_CLOCK)
    except OSError:
        pass  # the process is unknown; its end is reported elsewhere
    return object()


def parent(pid: int) -> int:
    """Return the parent of process `pid`, or raise an `OSError` if it has ended."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def sign_of_family(pid: int) -> Hashable:
    """Return a value that changes while process `pid` or a child of it runs, or waits for a disk."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return object()
    return tuple(sign_of_life(member) for member in (pid, *map(int, children)))


async def until_frozen(sign: Callable[[], Hashable], frozen_s: float = FROZEN_S) -> None:
    """Return once `sign` has not changed for `frozen_s` seconds of this process's running time."""
    interval_s = frozen_s / _SAMPLES
    last, same = sign(), 0
    while same < _SAMPLES:
        await asyncio.sleep(interval_s)
        now = sign()
        last, same = now, same + 1 if now == last else 0
