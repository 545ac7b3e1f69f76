"""What the server asks of the thing that carries requests and live updates."""

from __future__ import annotations

from typing import Protocol

from ndif.schema.request import Request
from ndif.schema.response import Response


class Subscription(Protocol):
    """One client's live channel, as the broker sees it."""

    @property
    def session(self) -> str:
        """The id that a client names in its request to be told here."""
        ...

    async def next(self) -> tuple[Request, Response]:
        """The next update of any request of this session, in order."""
        ...

    def close(self) -> None:
        """The client is gone: nothing more will be read."""
        ...


class Broker(Protocol):
    """Requests one way, updates the other, and what a hybrid job's client sends back."""

    async def submit(self, request: Request) -> None:
        """Accept a request: once this returns it is stored."""
        ...

    async def claim(self) -> Request:
        """The oldest request nobody has claimed."""
        ...

    async def release(self, request: Request) -> None:
        """Forget a claimed request: its terminal response is stored."""
        ...

    def subscribe(self, session: str | None = None) -> Subscription:
        """Open a live channel, under an id of its own unless the channel brings one."""
        ...

    async def publish(self, request: Request, response: Response) -> None:
        """Tell the session that waits for `request`. Nobody there: nothing happens."""
        ...

    def present(self, session: str) -> bool:
        """Whether a client listens at `session`."""
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
