"""A catalogue with given facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ndif.cluster.models import Models
from ndif.cluster.status import describe_details
from ndif.schema.answer import from_plain
from ndif.schema.client_status import ServerStatus
from ndif.schema.model_key import ModelKey
from ndif.schema.structure import ModelDetails


@dataclass
class KnownCatalogue:
    """A `Catalogue` whose models are known and can run requests."""

    configs: Models = field(default_factory=Models)
    deployments: Mapping[str, Any] = field(default_factory=dict)
    """Entries of `/status`."""

    async def models(self) -> Models:
        return self.configs

    async def status(self) -> ServerStatus:
        return from_plain(ServerStatus, {"deployments": self.deployments})

    async def details(self, key: ModelKey) -> ModelDetails:
        return describe_details(self.configs, key)

    async def connected(self) -> bool:
        return True
