"""The hub of a gateway whose models are elsewhere: it answers with the files that replicas have shared."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ndif.gateway.hub import Hub, HubModel
from ndif.host.snapshot import unpack
from ndif.queue.publishing import FILES
from ndif.stores.broker import BrokerError
from ndif.stores.coordination.notes import Notes
from ndif.stores.objects import ObjectStore, ObjectStoreError

logger = logging.getLogger(__name__)

_LOOK_S = 1.0


class PublishedHub:
    """Has a hub answer for what `ndif.queue.publishing` writes of."""

    def __init__(self, hub: Hub, notes: Notes, objects: ObjectStore, folder: Path) -> None:
        """`folder`: where files are kept that come from other machines."""
        self._hub = hub
        self._notes = notes
        self._objects = objects
        self._folder = folder
        self._served: dict[str, str] = {}

    async def run(self) -> None:
        """Follow what is published, until cancelled."""
        while True:
            try:
                for repo_id, said in (await self._notes.read(FILES) or {}).items():
                    if self._served.get(repo_id) != said["files"]:
                        await self._serve(repo_id, said)
            except (BrokerError, ObjectStoreError) as error:
                logger.info("models' files are not to be had: %s", error)
            except Exception:
                logger.exception("models' files are not to be had")
            await asyncio.sleep(_LOOK_S)

    async def _serve(self, repo_id: str, said: Mapping[str, Any]) -> None:
        content = await self._objects.get(said["files"])
        if content is None:
            return
        folder = self._folder / Path(said["files"]).stem
        snapshot = await asyncio.to_thread(unpack, content, folder)
        self._hub.serve(HubModel(repo_id, snapshot, said["revision"], said["task"]))
        self._served[repo_id] = said["files"]
