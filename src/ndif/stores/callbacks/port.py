"""The interface of the durable queue of callbacks, which are webhooks and mails."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol

from ndif.schema.callback import Callback
from ndif.stores.broker.port import BrokerError


class CallbackLimits(NamedTuple):
    """Maximum numbers of callbacks in a queue."""

    waiting: int = 100_000
    """Callbacks that may wait; further ones are refused."""
    of_user: int = 1000
    """Callbacks of one user that may wait."""
    dead: int = 1000
    """Given-up callbacks that are kept; the oldest are deleted first."""


class CallbackQueueError(BrokerError):
    """The queue refuses a callback or cannot return it; the message is a clause."""


class CallbackQueue(Protocol):
    """The undelivered and the given-up callbacks of one server.

    The process that ends a job adds its callback; the leader delivers it. If `add` or `update` returns, the
    callback outlives every process of the server. All methods raise a `BrokerError` if they fail.
    """

    async def stop(self) -> None:
        """Release everything that belongs to this process alone."""

    async def add(self, callback: Callback) -> None:
        """Store a callback, replacing one with its id; raise a `CallbackQueueError` at a limit."""

    async def update(self, callback: Callback) -> None:
        """Store the changed state of a callback, which may be given up now."""

    async def remove(self, callback_id: str) -> None:
        """Delete a delivered callback."""

    async def due(self, now: float, limit: int, busy: Collection[str] = ()) -> list[Callback]:
        """Return callbacks due at `now`, the longest overdue first, without callbacks to `busy` hosts."""

    async def wait(self, seconds: float) -> None:
        """Return after `seconds`, or earlier if a callback may have been added."""

    async def all(self, limit: int) -> list[Callback]:
        """Return the given-up callbacks, then the waiting ones, both by time."""

    async def find(self, request_id: str) -> list[Callback]:
        """Return the callbacks of requests whose ids begin with `request_id`."""

    async def waiting_of(self, user: str) -> int:
        """Return the number of a user's waiting callbacks."""

    async def counts(self) -> tuple[int, int]:
        """Return the numbers of waiting and of given-up callbacks."""

    async def forget_dead(self, before: float) -> None:
        """Delete the callbacks that were given up before a Unix time."""


async def require_room(queue: CallbackQueue, user: str, limits: CallbackLimits) -> None:
    """Raise a `CallbackQueueError` if a limit of waiting callbacks, of all users or of one, is reached."""
    waiting, _ = await queue.counts()
    if waiting >= limits.waiting:
        raise CallbackQueueError(f"{waiting} webhooks and mails wait already")
    if (own := await queue.waiting_of(user)) >= limits.of_user:
        raise CallbackQueueError(f"{own} webhooks and mails of its user wait already")
