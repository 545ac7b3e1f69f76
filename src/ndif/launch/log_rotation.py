"""Rotation of a session's logs by copying and truncating.

The server, its gateways and programs like Redis append to their logs through descriptors that they keep
open. Therefore a log is not renamed: its content is copied to `output.log.1`, then the log is truncated,
and its writers continue at the beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from pathlib import Path

logger = logging.getLogger(__name__)

_INTERVAL_S = 10.0
_CHUNK = 1 << 20


async def rotate_forever(folder: Path, max_bytes: int, kept: int) -> None:
    """Rotate the logs below a session's folder until cancelled."""
    while True:
        await asyncio.sleep(_INTERVAL_S)
        try:
            await asyncio.to_thread(rotate_all, folder, max_bytes, kept)
        except OSError as error:
            logger.warning("a log could not be rotated: %s", error)


def rotate_all(folder: Path, max_bytes: int, kept: int) -> None:
    """Rotate each log below a session's folder that has reached `max_bytes`."""
    for log in folder.glob("*/output.log"):
        if log.stat().st_size >= max_bytes:
            rotate(log, kept)


def rotate(log: Path, kept: int) -> None:
    """Move a log's content to `LOG.1`, the older parts to the next numbers, and keep `kept` parts."""
    parts = [log.with_name(f"{log.name}.{number}") for number in range(1, kept + 1)]
    with log.open("r+b") as source, contextlib.ExitStack() as stack:
        if parts:
            copy = log.with_name(f"{log.name}.new")
            target = stack.enter_context(copy.open("wb"))
            try:
                shutil.copyfileobj(source, target, _CHUNK)
                target.flush()
            except OSError:
                # The disk may be full: half a log must not replace an earlier part.
                copy.unlink()
                raise
            for older, newer in zip(reversed(parts), reversed(parts[:-1]), strict=False):
                if newer.exists():
                    newer.replace(older)
            copy.replace(parts[0])
            # Copy lines written meanwhile; only lines between the last read and the truncation are lost.
            while chunk := source.read(_CHUNK):
                target.write(chunk)
            target.flush()
        os.ftruncate(source.fileno(), 0)


def earlier_part(log: Path) -> Path:
    """Return the path of a log's newest earlier part, which may not exist."""
    return log.with_name(f"{log.name}.1")
