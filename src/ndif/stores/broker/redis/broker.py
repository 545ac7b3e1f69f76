"""The broker of many processes: a stream and channels of Redis or Valkey.

The stream `queue` has one consumer group. Only the leader claims: a request that it claimed and did not
release is pending in the stream, and the next leader takes it over. The leader's lock is the lease of all
claims at once (see `ndif.stores.leader`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from redis.commands.core import AsyncScript
from redis.exceptions import ResponseError

from ndif.config.settings import OLDEST_REDIS
from ndif.schema.payload import Payload, PayloadFile
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.stores.broker.encoding import (
    decode_request,
    encode_request,
    encode_submission,
    encode_update,
)
from ndif.stores.broker.port import LOST, BrokerError, QueueFullError, held_bytes
from ndif.stores.broker.redis import scripts
from ndif.stores.broker.redis.channels import (
    Channels,
    RedisSubscription,
    channel_of,
    unconfirmed_of,
    user_of,
)
from ndif.stores.broker.redis.scripts import GROUP, HELD, QUEUE, end_arguments, keys_of, record_of
from ndif.stores.objects import ObjectStore, ObjectStoreError
from ndif.stores.redis import connect, connect_for_pubsub, is_too_old, retry
from ndif.tasks import end, start

logger = logging.getLogger(__name__)

_BATCH = 64
_BLOCK_MS = 2000
_INHERIT_S = 5.0
"""Seconds between two looks for claims of leaders that are gone."""
_GONE_MS = 600_000
"""Milliseconds after which the consumer of a silent leader is deleted."""
_GATHER_S = 0.005
"""Seconds between two reads of the stream, so that under load each read returns several requests."""
_LOOK_S = 1.0
_PRESENCE_S = 0.4
"""Seconds between two checks that the clients of unfinished requests are present."""
_CHANNEL_S = 86_400
"""Seconds for which the user of a subscription is known."""
_UPDATE_S = 5.0
"""Seconds for which an update is retried; the next one replaces it."""


class RedisBroker:
    """The production form of `Broker`.

    Owns the process's connections to Redis. Payloads above `inline_bytes` are in the object store.
    """

    def __init__(
        self,
        url: str,
        objects: ObjectStore,
        *,
        inline_bytes: int,
        max_bytes: int | None = None,
        counts_attempts: bool = False,
    ) -> None:
        """Create a broker that connects to `url` when it is first used.

        The payloads of all unfinished requests have at most `max_bytes`; one alone may be larger.
        `counts_attempts`: True if what runs ends with the process that leads.
        """
        self.client = connect(url)
        self._objects = objects
        self._inline_bytes = inline_bytes
        self._max_bytes = sys.maxsize if max_bytes is None else max_bytes
        self._counts_attempts = counts_attempts
        self.channels = Channels(connect_for_pubsub(url), self.client)
        register = self.client.register_script
        self._submit = register(scripts.SUBMIT)
        self._release = register(f"{scripts.RELEASE} return elsewhere")
        self._complete = register(f"{scripts.COMPLETE} return elsewhere")
        self._publish_last = register(scripts.PUBLISH_LAST)
        self._upload = register(scripts.UPLOAD)
        self._note_attempts = register(scripts.NOTE_ATTEMPTS)
        self._noting = asyncio.Lock()
        self.hand_over = register(scripts.HAND_OVER)
        """The script that sends a job to a replica."""
        self._consumer = uuid.uuid4().hex
        self._claimed: asyncio.Queue[Request] = asyncio.Queue(_BATCH)
        self._claiming: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._finding: asyncio.Task[None] | None = None
        self._departures: dict[str, asyncio.Event] = {}
        self._releases: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """See `Broker.start`."""
        version = str((await self.client.info("server"))["redis_version"])
        if is_too_old(version):
            raise BrokerError(f"its broker is Redis {version}; {OLDEST_REDIS} or newer is needed")
        await self._have_group()

    async def stop(self) -> None:
        """See `Broker.stop`."""
        if self._releases:
            await asyncio.wait(self._releases, timeout=_UPDATE_S)
        tasks = [*self._releases, *filter(None, (self._claiming, self._watching, self._finding))]
        await end(tasks)
        await self.channels.stop()
        await self.client.aclose()

    # Requests

    def create_payload(self) -> PayloadFile:
        """See `Broker.create_payload`."""
        return self._objects.create_payload()

    async def submit(self, request: Request) -> None:
        """See `Broker.submit`."""
        size, payload = held_bytes(request), request.payload
        is_inline = len(payload) <= self._inline_bytes
        if not is_inline:
            held = int(await self.client.get(HELD) or 0)
            if held and held + size > self._max_bytes:
                raise QueueFullError(held, self._max_bytes)
            await self._objects.put_payload(_object_of(request.id), payload)
        held_too_much = await self._submit(
            [record_of(request.id), QUEUE, HELD],
            [
                encode_request(request),
                request.subscription_id or "",
                size,
                self._max_bytes,
                *_announcement(request),
                *([await _in_memory(payload)] if is_inline else []),
            ],
        )
        if held_too_much is not None:
            if not is_inline:
                await self._objects.delete(_object_of(request.id))
            raise QueueFullError(held_too_much, self._max_bytes)
        if isinstance(payload, PayloadFile):
            payload.discard()

    def outlives(self, request: Request) -> bool:
        """See `Broker.outlives`."""
        return True

    async def claim(self) -> Request:
        """See `Broker.claim`."""
        if self._claiming is None:
            self._claiming = asyncio.create_task(self._claim_forever(), name="claims")
        return await self._claimed.get()

    async def knows(self, request_id: str) -> bool:
        """Return True if a request was submitted and not released."""
        return bool(await self.client.exists(record_of(request_id)))

    async def payload(self, request: Request) -> Payload:
        """See `Broker.payload`."""
        if request.payload:  # it came with the request
            return request.payload
        stored = await retry(
            lambda: self.client.hmget(record_of(request.id), "payload", "subscription"), _UPDATE_S
        )
        if stored[0] is not None:
            return bytes(stored[0])  # type: ignore[arg-type]
        content = None
        if stored[1] is not None:
            content = await self._objects.get(_object_of(request.id))
        if content is None:
            raise BrokerError("what was sent with this request is there no longer; send it again")
        return content

    def note_attempts(self, request: Request, attempts: int) -> None:
        """See `Broker.note_attempts`. Not stored where a replica that outlives its leader runs on."""
        if self._counts_attempts:
            start(self._note(request, attempts), self._releases, "attempts")

    async def _note(self, request: Request, attempts: int) -> None:
        async with self._noting:  # in the order of the calls
            keys = [record_of(request.id)]
            try:
                await retry(lambda: self._note_attempts(keys, [attempts]), _UPDATE_S)
            except BrokerError as error:
                logger.warning("request %s: that it runs is not noted: %s", request.id, error)

    async def release(self, request: Request) -> None:
        """See `Broker.release`. Continues in the background while Redis is away."""
        await self._drop(request, self._release, [GROUP, request.receipt])

    async def complete(self, request: Request, response: Response) -> None:
        """See `Broker.complete`. Continues in the background while Redis is away."""
        await self._drop(request, self._complete, end_arguments(request, response))

    async def _drop(self, request: Request, script: AsyncScript, arguments: list[Any]) -> None:
        async def drop() -> None:
            # However long that takes: what is not released runs again.
            if await retry(lambda: script(keys_of(request), arguments), math.inf):
                await self._delete_payload(request)

        await asyncio.wait([start(drop(), self._releases, "release")], timeout=_UPDATE_S)

    async def _delete_payload(self, request: Request) -> None:
        try:
            await self._objects.delete(_object_of(request.id))
        except ObjectStoreError as error:
            logger.warning("the payload of request %s expires instead: %s", request.id, error)

    async def _claim_forever(self) -> None:
        """Take over the requests that earlier leaders claimed, then claim new ones."""
        loop = asyncio.get_running_loop()
        inherited_at = -math.inf
        while True:
            try:
                if loop.time() - inherited_at >= _INHERIT_S:
                    if inherited_at == -math.inf or await self._others_hold_claims():
                        await self._inherit()
                    inherited_at = loop.time()
                for request in await self._arrivals():
                    await self._claimed.put(request)
                await asyncio.sleep(_GATHER_S)
            except Exception as error:
                is_defect = not isinstance(error, BrokerError)
                logger.warning("no requests can be claimed: %s", error, exc_info=is_defect)
                await asyncio.sleep(_LOOK_S)

    async def _inherit(self) -> None:
        """Claim all requests that earlier leaders claimed and did not release."""
        await self._have_group()
        start: str | bytes = "0-0"
        while True:
            start, entries, *_ = await self.client.xautoclaim(
                QUEUE, GROUP, self._consumer, min_idle_time=0, start_id=start, count=_BATCH
            )
            for request in self._read(entries):
                await self._claimed.put(await self._with_attempts(request))
            if start in ("0-0", b"0-0"):
                break
        for consumer in await self.client.xinfo_consumers(QUEUE, GROUP):
            # With a consumer go the claims that it has made since it was listed.
            gone = consumer["idle"] > _GONE_MS and not consumer["pending"]
            if gone and consumer["name"].decode() != self._consumer:
                await self.client.xgroup_delconsumer(QUEUE, GROUP, consumer["name"])

    async def _with_attempts(self, request: Request) -> Request:
        if not self._counts_attempts:
            return request
        noted = await self.client.hget(record_of(request.id), "attempts")
        return request if noted is None else replace(request, attempts=int(noted))

    async def _others_hold_claims(self) -> bool:
        """Return True if a leader before this one has claimed requests since they were taken over.

        A leader that was halted claims what waits before it learns that another leads.
        """
        await self._have_group()  # Redis may have been restarted without its data
        summary = await self.client.xpending(QUEUE, GROUP)
        names = [consumer["name"].decode() for consumer in summary["consumers"]]
        return any(name != self._consumer for name in names)

    async def _arrivals(self) -> list[Request]:
        """Claim and return new requests, as soon as there are any."""
        try:
            streams: Any = await self.client.xreadgroup(
                GROUP, self._consumer, {QUEUE: ">"}, count=_BATCH, block=_BLOCK_MS
            )
        except ResponseError:  # NOGROUP: Redis was restarted without its data
            await self._have_group()
            return []
        return [request for _, entries in streams for request in self._read(entries)]

    def _read(self, entries: Iterable[Any]) -> Iterable[Request]:
        for entry_id, fields in entries:
            if fields is None:  # deleted while it was pending
                continue
            try:
                yield decode_request(fields[b"request"], receipt=entry_id.decode())
            except (ValueError, KeyError, TypeError):
                logger.exception("entry %s of the queue is not a request", entry_id)

    async def _have_group(self) -> None:
        with contextlib.suppress(ResponseError):  # BUSYGROUP: it is there
            await self.client.xgroup_create(QUEUE, GROUP, id="0", mkstream=True)

    # Subscriptions

    async def subscribe(self, subscription_id: str | None = None) -> RedisSubscription:
        """See `Broker.subscribe`."""
        if self._finding is None:
            self._finding = asyncio.create_task(self._find_lost_forever(), name="lost requests")
        return await self.channels.open(
            RedisSubscription(self.channels, subscription_id or uuid.uuid4().hex)
        )

    async def _find_lost_forever(self) -> None:
        """End requests of open subscriptions that Redis has lost.

        A request is stored until the step that publishes its terminal update. So one that is not there at
        two looks, while this process listens, was lost: Redis was emptied, or restarted without it.
        """
        missing: set[str] = set()
        connection = None
        while True:
            await asyncio.sleep(_LOOK_S)
            if connection is None or connection is not self.channels.listening:
                connection, missing = self.channels.listening, set()
                continue
            unfinished = self.channels.unfinished()
            try:
                absent = await self._absent([*unfinished]) if unfinished else set()
            except BrokerError as error:
                logger.warning("lost requests cannot be found: %s", error)
                continue
            if connection is self.channels.listening:
                for request_id in absent & missing:
                    logger.error("request %s is lost: Redis has it no more", request_id)
                    unfinished[request_id].lose(request_id)
                missing = absent

    async def _absent(self, request_ids: Sequence[str]) -> set[str]:
        """Return the ids of requests that are not stored."""
        records = [record_of(each) for each in request_ids]
        if await self.client.exists(*records) == len(records):
            return set()
        there = [await self.client.exists(record) for record in records]
        return {each for each, found in zip(request_ids, there, strict=True) if not found}

    async def publish(self, request: Request, response: Response) -> bool:
        """See `Broker.publish`."""
        if request.subscription_id is None:
            return False
        subscription_id, update = request.subscription_id, encode_update(request, response)
        channel = channel_of(subscription_id)
        if not response.status.terminal:
            return bool(await retry(lambda: self.client.publish(channel, update), _UPDATE_S))
        received, elsewhere = await retry(
            lambda: self._publish_last(
                [*keys_of(request), unconfirmed_of(subscription_id)],
                [*end_arguments(request, response), channel, update, scripts.UNCONFIRMED_S],
            ),
            math.inf,
        )
        if elsewhere:
            start(self._delete_payload(request), self._releases, "release")
        return bool(received)

    async def is_complete(self, request: Request) -> bool:
        """See `Broker.is_complete`."""
        ended = scripts.ended_of(request.id)
        return bool(await retry(lambda: self.client.exists(ended), _UPDATE_S))

    async def disconnected(self, subscription_ids: Iterable[str]) -> set[str]:
        """See `Broker.disconnected`. While Redis is away, no subscription counts as absent."""
        elsewhere = [each for each in subscription_ids if not self.channels.is_open(each)]
        counts: list[Any] = []
        if elsewhere:
            with contextlib.suppress(BrokerError):
                counts = await self.client.pubsub_numsub(*map(channel_of, elsewhere))
        return {each for each, (_, count) in zip(elsewhere, counts, strict=False) if not count}

    async def takes(self, subscription_id: str, user: str) -> bool:
        """See `Broker.takes`."""
        key, of_s = user_of(subscription_id), _CHANNEL_S
        await retry(lambda: self.client.set(key, user, nx=True, ex=of_s), _UPDATE_S)
        found = await retry(lambda: self.client.get(key), _UPDATE_S)
        return found == user.encode()

    async def until_disconnected(self, subscription_id: str) -> None:
        """See `Broker.until_disconnected`."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch_forever(), name="departures")
        await self._departures.setdefault(subscription_id, asyncio.Event()).wait()

    async def _watch_forever(self) -> None:
        """Check all watched subscriptions at once. One that is absent twice in a row has departed.

        A gateway that lost its connection is connected again by the second check.
        """
        missing: set[str] = set()
        while True:
            await asyncio.sleep(_PRESENCE_S)
            absent = await self.disconnected(list(self._departures))
            for subscription_id in absent & missing:
                self._departures.pop(subscription_id).set()
            missing = absent

    # Uploads

    async def upload(self, request_id: str, subscription_id: str, content: bytes) -> None:
        """See `Broker.upload`."""
        if not subscription_id:
            return
        with contextlib.suppress(BrokerError):
            keys = [record_of(request_id), scripts.uploads_of(request_id)]
            await self._upload(keys, [subscription_id, content, scripts.UPLOAD_S])

    async def uploaded(self, request: Request) -> bytes:
        """See `Broker.uploaded`."""
        uploads = scripts.uploads_of(request.id)
        while True:
            with contextlib.suppress(BrokerError):
                found = await self.client.blpop([uploads], timeout=_LOOK_S)
                if found is not None:
                    return bytes(found[1])  # type: ignore[arg-type]


def _announcement(request: Request) -> tuple[str, bytes]:
    """Return the channel on which a gateway hears of a request of its client, and what it hears."""
    if request.subscription_id is None:
        return "", b""
    end_ = Response(request.id, Status.ERROR, LOST)
    return channel_of(request.subscription_id), encode_submission(request, end_)


async def _in_memory(payload: Payload) -> bytes:
    if isinstance(payload, PayloadFile):
        return await asyncio.to_thread(payload.read)
    return bytes(payload)


def _object_of(request_id: str) -> str:
    return f"requests/{request_id}"
