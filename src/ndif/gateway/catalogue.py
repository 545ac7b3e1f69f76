"""The models that a gateway offers: of its own process, or published by the leader of many."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from ndif.cluster.models import Models
from ndif.cluster.status import PublishedModel, describe_details, read
from ndif.control.remote import MODELS, STATUS
from ndif.gateway.http_error import RETRY_SOON, HttpError
from ndif.schema.answer import from_json
from ndif.schema.client_status import ServerStatus
from ndif.schema.model_key import ModelKey
from ndif.schema.repositories import Repositories
from ndif.schema.structure import ModelDetails

if TYPE_CHECKING:
    # A server of one process has no client of Redis.
    from ndif.stores.leader import SharedCache
    from ndif.stores.redis import Redis

_POLL_S = 0.5
_NOTHING_PUBLISHED = (
    "No process of this server has come up yet that could run a job. Try again in a moment."
)


class Catalogue(Protocol):
    """The models of a server and their state, as its clients see them."""

    async def models(self) -> Models:
        """Return every model."""

    async def status(self) -> ServerStatus:
        """Return the answer of `GET /status`."""

    async def details(self, key: ModelKey) -> ModelDetails:
        """Return the details of a model."""

    async def connected(self) -> bool:
        """Return True if the server can run a request that arrives now."""


@dataclass(frozen=True)
class InProcessCatalogue:
    """The catalogue of a gateway in the same process as the controller."""

    _models: Models
    _status: Callable[[], ServerStatus]
    _connected: Callable[[], bool]

    async def models(self) -> Models:
        """See `Catalogue.models`."""
        return self._models

    async def status(self) -> ServerStatus:
        """See `Catalogue.status`."""
        return self._status()

    async def details(self, key: ModelKey) -> ModelDetails:
        """See `Catalogue.details`."""
        return describe_details(self._models, key)

    async def connected(self) -> bool:
        """See `Catalogue.connected`."""
        return self._connected()


class PublishedCatalogue:
    """The catalogue that the leader's `ndif.control.remote` writes to Redis."""

    def __init__(
        self,
        client: Redis,
        cache: SharedCache,
        status_timeout_s: float,
        repositories: Repositories,
        details: Callable[[ModelKey], Awaitable[ModelDetails]],
    ) -> None:
        """Take what reads Redis, and the seconds to wait for a status that is not there yet.

        Users may have the models of `repositories` loaded. `details` asks the leader for what is not
        published.
        """
        self._details = details
        self._client = client
        self._cache = cache
        self._status_timeout_s = status_timeout_s
        self._repositories = repositories
        self._told: msgspec.Raw | None = None
        self._status = ServerStatus(deployments={})
        self._published: list[PublishedModel] | None = None
        self._models = Models()

    async def models(self) -> Models:
        """See `Catalogue.models`."""
        published = await self._cache.read(MODELS, list[PublishedModel])
        if published is None:
            raise HttpError(503, _NOTHING_PUBLISHED, RETRY_SOON)
        if published is not self._published and published != self._published:
            self._models = read(published, self._repositories)
        self._published = published
        return self._models

    async def status(self) -> ServerStatus:
        """See `Catalogue.status`."""
        deadline = time.monotonic() + self._status_timeout_s
        while (status := await self._cache.read(STATUS, msgspec.Raw)) is None:
            if time.monotonic() > deadline:
                raise HttpError(503, _NOTHING_PUBLISHED, RETRY_SOON)
            await asyncio.sleep(_POLL_S)
        if status is not self._told:
            self._told, self._status = status, from_json(ServerStatus, bytes(status))
        return self._status

    async def details(self, key: ModelKey) -> ModelDetails:
        """See `Catalogue.details`."""
        return await self._details(key)

    async def connected(self) -> bool:
        """See `Catalogue.connected`."""
        from ndif.stores.leader import somebody_leads

        return await somebody_leads(self._client)
