"""The catalogue: what a gateway knows of the models behind it, which may be another process's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ndif.cluster.models import Models


class Catalogue(Protocol):
    """What is served, and how far it is."""

    async def models(self) -> Models:
        """Every model by its names."""
        ...

    async def status(self) -> dict[str, Any]:
        """What `GET /status` answers."""
        ...

    async def connected(self) -> bool:
        """Whether a request that comes now will be served."""
        ...


class OwnCatalogue:
    """The catalogue of a gateway that is one process with its models."""

    def __init__(
        self,
        models: Models,
        status: Callable[[], dict[str, Any]],
        connected: Callable[[], bool],
    ) -> None:
        self._models = models
        self._status = status
        self._connected = connected

    async def models(self) -> Models:
        """See `Catalogue.models`."""
        return self._models

    async def status(self) -> dict[str, Any]:
        """See `Catalogue.status`."""
        return self._status()

    async def connected(self) -> bool:
        """See `Catalogue.connected`."""
        return self._connected()
