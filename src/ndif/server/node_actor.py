"""A replica on a node of a cluster, put together from that node's own settings."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from ndif.cluster.deployment import Deployment
from ndif.cluster.fleet import ThisMachine
from ndif.cluster.level import DeploymentLevel
from ndif.config import Settings
from ndif.host.jobs import Equipment
from ndif.host.port import ActorError
from ndif.host.replica import Replica
from ndif.host.runtimes import Runtimes
from ndif.queue.responder import Responder
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.request import Request
from ndif.stores.broker.redis import RedisBroker
from ndif.stores.broker.redis_lanes import Lane
from ndif.stores.objects import open_store


class NodeReplica(Replica):
    """What a cluster starts on a node."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        super().__init__(said)
        # It has a process of its own, whose output its cluster keeps.
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")

    def runtimes(self, settings: Settings) -> Runtimes:
        """Those of its node."""
        return Runtimes(settings.runtimes)

    async def prepare(self) -> Equipment:
        """See `Replica.prepare`."""
        settings = _settings()
        said: dict[str, Any] = self._said
        generation = said["generation"]
        runtimes = self.runtimes(settings)
        if generation not in runtimes.installed():
            raise ActorError(
                f"nnsight {generation} is not installed on the node where it was to be; "
                f"`ndif runtime add {generation}` adds it there"
            )
        objects = open_store(settings, settings.session_root)
        broker = RedisBroker(
            settings.broker_url, objects, inline_bytes=settings.broker_inline_bytes
        )
        await broker.start()
        fleet = ThisMachine(
            settings, broker, objects, runtimes, trusted=False, places=True, shares=True
        )
        (node,) = await fleet.discover()
        _see_gpus(said.get("gpus", []), node.resources.gpu_uuids)
        place = Deployment(**said["place"], level=DeploymentLevel.HOT)
        actor = fleet.make_actor(DeploymentConfig(**said["config"]), generation, place)

        async def has_left(request: Request) -> bool:
            return request.session is not None and bool(await broker.absent([request.session]))

        lane = await Lane.open(broker, place.name)
        respond = Responder(broker, objects).respond
        return Equipment(actor, respond, has_left, lane.next, lane.give_back)


def _see_gpus(counted: Sequence[str | None], here: Sequence[str | None]) -> None:
    """See that the node counts its GPUs as whoever placed the replica does.

    Raises:
        ActorError: if one was lost, added or exchanged since the node was started.
    """
    if any(counted) and [*counted] != [*here]:
        raise ActorError(
            "the GPUs of the node where it was to be are not those that it was started with; stop the node "
            "and start it again (`ndif stop`, `ndif start --worker`): it counts them anew"
        )


def _settings() -> Settings:
    """This node's.

    Raises:
        ActorError: if they are not those of a node of a cluster.
    """
    try:
        settings = Settings()
    except ValidationError as error:
        raise ActorError(
            f"the node's settings are not valid: {error.errors()[0]['msg']}"
        ) from error
    if not settings.broker_url or not settings.object_store_url:
        raise ActorError(
            "the node where it was to be was started without NDIF_BROKER_URL or without "
            "NDIF_OBJECT_STORE_URL, and its replicas deliver their results to both"
        )
    return settings
