"""The broker of a server in one process: queues and events of its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir

from ndif.schema import wires
from ndif.schema.model_key import ModelKey
from ndif.schema.payload import Payload, PayloadFile
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.stores.broker.outbound_buffer import OutboundBuffer
from ndif.stores.broker.port import QueueFullError, TooManyJobsError, held_bytes
from ndif.stores.broker.spool import Spool, SpooledRequest

_MAX_UNREAD = 1
"""Maximum uploads that wait for a hybrid job's block, which asks for one at a time."""


class MemorySubscription:
    """The embedded form of `Subscription`."""

    def __init__(self, broker: MemoryBroker, subscription_id: str) -> None:
        self.id = subscription_id
        self.frames: OutboundBuffer[str | bytes] = OutboundBuffer()
        self.closed = asyncio.Event()
        self.unfinished: set[str] = set()
        self.user: str | None = None
        self._broker = broker

    def bound(self, max_unread_bytes: int, disconnect: Callable[[], None]) -> None:
        self.frames.bound(max_unread_bytes, disconnect)

    async def next(self) -> str | bytes:
        return await self.frames.get()

    async def close(self) -> None:
        self.closed.set()
        self.frames.close()
        self._broker.forget(self)


class MemoryBroker:
    """The embedded form of `Broker`."""

    def __init__(self, max_bytes: int | None = None, spool: Spool | None = None) -> None:
        """Create a broker for unfinished requests of at most `max_bytes`; a single one may be larger.

        With a `spool`, polled requests outlive this process.
        """
        self._max_bytes = max_bytes
        self._spool = spool
        self._bytes = 0
        self._queue: asyncio.Queue[Request] = asyncio.Queue()
        self._unfinished: dict[str, SpooledRequest] = {}
        self._numbers: Counter[str | ModelKey] = Counter()
        """Number of unfinished requests by API key and by model."""
        self._subscriptions: dict[str, MemorySubscription] = {}
        self._uploads: defaultdict[str, asyncio.Queue[bytes]] = defaultdict(
            lambda: asyncio.Queue(_MAX_UNREAD)
        )

    @property
    def unfinished(self) -> list[Request]:
        """Return the requests that have not ended, the oldest first."""
        return [entry.request for entry in self._unfinished.values()]

    async def start(self) -> None:
        """See `Broker.start`. Requests of the spool can be claimed from now on."""
        for entry in await self._spool.unfinished() if self._spool is not None else ():
            self._bytes += entry.size
            self._count(entry.request, 1)
            self._unfinished[entry.request.id] = entry
            self._queue.put_nowait(entry.request)

    async def stop(self) -> None:
        if self._spool is not None:
            await self._spool.close()

    async def ping(self) -> None:
        """See `Broker.ping`."""

    def create_payload(self) -> PayloadFile:
        return PayloadFile.create(Path(gettempdir()) if self._spool is None else self._spool.folder)

    async def submit(
        self,
        request: Request,
        *,
        most_of_key: int | None = None,
        most_of_model: int | None = None,
    ) -> None:
        if most_of_key is not None and self._numbers[request.key] >= most_of_key:
            raise TooManyJobsError.of_key(most_of_key)
        if most_of_model is not None and self._numbers[request.model] >= most_of_model:
            raise TooManyJobsError.of_model(request.model.repo_id, most_of_model)
        size = held_bytes(request)
        if self._bytes and self._max_bytes is not None and self._bytes + size > self._max_bytes:
            raise QueueFullError(self._bytes, self._max_bytes)
        self._bytes += size
        self._count(request, 1)
        if (spool := self._spool_of(request)) is not None:
            try:
                await spool.add(request)
            except BaseException:
                self._bytes -= size
                self._count(request, -1)
                raise
            request = replace(request, payload=b"")
        self._unfinished[request.id] = SpooledRequest(request, size)
        if (subscription := self._subscriptions.get(request.subscription_id or "")) is not None:
            subscription.unfinished.add(request.id)
        self._queue.put_nowait(request)

    def outlives(self, request: Request) -> bool:
        return self._spool_of(request) is not None

    async def claim(self) -> Request:
        return await self._queue.get()

    async def payload(self, request: Request) -> Payload:
        spool = self._spool_of(request)
        return request.payload if spool is None else await spool.payload(request.id)

    def note_attempts(self, request: Request, attempts: int) -> None:
        if (spool := self._spool_of(request)) is not None:
            spool.note_attempts(request.id, attempts)

    async def release(self, request: Request) -> None:
        if (released := self._unfinished.pop(request.id, None)) is not None:
            self._bytes -= released.size
            self._count(request, -1)
            if isinstance(released.request.payload, PayloadFile):
                released.request.payload.discard()
            if (spool := self._spool_of(request)) is not None:
                spool.remove(request.id)
        self._uploads.pop(request.id, None)

    async def subscribe(self, subscription_id: str | None = None) -> MemorySubscription:
        subscription = MemorySubscription(self, subscription_id or uuid.uuid4().hex)
        self._subscriptions[subscription.id] = subscription
        return subscription

    def forget(self, subscription: MemorySubscription) -> None:
        """Remove a closed subscription, unless a newer one has its id."""
        if self._subscriptions.get(subscription.id) is subscription:
            del self._subscriptions[subscription.id]

    async def publish(self, request: Request, response: Response) -> bool:
        subscription = self._subscriptions.get(request.subscription_id or "")
        if subscription is not None:
            frame = wires.frame(request, response)
            if response.status in (Status.LOG, Status.STREAM):
                await subscription.frames.until_takes(len(frame))
            subscription.frames.put_nowait(frame)
            if response.status.terminal:
                subscription.unfinished.discard(request.id)
        if response.status.terminal:
            await self.complete(request, response)
        return subscription is not None

    async def complete(self, request: Request, response: Response) -> None:
        await self.release(request)

    async def is_complete(self, request: Request) -> bool:
        return request.id not in self._unfinished

    async def disconnected(self, subscription_ids: Iterable[str]) -> set[str]:
        return {
            subscription_id
            for subscription_id in subscription_ids
            if subscription_id not in self._subscriptions
        }

    async def takes(self, subscription_id: str, user: str) -> bool:
        subscription = self._subscriptions.get(subscription_id)
        if subscription is not None and subscription.user is None:
            subscription.user = user
        return subscription is not None and subscription.user == user

    async def until_disconnected(self, subscription_id: str) -> None:
        if subscription := self._subscriptions.get(subscription_id):
            await subscription.closed.wait()

    async def upload(self, request_id: str, subscription_id: str, content: bytes) -> None:
        entry = self._unfinished.get(request_id)
        if entry is not None and entry.request.subscription_id == subscription_id:
            with contextlib.suppress(asyncio.QueueFull):
                self._uploads[request_id].put_nowait(content)

    async def uploaded(self, request: Request) -> bytes:
        return await self._uploads[request.id].get()

    def _count(self, request: Request, change: int) -> None:
        for counted in (request.key, request.model):
            self._numbers[counted] += change
            if not self._numbers[counted]:
                del self._numbers[counted]

    def _spool_of(self, request: Request) -> Spool | None:
        """Return the spool for a polled request; a live request ends with its client's connection."""
        return self._spool if request.subscription_id is None else None
