"""The interface through which a server's parts exchange requests, updates and uploads."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from ndif.schema.payload import Payload, PayloadFile
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.sizes import format_size

LOST = (
    "The server has lost this job: the data of its broker (Redis) were deleted, or not written in time. "
    "Send it again."
)
"""Told to the client of a request that the broker has no more, and that has had no terminal response."""


_LEAST_BYTES = 4096
"""Bytes that any request counts for, however small its payload; an env of this size is within them."""
_MAX_QUOTED = 200
"""Characters of a client's text that an error repeats."""
_OBJECT_BYTES = 24
"""Bytes of memory per byte of JSON, at most: an empty list is two characters."""


def held_bytes(request: Request) -> int:
    """Return the bytes that an unfinished request counts for: its payload, and what else it brought."""
    env = _OBJECT_BYTES * len(json.dumps(dict(request.env))) if request.env else 0
    return max(len(request.payload) + max(env - _LEAST_BYTES, 0), _LEAST_BYTES)


class BrokerError(Exception):
    """The broker cannot be used now; the message is a clause that says why."""


class BrokerAwayError(BrokerError):
    """The broker does not answer: nothing is lost, and whatever needs it can go on once it is back."""


class QueueFullError(BrokerError):
    """Unfinished requests have as many bytes as the server holds."""

    def __init__(self, held: int, limit: int) -> None:
        super().__init__(
            f"the requests that wait and run have {format_size(held)}, and with this one they would have "
            f"more than the {format_size(limit)} that it holds (NDIF_MAX_QUEUED_BYTES)"
        )


class TooManyJobsError(Exception):
    """A key or a model has as many unfinished jobs as it may; the message is for the user."""

    @classmethod
    def of_key(cls, most: int) -> TooManyJobsError:
        """Return the error of an API key."""
        return cls(
            f"Your API key may have {_jobs(most)} at once, and has as many. Wait until one has ended, or "
            "end one (`ndif jobs`)."
        )

    @classmethod
    def of_model(cls, repo_id: str, most: int) -> TooManyJobsError:
        """Return the error of a model."""
        return cls(
            f"There may be {_jobs(most)} of {repo_id[:_MAX_QUOTED]!r} at once, and there are as many, of "
            "all its users together. Try again later."
        )


def _jobs(number: int) -> str:
    return "one job that waits or runs" if number == 1 else f"{number} jobs that wait or run"


class ClientLeftError(Exception):
    """The request was not dispatched, because its client is no longer subscribed."""


class Subscription(Protocol):
    """One client's live channel."""

    id: str
    """The id that a client puts in its requests to receive their updates here."""

    @property
    def unfinished(self) -> Collection[str]:
        """Return the ids of this subscription's requests that have had no terminal update."""

    def bound(self, max_unread_bytes: int, disconnect: Callable[[], None]) -> None:
        """Call `disconnect` once the client lets more bytes of updates gather; they are dropped.

        Before that the lines and values that a job sends wait for their client, if the broker can do so.
        """

    async def next(self) -> str | bytes:
        """Return the next update of any request of this subscription, in order, as its client reads it."""

    async def close(self) -> None:
        """End the subscription, because its client has disconnected."""


class Broker(Protocol):
    """Carries requests to the queue, updates to subscriptions, and uploads of hybrid jobs to their blocks.

    A submitted request that is lost has a terminal update, too, if its client is subscribed: an ERROR. A
    submitted request stays stored until it is released or has its terminal response. The gateway submits
    and subscribes; the queue claims; whoever runs a request publishes. The broker never reads a payload.
    `start`, `submit`, `payload`, `subscribe`, `takes`, `publish` and `is_complete` raise `BrokerError` if
    they fail.
    """

    async def start(self) -> None:
        """Prepare for the methods below."""

    async def stop(self) -> None:
        """Release everything that belongs to this process alone."""

    async def ping(self) -> None:
        """Raise a `BrokerError` if the broker does not answer now."""

    def create_payload(self) -> PayloadFile:
        """Return an empty file for the payload of a request, on the disk where `submit` keeps it."""

    async def submit(
        self,
        request: Request,
        *,
        most_of_key: int | None = None,
        most_of_model: int | None = None,
    ) -> None:
        """Store a request for the queue.

        Raise a `TooManyJobsError` if as many requests of its API key, or of its model, are unfinished.
        """

    def outlives(self, request: Request) -> bool:
        """Return True if a request that has not ended outlives this process, and the next claims it."""

    async def claim(self) -> Request:
        """Claim the oldest unclaimed request for this process, possibly without its payload."""

    async def payload(self, request: Request) -> Payload:
        """Return the payload of a request that has not been released.

        A broker that does not answer is a `BrokerAwayError`, a payload that it has lost a `BrokerError`.
        """

    def note_attempts(self, request: Request, attempts: int) -> None:
        """Say how many runs of a claimed request have been cut short if this process ends now.

        The next process finds the number in `Request.attempts`.
        """

    async def release(self, request: Request) -> None:
        """Delete a claimed request that gets no further response."""

    async def subscribe(self, subscription_id: str | None = None) -> Subscription:
        """Open a subscription, under a new id unless one is given."""

    async def publish(self, request: Request, response: Response) -> bool:
        """Send an update to the subscription of `request`, and return True if its client receives it.

        A terminal response also completes a claimed request, in the same step.
        """

    async def complete(self, request: Request, response: Response) -> None:
        """Delete a claimed request whose terminal `response` is stored, so that it does not run again."""

    async def is_complete(self, request: Request) -> bool:
        """Return True if a request that this process claimed has had its terminal response."""

    async def disconnected(self, subscription_ids: Iterable[str]) -> set[str]:
        """Return those of the subscriptions that no client holds open."""

    async def takes(self, subscription_id: str, user: str) -> bool:
        """Return True if no other user was asked for before: a subscription takes requests of one alone."""

    async def until_disconnected(self, subscription_id: str) -> None:
        """Return once no client holds the subscription open."""

    async def upload(self, request_id: str, subscription_id: str, content: bytes) -> None:
        """Hand a hybrid job an upload of its own client; drop one from any other subscription."""

    async def uploaded(self, request: Request) -> bytes:
        """Return the next upload of the client of `request`."""
