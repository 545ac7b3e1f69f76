"""A replica's process on a node of a cluster, put together from that node's own settings."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

from pydantic import ValidationError

from ndif.cluster.fleet import ThisMachine, fetch
from ndif.cluster.remote_actor import NodeServices, RemoteActor
from ndif.config.groups import FolderSettings
from ndif.config.settings import Settings
from ndif.errors import problems
from ndif.host.port import ActorError
from ndif.host.runtimes import Runtimes
from ndif.net import with_password
from ndif.schema.status import Status
from ndif.stores.broker.redis.broker import RedisBroker
from ndif.stores.broker.redis.job_channels import JobReceiver
from ndif.stores.broker.signing import PROTOCOL, Signer
from ndif.stores.callbacks import CallbackLimits
from ndif.stores.callbacks.redis import RedisCallbacks
from ndif.stores.objects import open_store
from ndif.stores.redis import retry
from ndif.stores.responder import Responder
from ndif.telemetry import logs


class NodeActor(RemoteActor):
    """The actor that a cluster starts on a node for each replica."""

    def __init__(self, order: bytes) -> None:
        super().__init__(order)
        # The actor has a process of its own, whose output its cluster keeps. `prepare` reports
        # invalid settings.
        with contextlib.suppress(ValidationError):
            logs.configure("replica", Settings())

    def runtimes(self, settings: FolderSettings) -> Runtimes:
        """Return the runtimes of this node."""
        return Runtimes(settings.runtimes)

    def _runtimes(self, settings: Settings) -> Runtimes:
        """Return the runtimes of this node, or raise an `ActorError` if the model's is missing."""
        runtimes, generation = self.runtimes(settings), self._order.generation
        if generation not in runtimes.installed():
            raise ActorError(
                f"nnsight {generation} is not installed on the replica's node; "
                f"`ndif runtime add {generation}` adds it there"
            )
        return runtimes

    async def fetch(self) -> str | None:
        order = self._order
        try:
            settings = _settings()
            runtimes = self._runtimes(settings)
            await fetch(order.config, order.generation, settings, runtimes, order.protected)
        except ActorError as error:
            return str(error)
        return None

    async def prepare(self) -> NodeServices:
        settings, order, leader = _settings(), self._order, self._leader
        if leader is None or leader["protocol"] != PROTOCOL:
            raise ActorError(
                "ndif on the replica's node has another version than on the leader's machine, and the two "
                "do not work together: install the same version on both"
            )
        place, runtimes = order.place, self._runtimes(settings)
        assert place is not None  # noqa: S101 - only a process that downloads has none
        objects = open_store(settings, settings.session_root)
        broker = RedisBroker(
            with_password(settings.broker_url, leader["broker_password"]),
            objects,
            Signer(leader["secrets"]),
            inline_bytes=settings.broker_inline_bytes,
        )
        # Retry without end: jobs that wait for this replica survive an unavailable broker.
        await retry(broker.start, math.inf)
        fleet = ThisMachine(
            settings, broker, objects, runtimes, trusted=False, uses_placement=True, shares=True
        )
        fleet.protected = lambda: order.protected
        (node,) = await fleet.discover()
        _check_gpus(order.gpus, node.resources.gpu_uuids)
        actor = fleet.make_actor(order.config, order.generation, place)
        channel = await retry(lambda: JobReceiver.open(broker, place.name, leader), math.inf)
        callbacks = RedisCallbacks(
            broker.client, broker.signer, CallbackLimits(of_user=settings.max_callbacks)
        )
        # The leader reports the updates before RUNNING.
        responder = Responder(broker, objects, callbacks, deferred=(Status.RUNNING,))
        return NodeServices(actor, broker, responder, channel)


def _check_gpus(expected: Sequence[str | None], actual: Sequence[str | None]) -> None:
    """Raise if the node counts its GPUs differently from the leader that placed the replica."""
    if any(expected) and [*expected] != [*actual]:
        raise ActorError(
            "the GPUs of the replica's node have changed since the node started; stop the node and start "
            "it again (`ndif stop`, `ndif start --worker`), so that it counts its GPUs anew"
        )


def _settings() -> Settings:
    """Return the settings of this node; raise an `ActorError` if they are invalid, or name no stores."""
    try:
        settings = Settings()
    except ValidationError as error:
        raise ActorError(
            f"the node's settings are not valid: {problems(error, show_values=False)[0].sentence}"
        ) from error
    if not settings.broker_url or not settings.object_store_url:
        raise ActorError(
            "the replica's node was started without NDIF_BROKER_URL or without NDIF_OBJECT_STORE_URL, and "
            "its replicas deliver their results to both"
        )
    return settings
