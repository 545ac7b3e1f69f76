"""The CPUs near a GPU: a model process runs on them, and its memory comes from beside them.

Memory needs no policy of its own: Linux takes a page from the node of the CPU that first touches it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path

_NODES = Path("/sys/devices/system/node")


def near(
    nodes: Collection[int | None],
    cpus_by_node: Mapping[int, frozenset[int]],
    allowed: frozenset[int],
) -> frozenset[int] | None:
    """Choose the CPUs for a process whose GPUs are attached to these NUMA nodes.

    None, which leaves the process where it may run anyway, if a GPU's node is not known, if none of the
    CPUs near it is allowed, or if all allowed CPUs are near.
    """
    if not nodes or None in nodes:
        return None
    wanted = [cpus_by_node.get(node, frozenset()) & allowed for node in nodes if node is not None]
    chosen = frozenset().union(*wanted)
    return chosen if all(wanted) and chosen != allowed else None


def cpus_by_node(folder: Path = _NODES) -> dict[int, frozenset[int]]:
    """Return the CPUs of each NUMA node; nothing where the kernel does not tell."""
    found = {}
    for node in folder.glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            found[int(node.name.removeprefix("node"))] = parse((node / "cpulist").read_text())
    return found


def parse(text: str) -> frozenset[int]:
    """Read a list of CPUs as the kernel writes it, like 0-23,48-71.

    Raises:
        ValueError: if it is none.
    """
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return frozenset(
        cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)
    )


def bind(pid: int, cpus: Collection[int]) -> None:
    """Bind every thread of a process to these CPUs, and all that they start from now on."""
    # The first thread comes first: what it starts meanwhile needs no second look.
    others = (int(path.name) for path in Path(f"/proc/{pid}/task").glob("[0-9]*"))
    for thread in [pid, *others]:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(thread, cpus)
