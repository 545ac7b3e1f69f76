"""The pages that forks of this process use, which a fork fetches at once instead of fault by fault."""

from __future__ import annotations

import array
import contextlib
import ctypes
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from ndif.runtime.process.children import fork
from ndif.runtime.process.proc_files import Mapping, exclusive, found

_POPULATE_READ, _POPULATE_WRITE = 22, 23
"""Advice to madvise(2), from Linux 5.14 on; older kernels refuse it, and pages are fetched on use."""

_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Pages:
    """Memory of this process that its forks use, in addresses and lengths."""

    read: array.array[int] = field(default_factory=lambda: array.array("Q"))
    """Pages of files. A fork maps them again, which takes 18 ms for 270 MB of weights in small pages."""
    written: array.array[int] = field(default_factory=lambda: array.array("Q"))

    def with_all_of(self, mappings: Iterable[Mapping]) -> Pages:
        """Return these pages, and as read all of some mappings."""
        ranges = [number for each in mappings for number in (each.start, each.size)]
        return replace(self, read=self.read + array.array("Q", ranges))

    def fetch(self) -> None:
        """Map these pages in this process, and copy those that it will write to."""
        # A fault for each, while the threads of a forward pass run, costs ten times as much.
        _advise(self.read, _POPULATE_READ)
        _advise(self.written, _POPULATE_WRITE)


class Rehearsal:
    """A fork that does what later forks will do, and waits until its pages are read.

    Its end is for this process to reap.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        """Fork a process that calls `run`."""
        self.socket, theirs = socket.socketpair()
        """Can be read once `run` has returned. Other forks close it."""

        def rehearse() -> None:
            self.socket.close()
            run()
            theirs.send(b".")
            theirs.recv(1)  # until the other end is closed

        self._pid = fork(rehearse)
        theirs.close()

    def pages(self, but: range = range(0)) -> Pages:
        """Return the pages that the fork has read and written to; no pages if it has failed.

        It may write to the addresses in `but`, too, which are left out.
        """
        with self.socket, contextlib.suppress(OSError):  # it was killed
            if self.socket.recv(1):
                return Pages(found(self._pid), _without(exclusive(self._pid), but))
        return Pages()


def _without(ranges: array.array[int], left_out: range) -> array.array[int]:
    """Return addresses and lengths less those that are left out."""
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
