"""The stores of one process of a server, each opened once and shared by the parts of that process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from ndif.stores.accounts import Accounts
from ndif.stores.broker import Broker
from ndif.stores.callbacks import CallbackQueue
from ndif.stores.objects import ObjectStore
from ndif.stores.ping import Ping
from ndif.stores.responder import Responder

B = TypeVar("B", bound=Broker, covariant=True)


@dataclass(frozen=True)
class Stores(Generic[B]):
    """The broker, results, callbacks, accounts and responder of a server.

    `ndif.server.open_stores` opens them for a server of one process, or of many.
    """

    broker: B
    objects: ObjectStore
    callbacks: CallbackQueue
    accounts: Accounts
    responder: Responder

    @property
    def pings(self) -> Mapping[str, Ping]:
        """Return the ping of each store by its name in metrics and alerts."""
        return {
            "broker": self.broker.ping,
            "objects": self.objects.ping,
            "accounts": self.accounts.ping,
        }

    async def start(self) -> None:
        """Start the stores."""
        # The broker first: it reads the stored ends, so that ended jobs do not run again, and
        # `objects` deletes expired ends.
        await self.broker.start()
        await self.objects.start()
        await self.accounts.start()

    async def stop(self) -> None:
        """Release everything that belongs to this process alone."""
        await self.callbacks.stop()
        await self.broker.stop()
        await self.objects.stop()
        await self.accounts.stop()
