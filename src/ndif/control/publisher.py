"""Publication of models, their state and their files by the leader, for gateways."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from ndif.cluster.controller import Controller
from ndif.cluster.model_files import ModelFilesStorage
from ndif.cluster.status import client_status, publish
from ndif.probe.history import Histories
from ndif.schedule.schedule import Window
from ndif.schema import answer
from ndif.stores.broker import BrokerError

if TYPE_CHECKING:
    # A server of one process does without Redis.
    from ndif.stores.leader import SharedCache

logger = logging.getLogger(__name__)

STATUS, MODELS, FILES = "status", "models", "files"
"""Names of the published values in the shared cache."""

_INTERVAL_S = 0.5
_WRITES_PER_LIFE = 3
"""Number of writes of an unchanged value during its lifetime in the cache."""


@dataclass(eq=False)
class Publisher:
    """Writes the models, their state and the keys of their stored files to the shared cache.

    A value is written when it changes, and again before it expires. Each gateway's `RemoteLeader` and
    `PublishedModels` read the values.
    """

    controller: Controller
    model_files: ModelFilesStorage
    cache: SharedCache
    life_s: float
    """Seconds until a value expires unless it is written again."""
    coming: Callable[[], Sequence[Window]] = tuple
    """Returns the calendar's coming windows."""
    probes: Histories | None = None
    """The outcomes of the server's own probes."""
    _written: dict[str, tuple[float, Any]] = field(default_factory=dict, init=False)

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            models, replicas = self.controller.models, self.controller.replicas()
            try:
                await self._write(MODELS, publish(models))
                status = client_status(self.controller, self.coming(), self.probes)
                await self._write(STATUS, msgspec.Raw(answer.to_json(status)))
                self.model_files.record(replicas)
                await self._write(FILES, self.model_files.stored)
            except BrokerError as error:
                logger.warning("the models could not be published: %s", error)
            await asyncio.sleep(_INTERVAL_S)

    async def _write(self, name: str, value: Any) -> None:
        now = asyncio.get_running_loop().time()
        at, written = self._written.get(name, (now, None))
        if value != written or now - at > self.life_s / _WRITES_PER_LIFE:
            await self.cache.write(name, value, self.life_s)
            self._written[name] = now, value
