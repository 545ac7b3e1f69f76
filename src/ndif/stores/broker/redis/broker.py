"""The broker of many processes: a stream and channels of Redis or Valkey.

The stream `queue` has one consumer group. Only the leader claims: a request that it claimed and did not
release is pending in the stream, and the next leader takes it over. The leader's lock is the lease of all
claims at once (see `ndif.stores.leader`).

Redis is not trusted: requests are signed (`..signing`), and a payload either matches the digest in its
signed request, or is in the object store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from redis.commands.core import AsyncScript
from redis.exceptions import ResponseError

from ndif.config.groups import OLDEST_REDIS
from ndif.schema.payload import Payload, PayloadFile
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.stores.broker.encoding import (
    claimed_fields,
    decode_numbered,
    decode_request,
    encode_end,
    encode_numbered,
    encode_question,
    encode_request,
    encode_submission,
    encode_update,
)
from ndif.stores.broker.port import (
    LOST,
    BrokerError,
    QueueFullError,
    TooManyJobsError,
    held_bytes,
)
from ndif.stores.broker.redis import scripts
from ndif.stores.broker.redis.channels import (
    Channels,
    RedisChannel,
    RedisSubscription,
    channel_of,
    unconfirmed_of,
    user_of,
)
from ndif.stores.broker.redis.scripts import (
    ENDS,
    GROUP,
    HELD,
    QUEUE,
    Scripts,
    end_arguments,
    keys_of,
    record_of,
)
from ndif.stores.broker.signing import SignatureError, Signed, Signer, digest, unverified
from ndif.stores.objects import ObjectStore, ObjectStoreError
from ndif.stores.objects.port import end_key, update_key
from ndif.stores.redis import connect, connect_for_pubsub, is_too_old, retry
from ndif.tasks import end, start, within

logger = logging.getLogger(__name__)

_BATCH = 64
_BLOCK_MS = 2000
_INHERIT_S = 5.0
"""Seconds between two checks for claims of earlier leaders."""
_STALE_CONSUMER_MS = 600_000
"""Milliseconds after which the consumer of a silent leader is deleted."""
_GATHER_S = 0.005
"""Seconds between two reads of the stream, so that under load each read returns several requests."""
_POLL_S = 1.0
_PRESENCE_S = 0.4
"""Seconds between two checks that the clients of unfinished requests are present."""
_CHANNEL_S = 86_400
"""Seconds for which the user of a subscription is stored."""
_UPDATE_S = 5.0
"""Seconds for which an update is retried; the next one replaces it."""
_SETTLE_S = 30.0
"""Tolerated difference of clocks, in seconds, when a trusted request might be an old one."""
_REMEMBER_S = 60.0
"""Age in seconds up to which trusted requests claimed here are remembered, to refuse copies."""
_QUESTIONS = 5
"""Number of times that a gateway is asked, every `_POLL_S`, whether a client waits."""

_REFUSED = (
    "This job was not run: it reached the queue without the signature of one of this server's gateways. "
    "Send it again; if that does not help, the server's operator finds more in its log."
)
_UNREADABLE = (
    "This job was not run: another version of this server put it into the queue, and the leader cannot "
    "read it. Send it again."
)
_UNCONFIRMED = (
    "This job was not run: another process leads now, and nothing confirms that the job is still to run. "
    "Send it again."
)
_CHANGED = "the payload of this request was changed in transit; send it again"


class RedisBroker:
    """The production form of `Broker`.

    Owns the process's connections to Redis. Payloads above `inline_bytes` are in the object store.
    """

    def __init__(
        self,
        url: str,
        objects: ObjectStore,
        signer: Signer,
        *,
        inline_bytes: int,
        max_bytes: int | None = None,
        counts_attempts: bool = False,
    ) -> None:
        """Create a broker that connects to `url` when it is first used.

        All unfinished requests have at most `max_bytes`; a single one may be larger. `counts_attempts` is
        True if running requests end with the leader.
        """
        self.client = connect(url)
        self.password: str | None = self.client.connection_pool.connection_kwargs.get("password")
        self.signer = signer
        self._objects = objects
        self._inline_bytes = inline_bytes
        self._max_bytes = sys.maxsize if max_bytes is None else max_bytes
        self._counts_attempts = counts_attempts
        self.channels = Channels(connect_for_pubsub(url), self.client, signer)
        self.scripts = Scripts(self.client)
        self._attempts_lock = asyncio.Lock()
        self._consumer = uuid.uuid4().hex
        self._led_since = math.inf
        self._trusted_claims: dict[str, _TrustedClaim] = {}
        """Trusted requests that were claimed here recently."""
        self._confirmations = _Confirmations(self.channels, f"confirmations:{self._consumer}")
        self._listening = asyncio.Lock()
        self._confirming = asyncio.Semaphore(_BATCH)
        self._uploads: dict[str, int] = {}
        """The number of the last upload of each hybrid job."""
        self._claimed: asyncio.Queue[Request] = asyncio.Queue(_BATCH)
        self._claiming: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._finding: asyncio.Task[None] | None = None
        self._departures: dict[str, asyncio.Event] = {}
        self._releases: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        version = str((await self.client.info("server"))["redis_version"])
        if is_too_old(version):
            raise BrokerError(f"its broker is Redis {version}; {OLDEST_REDIS} or newer is needed")
        await self._ensure_group()

    async def stop(self) -> None:
        if self._releases:
            await asyncio.wait(self._releases, timeout=_UPDATE_S)
        tasks = [*self._releases, *filter(None, (self._claiming, self._watching, self._finding))]
        await end(tasks)
        await self.channels.stop()
        await self.client.aclose()

    async def ping(self) -> None:
        await self.client.ping()

    # Requests

    def create_payload(self) -> PayloadFile:
        return self._objects.create_payload()

    async def submit(
        self,
        request: Request,
        *,
        most_of_key: int | None = None,
        most_of_model: int | None = None,
    ) -> None:
        is_inline = len(request.payload) <= self._inline_bytes
        try:
            await self._store(request, most_of_key, most_of_model, is_inline=is_inline)
        except (QueueFullError, TooManyJobsError):
            raise
        except BaseException:
            # The client gets an error, but Redis may have stored the request, or be about to.
            start(self._withdrawn(request, is_inline=is_inline), self._releases, "withdrawal")
            raise
        if isinstance(request.payload, PayloadFile):
            request.payload.discard()

    async def _store(
        self,
        request: Request,
        most_of_key: int | None,
        most_of_model: int | None,
        *,
        is_inline: bool,
    ) -> None:
        size, payload = held_bytes(request), request.payload
        if not is_inline:
            held = int(await self.client.get(HELD) or 0)
            if held and held + size > self._max_bytes:
                raise QueueFullError(held, self._max_bytes)
            await self._objects.put_payload(_object_of(request.id), payload)
        inline = await _in_memory(payload) if is_inline else b""
        content = encode_request(request, digest(inline) if is_inline else "")
        refused = await self.scripts.submit(
            scripts.submission_keys_of(request.id),
            [
                self.signer.sign(QUEUE, content),
                request.subscription_id or "",
                size,
                self._max_bytes,
                *self._announcement(request),
                *scripts.submission_limits(request, most_of_key, most_of_model),
                *([inline] if is_inline else []),
            ],
        )
        if refused is not None:
            if not is_inline:
                await self._objects.delete(_object_of(request.id))
            if refused == scripts.MANY_OF_KEY and most_of_key is not None:
                raise TooManyJobsError.of_key(most_of_key)
            if refused == scripts.MANY_OF_MODEL and most_of_model is not None:
                raise TooManyJobsError.of_model(request.model.repo_id, most_of_model)
            raise QueueFullError(refused, self._max_bytes)

    async def _withdrawn(self, request: Request, *, is_inline: bool) -> None:
        """Withdraw a request that may have been submitted; retry until Redis answers."""
        keys, arguments = scripts.submission_keys_of(request.id), scripts.withdrawal_arguments()
        await retry(lambda: self.scripts.withdraw(keys, arguments), math.inf)
        if not is_inline:
            await self._delete_payload(request)

    def outlives(self, request: Request) -> bool:
        return True

    async def claim(self) -> Request:
        if self._claiming is None:
            self._claiming = asyncio.create_task(self._claim_forever(), name="claims")
        return await self._claimed.get()

    async def knows(self, request_id: str) -> bool:
        """Return True if a request was submitted and not released."""
        return bool(await self.client.exists(record_of(request_id)))

    async def payload(self, request: Request) -> Payload:
        if request.payload:  # it came with the request
            return request.payload
        stored = await retry(
            lambda: self.client.hmget(record_of(request.id), "payload", "subscription"), _UPDATE_S
        )
        content = None
        if request.digest:
            content = stored[0]
        elif stored[1] is not None:  # the request is not released
            content = await self._objects.get(_object_of(request.id))
        if content is None:
            raise BrokerError("the payload of this request is no longer stored; send it again")
        if request.digest and digest(content) != request.digest:  # type: ignore[arg-type]
            logger.warning(
                "request %s: the payload in Redis is not the one that was sent", request.id
            )
            raise BrokerError(_CHANGED)
        return content  # type: ignore[return-value]

    def note_attempts(self, request: Request, attempts: int) -> None:
        """See `Broker.note_attempts`. Not stored if replicas outlive the leader."""
        if self._counts_attempts:
            start(self._store_attempts(request, attempts), self._releases, "attempts")

    async def _store_attempts(self, request: Request, attempts: int) -> None:
        async with self._attempts_lock:  # in the order of the calls
            keys = [record_of(request.id)]
            try:
                await retry(lambda: self.scripts.note_attempts(keys, [attempts]), _UPDATE_S)
            except BrokerError as error:
                logger.warning("request %s: its attempts are not stored: %s", request.id, error)

    async def release(self, request: Request) -> None:
        """See `Broker.release`. Continues in the background while Redis is unavailable."""
        await self._drop(request, self.scripts.release, [GROUP, request.receipt])

    async def complete(self, request: Request, response: Response) -> None:
        """See `Broker.complete`. Continues in the background while Redis is unavailable."""
        await self._drop(request, self.scripts.complete, self._end_arguments(request, response))

    def _end_arguments(self, request: Request, response: Response) -> list[Any]:
        return end_arguments(request, self.signer.sign(ENDS, encode_end(response)))

    async def _drop(self, request: Request, script: AsyncScript, arguments: list[Any]) -> None:
        self._uploads.pop(request.id, None)

        async def drop() -> None:
            # Retried without limit: a request that is not released runs again.
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
        self._led_since = time.time()
        while True:
            try:
                if loop.time() - inherited_at >= _INHERIT_S:
                    if inherited_at == -math.inf or await self._others_hold_claims():
                        await self._inherit()
                    inherited_at = loop.time()
                for request in await self._arrivals():
                    await self._hand_out(request)
                await asyncio.sleep(_GATHER_S)
            except Exception as error:
                is_defect = not isinstance(error, BrokerError)
                logger.warning("no requests can be claimed: %s", error, exc_info=is_defect)
                await asyncio.sleep(_POLL_S)

    async def _inherit(self) -> None:
        """Claim all requests that earlier leaders claimed and did not release."""
        await self._ensure_group()
        start: str | bytes = "0-0"
        while True:
            start, entries, *_ = await self.client.xautoclaim(
                QUEUE, GROUP, self._consumer, min_idle_time=0, start_id=start, count=_BATCH
            )
            for request in self._read(entries):
                await self._hand_out(await self._with_attempts(request))
            if start in ("0-0", b"0-0"):
                break
        for consumer in await self.client.xinfo_consumers(QUEUE, GROUP):
            # Only after a long silence: a deleted consumer loses claims that it made since the listing.
            is_stale = consumer["idle"] > _STALE_CONSUMER_MS and not consumer["pending"]
            if is_stale and consumer["name"].decode() != self._consumer:
                await self.client.xgroup_delconsumer(QUEUE, GROUP, consumer["name"])

    async def _with_attempts(self, request: Request) -> Request:
        if not self._counts_attempts:
            return request
        noted = await self.client.hget(record_of(request.id), "attempts")
        return request if noted is None else replace(request, attempts=int(noted))

    async def _others_hold_claims(self) -> bool:
        """Return True if an earlier leader has claimed requests since this one took over.

        A leader that was halted claims waiting requests before it learns that another process leads.
        """
        await self._ensure_group()  # Redis may have been restarted without its data
        summary = await self.client.xpending(QUEUE, GROUP)
        names = [consumer["name"].decode() for consumer in summary["consumers"]]
        return any(name != self._consumer for name in names)

    async def _arrivals(self) -> list[Request]:
        """Claim and return new requests, or none after a short wait."""
        try:
            streams: Any = await self.client.xreadgroup(
                GROUP, self._consumer, {QUEUE: ">"}, count=_BATCH, block=_BLOCK_MS
            )
        except ResponseError:  # NOGROUP: Redis was restarted without its data
            await self._ensure_group()
            return []
        return [request for _, entries in streams for request in self._read(entries)]

    def _read(self, entries: Iterable[Any]) -> Iterable[Request]:
        for entry_id, fields in entries:
            if fields is None:  # deleted while it was pending
                continue
            receipt, content = entry_id.decode(), fields.get(b"request", b"")
            try:
                yield decode_request(self.signer.verify(QUEUE, content), receipt=receipt)
                continue
            except SignatureError as error:
                refusal = _REFUSED
                logger.warning("entry %s of the queue is refused: %s", receipt, error)
            except (ValueError, KeyError, TypeError, AttributeError):
                refusal = _UNREADABLE
                logger.exception("entry %s of the queue cannot be read", receipt)
            try:
                claims = claimed_fields(unverified(content))
            except (ValueError, KeyError, TypeError, AttributeError):
                self._discard_soon(receipt)
            else:
                yield replace(claims, receipt=receipt, refusal=refusal)

    async def _hand_out(self, request: Request) -> None:
        """Make a request claimable, unless it is a copy of a trusted request.

        An attacker who replays a signed request must not run its unconfined code again. This process
        remembers the trusted requests that it claimed. A request that an earlier leader may have run is
        confirmed: a live one by its client's gateway, a polled one by the object store.
        """
        if not request.trusted:
            await self._claimed.put(request)
            return
        if (claim := self._trusted_claims.get(request.id)) is not None:
            if claim.receipt != request.receipt:
                logger.warning("request %s is in the queue twice; the copy is refused", request.id)
                self._discard_soon(request.receipt)
            else:
                await self._claimed.put(request)
            return
        now = time.time()
        while (
            self._trusted_claims
            and next(iter(self._trusted_claims.values())).received < now - _REMEMBER_S
        ):
            del self._trusted_claims[next(iter(self._trusted_claims))]
        self._trusted_claims[request.id] = _TrustedClaim(request.receipt, request.received)
        if request.received >= max(self._led_since + _SETTLE_S, now - _REMEMBER_S):
            await self._claimed.put(request)
        else:
            start(self._confirm(request), self._releases, f"confirmation of {request.id}")

    async def _confirm(self, request: Request) -> None:
        """Make a trusted request claimable, with a refusal if it is not confirmed; release an ended one."""
        async with self._confirming:
            while True:
                try:
                    is_to_run = await self._is_to_run(request)
                    break
                except (BrokerError, ObjectStoreError) as error:
                    logger.warning("request %s waits to be confirmed: %s", request.id, error)
                await asyncio.sleep(_POLL_S)
        if is_to_run is None:
            await self.release(request)  # its leader ended before it released the request
        else:
            refusal = "" if is_to_run else _UNCONFIRMED
            await self._claimed.put(replace(request, refusal=refusal))

    async def _is_to_run(self, request: Request) -> bool | None:
        """Return True if a request is confirmed to have no end, None if it has one, else False."""
        if request.subscription_id is not None:
            return await self._is_awaited(request, request.subscription_id)
        if await self._objects.get(end_key(request.id)):
            return None
        return bool(await self._objects.get(update_key(request.id)))

    async def _is_awaited(self, request: Request, subscription_id: str) -> bool:
        """Return True if the gateway of a live request confirms that its client waits."""
        answers, channel = self._confirmations, channel_of(subscription_id)
        async with self._listening:
            if not self.channels.has(answers.name):
                await self.channels.open(answers)
        confirmed = answers.awaited[request.id] = asyncio.Event()
        try:
            for _ in range(_QUESTIONS):
                question = encode_question(request.id, answers.name)
                await self.channels.publish(channel, question)
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(confirmed.wait(), _POLL_S)
                    return True
            return False
        finally:
            del answers.awaited[request.id]

    def _discard_soon(self, receipt: str) -> None:
        async def discard() -> None:
            with contextlib.suppress(BrokerError):  # the next leader does it
                await self.scripts.discard([QUEUE], [GROUP, receipt])

        start(discard(), self._releases, "refused entry")

    async def _ensure_group(self) -> None:
        with contextlib.suppress(ResponseError):  # BUSYGROUP: the group exists
            await self.client.xgroup_create(QUEUE, GROUP, id="0", mkstream=True)

    # Subscriptions

    async def subscribe(self, subscription_id: str | None = None) -> RedisSubscription:
        if self._finding is None:
            self._finding = asyncio.create_task(self._find_lost_forever(), name="lost requests")
        return await self.channels.open(
            RedisSubscription(self.channels, subscription_id or uuid.uuid4().hex)
        )

    async def _find_lost_forever(self) -> None:
        """End requests of open subscriptions that Redis has lost.

        A request is stored until the step that publishes its terminal update. So a request that two checks
        miss while this process listens is lost: Redis was emptied, or restarted without its data.
        """
        missing: set[str] = set()
        connection = None
        while True:
            await asyncio.sleep(_POLL_S)
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
                    logger.error("request %s is lost: Redis no longer has it", request_id)
                    unfinished[request_id].lose(request_id)
                missing = absent

    async def _absent(self, request_ids: Sequence[str]) -> set[str]:
        records = [record_of(request_id) for request_id in request_ids]
        if await self.client.exists(*records) == len(records):
            return set()
        present = [await self.client.exists(record) for record in records]
        return {
            request_id
            for request_id, is_present in zip(request_ids, present, strict=True)
            if not is_present
        }

    async def publish(self, request: Request, response: Response) -> bool:
        if request.subscription_id is None:
            return False
        subscription_id = request.subscription_id
        channel = channel_of(subscription_id)
        update = self.signer.sign(channel, encode_update(request, response))
        if not response.status.terminal:
            return bool(await retry(lambda: self.client.publish(channel, update), _UPDATE_S))
        self._uploads.pop(request.id, None)
        received, elsewhere = await retry(
            lambda: self.scripts.publish_last(
                [*keys_of(request), unconfirmed_of(subscription_id)],
                [*self._end_arguments(request, response), channel, update, scripts.UNCONFIRMED_S],
            ),
            math.inf,
        )
        if elsewhere:
            start(self._delete_payload(request), self._releases, "release")
        return bool(received)

    async def is_complete(self, request: Request) -> bool:
        ended = scripts.ended_of(request.id)
        return bool(await retry(lambda: self.client.exists(ended), _UPDATE_S))

    async def disconnected(self, subscription_ids: Iterable[str]) -> set[str]:
        """See `Broker.disconnected`. While Redis is unavailable, no subscription counts as absent."""
        elsewhere = [
            subscription_id
            for subscription_id in subscription_ids
            if not self.channels.is_open(subscription_id)
        ]
        counts: list[Any] = []
        if elsewhere:
            with contextlib.suppress(BrokerError):
                counts = await self.client.pubsub_numsub(*map(channel_of, elsewhere))
        return {
            subscription_id
            for subscription_id, (_, count) in zip(elsewhere, counts, strict=False)
            if not count
        }

    async def takes(self, subscription_id: str, user: str) -> bool:
        key, ttl_s = user_of(subscription_id), _CHANNEL_S
        await retry(lambda: self.client.set(key, user, nx=True, ex=ttl_s), _UPDATE_S)
        owner = await retry(lambda: self.client.get(key), _UPDATE_S)
        return owner == user.encode()

    async def until_disconnected(self, subscription_id: str) -> None:
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch_forever(), name="departures")
        await self._departures.setdefault(subscription_id, asyncio.Event()).wait()

    async def _watch_forever(self) -> None:
        """Check all watched subscriptions together; a subscription absent twice in a row has departed.

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
        if not subscription_id:
            return
        place, number = _upload_place(request_id, subscription_id), time.time_ns()
        # Off the loop: an upload may be large.
        signed = await asyncio.to_thread(
            lambda: self.signer.sign(place, encode_numbered(number, content))
        )
        with contextlib.suppress(BrokerError):
            keys = [record_of(request_id), scripts.uploads_of(request_id)]
            await self.scripts.upload(keys, [subscription_id, signed, scripts.UPLOAD_S])

    async def uploaded(self, request: Request) -> bytes:
        uploads = scripts.uploads_of(request.id)
        while True:
            with contextlib.suppress(BrokerError):
                popped = await self.client.blpop([uploads], timeout=_POLL_S)
                if popped is not None:
                    content = await asyncio.to_thread(self._read_upload, request, bytes(popped[1]))  # type: ignore[arg-type]
                    if content is not None:
                        return content

    def _read_upload(self, request: Request, message: bytes) -> bytes | None:
        """Return a new upload of the request's own client; None for any other or a repeated upload."""
        place = _upload_place(request.id, request.subscription_id or "")
        try:
            number, content = decode_numbered(self.signer.verify(place, message))
        except ValueError as error:
            logger.warning("request %s: an upload is refused: %s", request.id, error)
            return None
        if number <= self._uploads.get(request.id, 0):
            logger.warning("request %s: a repeated upload is refused", request.id)
            return None
        self._uploads[request.id] = number
        return content

    def _announcement(self, request: Request) -> tuple[str, bytes]:
        """Return the channel and the message that announce a request to its client's gateway."""
        if request.subscription_id is None:
            return "", b""
        channel = channel_of(request.subscription_id)
        lost = Response(request.id, Status.ERROR, LOST)
        return channel, self.signer.sign(channel, encode_submission(request, lost))


class _TrustedClaim(NamedTuple):
    receipt: str
    received: float


class _Confirmations(RedisChannel):
    """The channel on which gateways answer with the ids of requests whose clients wait."""

    def __init__(self, channels: Channels, name: str) -> None:
        super().__init__(channels, name)
        self.awaited: dict[str, asyncio.Event] = {}
        """For each request in question, an event that is set once it is confirmed."""

    def receive(self, signed: Signed, message: bytes) -> None:
        if (confirmed := self.awaited.get(signed.content.decode())) is not None:
            confirmed.set()


def _upload_place(request_id: str, subscription_id: str) -> str:
    return f"{scripts.uploads_of(request_id)} {subscription_id}"


async def _in_memory(payload: Payload) -> bytes:
    if isinstance(payload, PayloadFile):
        return await asyncio.to_thread(payload.read)
    return bytes(payload)


def _object_of(request_id: str) -> str:
    return f"requests/{request_id}"
