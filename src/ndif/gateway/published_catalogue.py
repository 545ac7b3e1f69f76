"""The catalogue that whoever leads has published, for the gateways of a server of many processes."""

from __future__ import annotations

from typing import Any

from ndif.cluster.models import Models
from ndif.cluster.published import read
from ndif.gateway.refusal import Refusal
from ndif.queue.publishing import MODELS, STATUS
from ndif.stores.coordination.lead import somebody_leads
from ndif.stores.coordination.notes import Notes
from ndif.stores.redis.client import Redis

_RETRY_S = 5
_NOBODY = "No process of this server has come up yet that could run a job. Try again in a moment."


class PublishedCatalogue:
    """Reads what `ndif.queue.publishing` writes."""

    def __init__(self, client: Redis, notes: Notes) -> None:
        self._client = client
        self._notes = notes
        self._described: Any = None
        self._models = Models()

    async def models(self) -> Models:
        """See `Catalogue.models`.

        Raises:
            Refusal: if nothing is published.
        """
        described = await self._notes.read(MODELS)
        if described is None:
            raise Refusal(503, _NOBODY, retry_after_s=_RETRY_S)
        if described is not self._described and described != self._described:
            self._models = read(described)
        self._described = described
        return self._models

    async def status(self) -> dict[str, Any]:
        """See `Catalogue.status`."""
        status: dict[str, Any] | None = await self._notes.read(STATUS)
        return status or {"deployments": {}}

    async def connected(self) -> bool:
        """See `Catalogue.connected`."""
        return await somebody_leads(self._client)
