"""Tasks of the event loop, where several end together."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any


async def end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel them, and return when nothing of them runs."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
