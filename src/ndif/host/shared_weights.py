"""The memory that model processes of the same weights share, kept open as long as one of them lives."""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

_KIB = 1024


@dataclass(eq=False)
class _Memory:
    fd: int
    filler: object
    users: set[object] = field(default_factory=set)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is filled, or will not be."""
    usable: bool = False


class Weights:
    """Anonymous files in memory by the weights they hold. Nobody here looks into them."""

    def __init__(self) -> None:
        self._memory: dict[str, _Memory] = {}

    async def of(self, user: object, name: str, size: int) -> int | None:
        """A descriptor of the memory for `size` bytes, for `user` to fill or to map.

        While another fills it, this waits. None where the machine has too little memory for it: then
        files stay in the page cache, which can do without some of them.
        """
        while (memory := self._memory.get(name)) is not None:
            await memory.settled.wait()
            if memory.usable:
                memory.users.add(user)
                return memory.fd
            if self._memory.get(name) is memory:
                return None
        if size > _available_bytes() // 2:
            return None
        try:
            fd = os.memfd_create("weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:  # a container that forbids it
            return None
        self._memory[name] = _Memory(fd, user, {user})
        return fd

    def filled(self, name: str) -> bool:
        """Whether the weights are there."""
        memory = self._memory.get(name)
        return memory is not None and memory.usable

    def fill(self, name: str, *, usable: bool) -> None:
        """They are; or, not `usable`, this machine's kernel cannot have them in huge pages."""
        memory = self._memory[name]
        memory.usable = usable
        memory.settled.set()

    def leave(self, user: object) -> None:
        """`user` has ended."""
        for name, memory in list(self._memory.items()):
            memory.users.discard(user)
            unfinished = memory.filler is user and not memory.settled.is_set()
            if unfinished or not memory.users:
                del self._memory[name]
                os.close(memory.fd)
                # Who waits for it begins anew.
                memory.settled.set()


def _available_bytes() -> int:
    """What the machine could give without swapping."""
    text = Path("/proc/meminfo").read_text()
    found = re.search(r"^MemAvailable:\s+(\d+)", text, re.MULTILINE)
    return int(found[1]) * _KIB if found else 0
