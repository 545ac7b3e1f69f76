"""The CPUs near a GPU, on which its model process runs.

Memory needs no policy of its own: Linux takes a page from the node of the CPU that first touches it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path

_NODES = Path("/sys/devices/system/node")


def nearby_cpus(
    nodes: Collection[int | None],
    cpus_by_node: Mapping[int, frozenset[int]],
    allowed: frozenset[int],
) -> frozenset[int] | None:
    """Return the allowed CPUs for a process whose GPUs are attached to these NUMA nodes.

    None leaves the process on all of them: if a GPU's node is unknown, if no CPU near it is allowed, or if
    all allowed CPUs are near.
    """
    if not nodes or None in nodes:
        return None
    nearby = [cpus_by_node.get(node, frozenset()) & allowed for node in nodes if node is not None]
    chosen = frozenset().union(*nearby)
    return chosen if all(nearby) and chosen != allowed else None


def cpus_by_node(folder: Path = _NODES) -> dict[int, frozenset[int]]:
    """Return the CPUs of each NUMA node; empty if the kernel does not list them."""
    found = {}
    for node in folder.glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            found[int(node.name.removeprefix("node"))] = parse_cpu_list(
                (node / "cpulist").read_text()
            )
    return found


def parse_cpu_list(text: str) -> frozenset[int]:
    """Read a list of CPUs as the kernel writes it, like 0-23,48-71, or raise a `ValueError`."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return frozenset(
        cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)
    )


def bind(pid: int, cpus: Collection[int]) -> None:
    """Bind every thread of a process, and the threads that they start later, to these CPUs."""
    # Threads that the first one starts after its binding inherit it.
    others = (int(path.name) for path in Path(f"/proc/{pid}/task").glob("[0-9]*"))
    for thread in [pid, *others]:
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(thread, cpus)
