"""A zstd frame of raw blocks, which any zstd decoder reads and which is written at the speed of a copy.

It serves data that hardly compresses, and clients so near that compression takes longer than sending.
Format: RFC 8878, sections 3.1.1.1 (the frame's header) and 3.1.1.2 (blocks).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_MAGIC = 0xFD2FB528
_SIZE_IN_8_BYTES = 0b11 << 6
"""Frame header descriptor: 8 bytes of content size, a window descriptor, no checksum."""
_WINDOW = (17 - 10) << 3
"""Descriptor of a window of 2 ** 17 bytes, so that a decoder keeps one block at most."""
_BLOCK = 1 << 17
"""Size of the largest block, in bytes."""
_LAST, _SIZE_SHIFT, _HEADER_BYTES = 1, 3, 3
_MAX_PARTS = 1024
"""Most buffers that one writev(2) takes on Linux (IOV_MAX)."""


class RawFrame:
    """A file whose writes become the blocks of one zstd frame.

    `write_parts` receives the frame's parts in order. Large buffers are passed on without a copy.
    """

    def __init__(self, write_parts: Callable[[Sequence[Any]], None], size: int) -> None:
        """Begin a frame of `size` bytes; all of them must be written before `finish`."""
        self._write_parts = write_parts
        self._left = size
        self._small = bytearray()
        """Small writes, which are collected into one block."""
        header = bytes((_SIZE_IN_8_BYTES, _WINDOW))
        self._write_parts([_MAGIC.to_bytes(4, "little") + header + size.to_bytes(8, "little")])
        if not size:
            self._write_blocks(memoryview(b""))

    def write(self, data: Any) -> int:
        """Write one or several blocks; collect small buffers until they fill one."""
        view = memoryview(data).cast("B")
        if len(view) + len(self._small) < _BLOCK:
            self._small += view
        else:
            self._write_small()
            self._write_blocks(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing: collected bytes are written with the next block."""

    def finish(self) -> None:
        """End the frame; raise ValueError if it has fewer bytes than its header states."""
        self._write_small()
        if self._left:
            raise ValueError(f"{self._left} bytes of a zstd frame are missing")

    def _write_small(self) -> None:
        if self._small:
            small, self._small = self._small, bytearray()
            self._write_blocks(memoryview(small))

    def _write_blocks(self, view: memoryview) -> None:
        if len(view) > self._left:
            raise ValueError("a zstd frame has more bytes than its header states")
        parts: list[Any] = []
        for start in range(0, len(view) or 1, _BLOCK):
            block = view[start : start + _BLOCK]
            self._left -= len(block)
            header = len(block) << _SIZE_SHIFT | (0 if self._left else _LAST)
            parts += (header.to_bytes(_HEADER_BYTES, "little"), block)
            if len(parts) == _MAX_PARTS:
                self._write_parts(parts)
                parts = []
        if parts:
            self._write_parts(parts)
