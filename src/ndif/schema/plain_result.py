"""Stored results as `torch.load` reads them."""

from __future__ import annotations

from typing import BinaryIO

import zstandard


def is_compressed(beginning: bytes) -> bool:
    """Return True if a result that begins so is zstd; what `torch.save` writes is a zip archive."""
    return beginning.startswith(zstandard.FRAME_HEADER)


def plain(file: BinaryIO) -> BinaryIO:
    """Return a result's file as `torch.save` wrote it; what is read of it is never in memory as a whole.

    Damaged data is a `zstandard.ZstdError` when it is read.
    """
    beginning = file.read(len(zstandard.FRAME_HEADER))
    file.seek(0)
    if not is_compressed(beginning):
        return file
    reader: BinaryIO = zstandard.ZstdDecompressor().stream_reader(file)
    return reader
