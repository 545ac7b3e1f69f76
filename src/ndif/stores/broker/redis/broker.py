"""The broker of many processes: a stream of Redis (6.2 or newer) or Valkey, and its channels.

`queue` is a stream with one group of consumers. Whoever leads claims: what it has claimed and not
released is what the stream calls pending, and goes to whoever leads after it. The lead is the lease of
all claims at once (see `ndif.stores.coordination.lead`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from redis.exceptions import ResponseError

from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.stores.broker.encoding import (
    decode_request,
    encode_end,
    encode_request,
    encode_update,
)
from ndif.stores.broker.port import BrokerError, LineFullError, full
from ndif.stores.broker.redis_channels import (
    Channels,
    RedisSubscription,
    channel_of,
    mailbox_of,
)
from ndif.stores.broker.redis_scripts import GROUP, QUEUE, Scripts, record_of, uploads_of
from ndif.stores.objects import ObjectStore, ObjectStoreError
from ndif.stores.redis.client import check, connect, persist, speaking
from ndif.tasks import end

logger = logging.getLogger(__name__)

_BATCH = 64
_BLOCK_MS = 2000
_GATHER_S = 0.005
"""Between one look for requests and the next: where many come, they come together."""
_LOOK_S = 1.0
"""How often those who run jobs look whether their clients are there."""
_ABSENT_AT_ONCE = 1000
_FORWARD_S = 5.0
"""How long an update may take: more is on its way soon."""
_PERSIST_S = 600.0
"""How long what must not be lost is tried again."""


class RedisBroker:
    """The production form of `Broker`."""

    outlives = True

    def __init__(
        self, url: str, objects: ObjectStore, *, inline_bytes: int, max_bytes: int | None = None
    ) -> None:
        """`inline_bytes`: a larger payload is kept with the objects.

        `max_bytes`: of the payloads of requests that are not done; one by itself may have more.
        """
        self.client = connect(url)
        self._objects = objects
        self._inline_bytes = inline_bytes
        self._max_bytes = sys.maxsize if max_bytes is None else max_bytes
        self.channels = Channels(self.client)
        self.scripts = Scripts(self.client)
        self._consumer = uuid.uuid4().hex
        self._claimed: asyncio.Queue[Request] = asyncio.Queue(_BATCH)
        self._claiming: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._watched: dict[str, asyncio.Event] = {}
        self._releases: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """See `Broker.start`."""
        await check(self.client)
        async with speaking():
            await self._have_group()

    async def stop(self) -> None:
        """See `Broker.stop`."""
        if self._releases:
            await asyncio.wait(self._releases, timeout=_FORWARD_S)
        tasks = [*self._releases, *filter(None, (self._claiming, self._looking))]
        await end(tasks)
        await self.channels.stop()
        await self.client.aclose()

    # Requests

    async def submit(self, request: Request) -> None:
        """See `Broker.submit`."""
        size, payload = len(request.payload), None
        if size > self._inline_bytes:
            async with speaking():
                held = await self.scripts.held()
            if held and held + size > self._max_bytes:
                raise LineFullError(full(held, self._max_bytes))
            await self._objects.put(_object_of(request.id), bytes(request.payload))
        else:
            payload = bytes(request.payload)
        entry, session = encode_request(request), request.session or ""
        async with speaking():
            too_much = await self.scripts.submit(
                request.id, entry, session, size, self._max_bytes, payload
            )
        if too_much is not None:
            if payload is None:
                await self._objects.delete(_object_of(request.id))
            raise LineFullError(full(too_much, self._max_bytes))

    async def claim(self) -> Request:
        """See `Broker.claim`."""
        if self._claiming is None:
            self._claiming = asyncio.create_task(self._claim_forever(), name="claims")
        return await self._claimed.get()

    async def payload(self, request: Request) -> bytes | bytearray:
        """See `Broker.payload`."""
        if request.payload:  # it came with the request
            return request.payload
        kept = await persist(
            lambda: self.client.hmget(record_of(request.id), "payload", "session"), _FORWARD_S
        )
        if kept[0] is not None:
            return bytes(kept[0])  # type: ignore[arg-type]
        content = None
        if kept[1] is not None:
            content = await self._objects.get(_object_of(request.id))
        if content is None:
            raise BrokerError("what was sent with this request is there no longer; send it again")
        return content

    async def release(self, request: Request) -> None:
        """See `Broker.release`. It goes on in the background if the broker is away."""
        releasing = self._let_go(request, lambda: self.scripts.release(request))
        await asyncio.wait([self._apart(releasing)], timeout=_FORWARD_S)

    async def conclude(self, request: Request, response: Response) -> None:
        """See `Broker.conclude`. It goes on in the background if the broker is away."""
        end_ = encode_end(response)
        concluding = self._let_go(request, lambda: self.scripts.conclude(request, end_))
        await asyncio.wait([self._apart(concluding)], timeout=_FORWARD_S)

    def _apart(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name="release")
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)
        return task

    async def _let_go(self, request: Request, letting_go: Callable[[], Awaitable[bool]]) -> None:
        try:
            if await persist(letting_go, _PERSIST_S):
                await self._delete_payload(request)
        except BrokerError as error:
            logger.error("request %s could not be released: %s", request.id, error)  # noqa: TRY400

    async def _delete_payload(self, request: Request) -> None:
        try:
            await self._objects.delete(_object_of(request.id))
        except ObjectStoreError as error:
            logger.warning("request %s: its payload goes in its time: %s", request.id, error)

    async def _claim_forever(self) -> None:
        """Take over what others had claimed, then claim what comes."""
        inherited = False
        while True:
            try:
                if not inherited:
                    await self._inherit()
                    inherited = True
                for request in await self._arrivals():
                    await self._claimed.put(request)
                await asyncio.sleep(_GATHER_S)
            except BrokerError as error:
                logger.warning("no requests can be claimed: %s", error)
                await asyncio.sleep(_LOOK_S)
            except Exception:
                logger.exception("no requests can be claimed")
                await asyncio.sleep(_LOOK_S)

    async def _inherit(self) -> None:
        """Have everything that was claimed by whoever led before."""
        async with speaking():
            await self._have_group()
        start: str | bytes = "0-0"
        while True:
            async with speaking():
                start, entries, *_ = await self.client.xautoclaim(
                    QUEUE, GROUP, self._consumer, min_idle_time=0, start_id=start, count=_BATCH
                )
            for request in self._read(entries):
                await self._claimed.put(request)
            if start in ("0-0", b"0-0"):
                break
        async with speaking():
            for consumer in await self.client.xinfo_consumers(QUEUE, GROUP):
                if consumer["name"].decode() != self._consumer and not consumer["pending"]:
                    await self.client.xgroup_delconsumer(QUEUE, GROUP, consumer["name"])

    async def _arrivals(self) -> list[Request]:
        """What came, as soon as something has."""
        async with speaking():
            try:
                streams = await self.client.xreadgroup(
                    GROUP, self._consumer, {QUEUE: ">"}, count=_BATCH, block=_BLOCK_MS
                )
            except ResponseError as error:
                if not str(error).startswith("NOGROUP"):
                    raise
                # A Redis that was started without what it had.
                await self._have_group()
                return []
        found = streams.items() if isinstance(streams, dict) else streams
        requests: list[Request] = []
        for _, batches in found:
            # RESP3 nests once more than RESP2.
            entries = batches[0] if batches and isinstance(batches[0], list) else batches
            requests += self._read(entries)
        return requests

    def _read(self, entries: Iterable[Any]) -> Iterable[Request]:
        for entry_id, fields in entries:
            if fields is None:  # deleted while it was pending
                continue
            try:
                yield decode_request(fields[b"request"], receipt=entry_id.decode())
            except (ValueError, KeyError, TypeError):
                logger.exception("entry %s of the queue is no request of ours", entry_id)

    async def _have_group(self) -> None:
        try:
            await self.client.xgroup_create(QUEUE, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    # Live channels

    async def subscribe(self, session: str | None = None) -> RedisSubscription:
        """See `Broker.subscribe`."""
        return await self.channels.subscribe(session)

    async def publish(self, request: Request, response: Response) -> bool:
        """See `Broker.publish`."""
        if request.session is None:
            return False
        update, session = encode_update(request, response), request.session
        if not response.status.terminal:
            return bool(
                await persist(lambda: self.client.publish(channel_of(session), update), _FORWARD_S)
            )
        end_ = encode_end(response)
        heard, elsewhere = await persist(
            lambda: self.scripts.publish_last(
                request, end_, channel_of(session), mailbox_of(session), update
            ),
            _PERSIST_S,
        )
        if elsewhere:
            self._apart(self._delete_payload(request))
        return bool(heard)

    async def has_ended(self, request: Request) -> bool:
        """See `Broker.has_ended`."""
        return await persist(lambda: self.scripts.has_ended(request.id), _FORWARD_S)

    async def absent(self, sessions: Iterable[str]) -> set[str]:
        """See `Broker.absent`. Of a broker that is away nothing is known: nobody counts as gone."""
        names = [session for session in sessions if not self.channels.has(session)]
        absent: set[str] = set()
        for start in range(0, len(names), _ABSENT_AT_ONCE):
            part = names[start : start + _ABSENT_AT_ONCE]
            with contextlib.suppress(BrokerError):
                async with speaking():
                    counts = await self.client.pubsub_numsub(*map(channel_of, part))
                    absent |= {n for n, (_, count) in zip(part, counts, strict=True) if not count}
        return absent

    async def departed(self, session: str) -> None:
        """See `Broker.departed`."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_forever(), name="departures")
        await self._watched.setdefault(session, asyncio.Event()).wait()

    async def _look_forever(self) -> None:
        """Look after all clients of running jobs at once. Who was away twice has left.

        A gateway that lost its connection has it again by the second look.
        """
        missing: set[str] = set()
        while True:
            await asyncio.sleep(_LOOK_S)
            absent = await self.absent(list(self._watched))
            for session in absent & missing:
                self._watched.pop(session).set()
            missing = absent

    # Uploads

    async def upload(self, request_id: str, session: str, content: bytes) -> None:
        """See `Broker.upload`."""
        if not session:
            return
        with contextlib.suppress(BrokerError):
            async with speaking():
                await self.scripts.upload(request_id, session, content)

    async def uploaded(self, request: Request) -> bytes:
        """See `Broker.uploaded`."""
        while True:
            with contextlib.suppress(BrokerError):
                async with speaking():
                    found = await self.client.blpop([uploads_of(request.id)], timeout=_LOOK_S)
                    if found is not None:
                        return bytes(found[1])  # type: ignore[arg-type]


def _object_of(request_id: str) -> str:
    return f"requests/{request_id}"
