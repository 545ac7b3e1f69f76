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
"""Reported to the client if the broker has lost its request before the terminal response."""


_LEAST_BYTES = 4096
"""Minimum bytes that a request counts for; an env of this size is included."""
_MAX_QUOTED = 200
"""Maximum characters of a client's text that an error quotes."""
_OBJECT_BYTES = 24
"""Bytes of memory per byte of JSON, at most: an empty list is two characters."""


def held_bytes(request: Request) -> int:
    """Return the bytes that an unfinished request counts for: its payload and a large env."""
    env = _OBJECT_BYTES * len(json.dumps(dict(request.env))) if request.env else 0
    return max(len(request.payload) + max(env - _LEAST_BYTES, 0), _LEAST_BYTES)


class BrokerError(Exception):
    """The broker cannot be used now; the message is a clause that says why."""


class BrokerUnavailableError(BrokerError):
    """The broker does not answer; nothing is lost, and callers can go on once it is back."""


class QueueFullError(BrokerError):
    """With one more request, unfinished requests would exceed the bytes that the server holds."""

    def __init__(self, held: int, limit: int) -> None:
        super().__init__(
            f"the requests that wait and run have {format_size(held)}, and with this one they would have "
            f"more than the {format_size(limit)} that it holds (NDIF_MAX_QUEUED_BYTES)"
        )


class TooManyJobsError(Exception):
    """A key or a model has its maximum of unfinished jobs; the message is for the user."""

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
        """Drop the updates and call `disconnect` once more than `max_unread_bytes` are unread.

        Before that, a job's lines and values wait until the client has read others, if the broker can wait.
        """

    async def next(self) -> str | bytes:
        """Return the next update of this subscription's requests, in order, as a frame for the client."""

    async def close(self) -> None:
        """End the subscription, because its client has disconnected."""


class Broker(Protocol):
    """Carries requests to the queue, updates to subscriptions, and uploads of hybrid jobs to their blocks.

    A submitted request stays stored until it is released or has its terminal response. If the request is
    lost, a subscribed client receives an ERROR. The gateway submits and subscribes; the queue claims; the
    process that runs a request publishes. The broker never reads a payload. `start`, `submit`, `payload`,
    `subscribe`, `takes`, `publish` and `is_complete` raise `BrokerError` if they fail.
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

        Raise a `TooManyJobsError` if its API key has `most_of_key` or its model `most_of_model` unfinished
        requests, or a `QueueFullError` if all unfinished ones would take too many bytes.
        """

    def outlives(self, request: Request) -> bool:
        """Return True if an unfinished request outlives this process, so that the next claims it."""

    async def claim(self) -> Request:
        """Claim the oldest unclaimed request for this process, possibly without its payload."""

    async def payload(self, request: Request) -> Payload:
        """Return the payload of a request that has not been released.

        Raise a `BrokerUnavailableError` if the broker does not answer, or a `BrokerError` if the payload is
        lost.
        """

    def note_attempts(self, request: Request, attempts: int) -> None:
        """Store how many runs of a claimed request are cut short if this process ends now.

        The next process finds the number in `Request.attempts`.
        """

    async def release(self, request: Request) -> None:
        """Delete a claimed request that receives no further response."""

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
        """Return the subscriptions that no client holds open."""

    async def takes(self, subscription_id: str, user: str) -> bool:
        """Bind a subscription to its first user; return True if that is `user`."""

    async def until_disconnected(self, subscription_id: str) -> None:
        """Return once no client holds the subscription open."""

    async def upload(self, request_id: str, subscription_id: str, content: bytes) -> None:
        """Pass an upload to a hybrid job; drop it if it is not from the job's own subscription."""

    async def uploaded(self, request: Request) -> bytes:
        """Return the next upload of the client of `request`."""
