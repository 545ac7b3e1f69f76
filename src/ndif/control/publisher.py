"""Publishing: has every gateway know what is served, while this process leads."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ndif.cluster.controller import Controller
from ndif.cluster.published import describe, files
from ndif.cluster.status import for_clients
from ndif.stores.broker import BrokerError
from ndif.stores.coordination.notes import Notes

logger = logging.getLogger(__name__)

STATUS, MODELS, FILES = "status", "models", "files"
"""The notes' names."""

_LOOK_S = 0.5
_RENEWALS = 3


class Publishing:
    """Writes what has changed, and all of it again before its time is over."""

    def __init__(self, controller: Controller, notes: Notes, life_s: float) -> None:
        """`life_s`: how long what was written is read after its writer is gone."""
        self._controller = controller
        self._notes = notes
        self._life_s = life_s
        self._written: dict[str, tuple[float, Any]] = {}

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            models, replicas = self._controller.models, self._controller.replicas()
            try:
                await self._write(MODELS, describe(models))
                await self._write(STATUS, for_clients(models, replicas))
                await self._write(FILES, files(replicas))
            except BrokerError as error:
                logger.warning("what is served is not published: %s", error)
            await asyncio.sleep(_LOOK_S)

    async def _write(self, name: str, value: Any) -> None:
        now = asyncio.get_running_loop().time()
        at, written = self._written.get(name, (now, None))
        if value != written or now - at > self._life_s / _RENEWALS:
            await self._notes.write(name, value, self._life_s)
            self._written[name] = now, value
