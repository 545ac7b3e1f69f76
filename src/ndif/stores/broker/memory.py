"""The broker of one process: queues and events of its own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import defaultdict
from collections.abc import Iterable

from ndif.schema import wires
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.stores.broker.port import LineFullError, full

_UNREAD = 1
"""How many answers of a hybrid job's client wait for its block."""


class MemorySubscription:
    """A live channel of this process."""

    def __init__(self, broker: MemoryBroker, session: str) -> None:
        self._broker = broker
        self._session = session
        self._frames: asyncio.Queue[str | bytes] = asyncio.Queue()
        self.closed = asyncio.Event()

    @property
    def session(self) -> str:
        """See `Subscription.session`."""
        return self._session

    def put(self, frame: str | bytes) -> None:
        """Deliver one update."""
        self._frames.put_nowait(frame)

    async def next(self) -> str | bytes:
        """See `Subscription.next`."""
        return await self._frames.get()

    async def close(self) -> None:
        """See `Subscription.close`."""
        self.closed.set()
        self._broker.forget(self)


class MemoryBroker:
    """The embedded form of `Broker`."""

    outlives = False

    def __init__(self, max_bytes: int | None = None) -> None:
        """`max_bytes`: of the payloads of requests that are not done; one by itself may have more."""
        self._max_bytes = max_bytes
        self._bytes = 0
        self._line: asyncio.Queue[Request] = asyncio.Queue()
        self._open: dict[str, Request] = {}
        self._subscriptions: dict[str, MemorySubscription] = {}
        # A block asks for one answer at a time: of more than that nobody would ever read any.
        self._uploads: defaultdict[str, asyncio.Queue[bytes]] = defaultdict(
            lambda: asyncio.Queue(_UNREAD)
        )

    async def start(self) -> None:
        """See `Broker.start`."""

    async def stop(self) -> None:
        """See `Broker.stop`."""

    async def submit(self, request: Request) -> None:
        """See `Broker.submit`."""
        after = self._bytes + len(request.payload)
        if self._bytes and self._max_bytes is not None and after > self._max_bytes:
            raise LineFullError(full(self._bytes, self._max_bytes))
        self._bytes = after
        self._open[request.id] = request
        self._line.put_nowait(request)

    async def claim(self) -> Request:
        """See `Broker.claim`."""
        return await self._line.get()

    async def payload(self, request: Request) -> bytes | bytearray:
        """See `Broker.payload`."""
        return request.payload

    async def release(self, request: Request) -> None:
        """See `Broker.release`."""
        if (released := self._open.pop(request.id, None)) is not None:
            self._bytes -= len(released.payload)
        self._uploads.pop(request.id, None)

    async def subscribe(self, session: str | None = None) -> MemorySubscription:
        """See `Broker.subscribe`."""
        subscription = MemorySubscription(self, session or uuid.uuid4().hex)
        self._subscriptions[subscription.session] = subscription
        return subscription

    def forget(self, subscription: MemorySubscription) -> None:
        """Drop a closed channel."""
        if self._subscriptions.get(subscription.session) is subscription:
            del self._subscriptions[subscription.session]

    async def publish(self, request: Request, response: Response) -> bool:
        """See `Broker.publish`."""
        subscription = self._subscriptions.get(request.session or "")
        if subscription is not None:
            subscription.put(wires.frame(request, response))
        if response.status.terminal:
            await self.conclude(request, response)
        return subscription is not None

    async def conclude(self, request: Request, response: Response) -> None:
        """See `Broker.conclude`."""
        await self.release(request)

    async def has_ended(self, request: Request) -> bool:
        """See `Broker.has_ended`."""
        return request.id not in self._open

    async def absent(self, sessions: Iterable[str]) -> set[str]:
        """See `Broker.absent`."""
        return {session for session in sessions if session not in self._subscriptions}

    async def departed(self, session: str) -> None:
        """See `Broker.departed`."""
        if subscription := self._subscriptions.get(session):
            await subscription.closed.wait()

    async def upload(self, request_id: str, session: str, content: bytes) -> None:
        """See `Broker.upload`."""
        request = self._open.get(request_id)
        if request is not None and request.session == session:
            with contextlib.suppress(asyncio.QueueFull):
                self._uploads[request_id].put_nowait(content)

    async def uploaded(self, request: Request) -> bytes:
        """See `Broker.uploaded`."""
        return await self._uploads[request.id].get()
