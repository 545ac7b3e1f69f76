"""The interface of the durable queue of call-backs."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol

from ndif.schema.callback import Callback
from ndif.stores.broker.port import BrokerError


class CallbackLimits(NamedTuple):
    """Maximum numbers of call-backs in a queue."""

    waiting: int = 100_000
    """Call-backs that wait at once; further ones are not taken."""
    of_user: int = 1000
    """Call-backs of one user that may wait."""
    dead: int = 1000
    """Given-up call-backs that are kept; the oldest leave first."""


class CallbackQueueError(BrokerError):
    """The queue does not take a call-back, or does not give it back; the message is a clause."""


class CallbackQueue(Protocol):
    """The call-backs of one server that are not delivered yet, and those that were given up.

    Whoever ends a job adds its call-back; the process that leads delivers it. What `add` and `update` have
    taken outlives every process. All methods raise a `BrokerError` if they fail.
    """

    async def stop(self) -> None:
        """Release everything that belongs to this process alone."""

    async def add(self, callback: Callback) -> None:
        """Store a call-back; it replaces an earlier one of the same id."""

    async def update(self, callback: Callback) -> None:
        """Store the changed state of a call-back, which may have been given up now."""

    async def remove(self, callback_id: str) -> None:
        """Forget a call-back that is delivered."""

    async def due(self, now: float, limit: int, busy: Collection[str] = ()) -> list[Callback]:
        """Return call-backs that are due, the longest first, and none to a host of `busy`."""

    async def wait(self, seconds: float) -> None:
        """Return after so long, or earlier if a call-back may have come."""

    async def all(self, limit: int) -> list[Callback]:
        """Return the given-up call-backs, then those that wait, by their time."""

    async def find(self, request_id: str) -> list[Callback]:
        """Return the call-backs of requests whose ids begin so."""

    async def waiting_of(self, user: str) -> int:
        """Return the number of a user's call-backs that wait."""

    async def counts(self) -> tuple[int, int]:
        """Return the number of call-backs that wait, and of those that were given up."""

    async def forget_dead(self, before: float) -> None:
        """Forget the call-backs that were given up before that Unix time."""


async def require_room(queue: CallbackQueue, user: str, limits: CallbackLimits) -> None:
    """Raise a `CallbackQueueError` if as many call-backs wait, of all users or of one, as may."""
    waiting, _ = await queue.counts()
    if waiting >= limits.waiting:
        raise CallbackQueueError(f"{waiting} call-backs wait already")
    if (own := await queue.waiting_of(user)) >= limits.of_user:
        raise CallbackQueueError(f"{own} call-backs of its user wait already")
