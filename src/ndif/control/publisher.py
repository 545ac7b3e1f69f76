"""The leader's publication of its models, for the gateways of other processes."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from ndif.cluster.controller import Controller
from ndif.cluster.status import client_status, describe, files
from ndif.stores.broker import BrokerError

if TYPE_CHECKING:
    # A server of one process has no client of Redis.
    from ndif.stores.leader import SharedCache

logger = logging.getLogger(__name__)

STATUS, MODELS, FILES = "status", "models", "files"
"""Names of the published values in the shared cache."""

_INTERVAL_S = 0.5
_WRITES_PER_LIFE = 3
"""Writes of an unchanged value before it would expire."""


class Publisher:
    """Writes the models, their state and the addresses of their files to the shared cache.

    It writes a value when it changes, and again before it expires. `PublishedCatalogue` and
    `PublishedHfMirror` of each gateway read the values.
    """

    def __init__(self, controller: Controller, cache: SharedCache, life_s: float) -> None:
        """`life_s`: seconds until a value expires whose writer is gone."""
        self._controller = controller
        self._cache = cache
        self._life_s = life_s
        self._written: dict[str, tuple[float, Any]] = {}

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            models, replicas = self._controller.models, self._controller.replicas()
            try:
                await self._write(MODELS, describe(models))
                await self._write(STATUS, client_status(models, replicas))
                await self._write(FILES, files(replicas))
            except BrokerError as error:
                logger.warning("the models could not be published: %s", error)
            await asyncio.sleep(_INTERVAL_S)

    async def _write(self, name: str, value: Any) -> None:
        now = asyncio.get_running_loop().time()
        at, written = self._written.get(name, (now, None))
        if value != written or now - at > self._life_s / _WRITES_PER_LIFE:
            await self._cache.write(name, value, self._life_s)
            self._written[name] = now, value
