"""Memory that model processes with the same weights share, kept open while one of them is alive."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field

from ndif.stores.memory import memories

_MAX_FILES = 512
"""Files in memory that one process may have: the shards of a model are fewer."""


@dataclass(eq=False)
class _Memory:
    fd: int
    filler: object
    users: set[object] = field(default_factory=set)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the memory is filled, or will never be filled."""
    usable: bool = False


class SharedWeights:
    """Anonymous files in memory, by the name of their weights; the host never reads them."""

    def __init__(self) -> None:
        self._memory: dict[str, _Memory] = {}

    async def of(self, user: object, name: str, size: int) -> int | None:
        """Return a descriptor of memory for `size` bytes, for `user` to fill or to map.

        Waits while another process fills the memory. Returns None if the weights cannot be shared, for
        example with too little memory: then the files stay in the page cache, which the kernel can shrink.
        """
        if sum(user in memory.users for memory in self._memory.values()) >= _MAX_FILES:
            return None
        while (memory := self._memory.get(name)) is not None:
            await memory.settled.wait()
            if memory.usable:
                memory.users.add(user)
                return memory.fd
            if self._memory.get(name) is memory:
                return None
        if size > min(source.available for source in memories()) // 2:
            return None
        try:
            fd = os.memfd_create("weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:  # a container that forbids it
            return None
        self._memory[name] = _Memory(fd, user, {user})
        return fd

    def filled(self, name: str) -> bool:
        """Return True if the memory holds the weights."""
        memory = self._memory.get(name)
        return memory is not None and memory.usable

    def fill(self, name: str, *, usable: bool) -> None:
        """Record that the memory is filled, or not `usable`: the kernel has no huge pages for it."""
        self._memory[name].usable = usable
        self._memory[name].settled.set()

    def leave(self, user: object) -> None:
        """Release all memory of `user`, whose process has ended."""
        for name, memory in list(self._memory.items()):
            memory.users.discard(user)
            unfinished = memory.filler is user and not memory.settled.is_set()
            if unfinished or not memory.users:
                del self._memory[name]
                os.close(memory.fd)
                # A process that waits for this memory begins again.
                memory.settled.set()
