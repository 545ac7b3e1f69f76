"""What the server asks of the thing that carries requests and live updates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ndif.schema.request import Request
from ndif.schema.response import Response


class BrokerError(Exception):
    """The broker does not do its work now; the message says why, in a sentence."""


class LineFullError(BrokerError):
    """What waits is as much as the server holds: nothing more is accepted until some of it is done."""


class ClientLeftError(Exception):
    """Nobody listens any more at the session of a request, which was not run."""


def full(held: int, limit: int) -> str:
    """What `LineFullError` says."""
    return (
        f"the requests that wait and run have {held:,} bytes, and with this one they would have more "
        f"than the {limit:,} that it holds (NDIF_MAX_QUEUED_BYTES)"
    )


class Subscription(Protocol):
    """One client's live channel, as the broker sees it."""

    @property
    def session(self) -> str:
        """The id that a client names in its request to be told here."""
        ...

    async def next(self) -> str | bytes:
        """The next update of any request of this session, in order, as its client reads it."""
        ...

    async def close(self) -> None:
        """The client is gone: nothing more will be read."""
        ...


class Broker(Protocol):
    """Requests one way, updates the other, and what a hybrid job's client sends back."""

    outlives: bool
    """Whether requests are there for the next to claim when this process ends."""

    async def start(self) -> None:
        """Be ready for everything below.

        Raises:
            BrokerError: if it cannot be.
        """
        ...

    async def stop(self) -> None:
        """Let go of everything that is only this process's."""
        ...

    async def submit(self, request: Request) -> None:
        """Accept a request: once this returns it is stored.

        Raises:
            BrokerError: if it is not.
        """
        ...

    async def claim(self) -> Request:
        """The oldest request nobody has claimed, for this process to bring to its end.

        It may come without its payload.
        """
        ...

    async def payload(self, request: Request) -> bytes | bytearray:
        """What the user of a request that has not been released sent.

        Raises:
            BrokerError: if it cannot be had.
        """
        ...

    async def release(self, request: Request) -> None:
        """Forget a claimed request that is to have no response, or no further one."""
        ...

    async def subscribe(self, session: str | None = None) -> Subscription:
        """Open a live channel, under an id of its own unless the channel brings one.

        Raises:
            BrokerError: if nothing would come through it.
        """
        ...

    async def publish(self, request: Request, response: Response) -> bool:
        """Tell the session that waits for `request`; whether anybody is there to hear it.

        A terminal response concludes a claimed request, in one step with being told.

        Raises:
            BrokerError: if it cannot be told.
        """
        ...

    async def conclude(self, request: Request, response: Response) -> None:
        """Forget a claimed request whose terminal `response` is stored: it is not run again."""
        ...

    async def has_ended(self, request: Request) -> bool:
        """Whether a request that this process claimed has had its terminal response.

        Raises:
            BrokerError: if that cannot be known.
        """
        ...

    async def absent(self, sessions: Iterable[str]) -> set[str]:
        """Those of the sessions at which no client listens."""
        ...

    async def departed(self, session: str) -> None:
        """Return once no client listens at `session`."""
        ...

    async def upload(self, request_id: str, session: str, content: bytes) -> None:
        """Hand a hybrid job what its own client computed; from any other session, drop it."""
        ...

    async def uploaded(self, request: Request) -> bytes:
        """The next thing that the client of `request` sends."""
        ...
