"""Prefetching of the pages that forks use: a fork maps them at once instead of fault by fault."""

from __future__ import annotations

import array
import contextlib
import ctypes
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from ndif.runtime.process.children import fork
from ndif.runtime.process.procfs import Mapping, exclusive, read_pages

_POPULATE_READ, _POPULATE_WRITE = 22, 23
"""Advice of madvise(2) from Linux 5.14 on; on older kernels it fails, and pages are mapped on use."""

_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class ForkPages:
    """Memory of this process that its forks use, as alternating addresses and lengths."""

    read: array.array[int] = field(default_factory=lambda: array.array("Q"))
    """Pages of files. A fork maps them anew, which takes 18 ms for 270 MB of weights in small pages."""
    written: array.array[int] = field(default_factory=lambda: array.array("Q"))
    """Private pages, which a fork copies."""

    def with_all_of(self, mappings: Iterable[Mapping]) -> ForkPages:
        """Return these pages, with all of the mappings added as read."""
        ranges = [number for mapping in mappings for number in (mapping.start, mapping.size)]
        return replace(self, read=self.read + array.array("Q", ranges))

    def fetch(self) -> None:
        """Map the read pages in this process, and copy the written ones."""
        # Single faults, while the threads of a forward pass run, cost ten times as much.
        _advise(self.read, _POPULATE_READ)
        _advise(self.written, _POPULATE_WRITE)


class Rehearsal:
    """A fork that does the work of later forks, then waits until its page map is read.

    The creator must reap it.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self.socket, peer = socket.socketpair()
        """Becomes readable when `run` has returned. Other forks must close it."""

        def rehearse() -> None:
            self.socket.close()
            run()
            peer.send(b".")
            peer.recv(1)  # until the other end is closed

        self._pid = fork(rehearse)
        peer.close()

    def pages(self, but: range = range(0)) -> ForkPages:
        """Return the pages that the fork has read and written, except written ones in `but`.

        Return no pages if the fork failed.
        """
        with self.socket, contextlib.suppress(OSError):  # the fork was killed
            if self.socket.recv(1):
                return ForkPages(read_pages(self._pid), _without(exclusive(self._pid), but))
        return ForkPages()


def _without(ranges: array.array[int], left_out: range) -> array.array[int]:
    """Return addresses and lengths without the addresses in `left_out`."""
    kept, pairs = array.array("Q"), iter(ranges)
    for start, length in zip(pairs, pairs, strict=True):
        end = start + length
        for first, last in ((start, min(end, left_out.start)), (max(start, left_out.stop), end)):
            if first < last:
                kept.extend((first, last - first))
    return kept


def _advise(ranges: array.array[int], advice: int) -> None:
    pairs = iter(ranges)
    for start, length in zip(pairs, pairs, strict=True):
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice)
