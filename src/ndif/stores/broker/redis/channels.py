"""The pub/sub channels that one process listens to, on one connection to Redis.

A subscription is present while Redis counts a subscriber on its channel: if a gateway dies, its
subscriptions end and leave no key behind. A terminal update is also stored in a list until its gateway
confirms it, because Redis drops messages for a gateway whose connection is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from redis.asyncio.client import PubSub

from ndif.stores.broker.encoding import decode_question, decode_submission, decode_update
from ndif.stores.broker.outbound_buffer import OutboundBuffer
from ndif.stores.broker.port import BrokerError
from ndif.stores.broker.signing import UNSIGNED, SignatureError, Signed, Signer
from ndif.stores.redis import ANSWER_S, Redis, broker_errors, retry
from ndif.tasks import end, start, timeout, within

logger = logging.getLogger(__name__)

_PAUSE_S = 0.2
_RECOVER_S = 60.0
_PLACEHOLDER = "nobody"
"""A channel without messages: a connection without any channel cannot wait for messages."""


ChannelT = TypeVar("ChannelT", bound="RedisChannel")


def channel_of(subscription_id: str) -> str:
    """Return the name of the channel on which a subscription's updates are published."""
    return f"subscription:{subscription_id}"


def unconfirmed_of(subscription_id: str) -> str:
    """Return the key of the list of a subscription's unconfirmed terminal updates."""
    return f"unconfirmed:{subscription_id}"


def user_of(subscription_id: str) -> str:
    """Return the key that stores the user of a subscription."""
    return f"user:{subscription_id}"


class RedisChannel:
    """A queue of the signed messages that are published under one name while this process listens."""

    unconfirmed = ""
    """Key of a list of messages to read again after the connection was lost; empty for none."""
    takes_payload = False
    """True if unsigned bytes may follow a signed message."""

    def __init__(self, channels: Channels, name: str, place: str = "") -> None:
        """Create a closed channel; its messages are signed for `place`, by default its name."""
        self.name = name
        self.place = place or name
        self.messages: asyncio.Queue[Signed] = asyncio.Queue()
        self._channels = channels

    def receive(self, signed: Signed, message: bytes) -> None:
        """Queue a verified message; `message` is its published form."""
        self.messages.put_nowait(signed)

    async def close(self) -> None:
        """Stop listening."""
        await self._channels.close(self)


@dataclass(frozen=True, slots=True)
class _Update:
    """An update, and its published message; the message is empty if none was published."""

    content: bytes
    message: bytes = b""

    def __len__(self) -> int:
        return len(self.content)


class RedisSubscription(RedisChannel):
    """The production form of `Subscription`."""

    def __init__(self, channels: Channels, subscription_id: str) -> None:
        super().__init__(channels, channel_of(subscription_id))
        self.unconfirmed = unconfirmed_of(subscription_id)
        self.id = subscription_id
        self._updates: OutboundBuffer[_Update] = OutboundBuffer()
        self._terminal: set[int] = set()
        """Hashes of the terminal updates that `next` has returned."""
        self._unfinished: dict[str, bytes] = {}
        """The update that ends each unfinished request if it is lost, by request id."""

    @property
    def unfinished(self) -> Collection[str]:
        return self._unfinished.keys()

    def receive(self, signed: Signed, message: bytes) -> None:
        """See `RedisChannel.receive`. Tracks unfinished requests, and answers questions about them."""
        content = signed.content
        try:
            if (end_update := decode_submission(content)) is not None:
                self._unfinished[decode_update(end_update).request_id] = end_update
                return
            if (question := decode_question(content)) is not None:
                request_id, answers = question
                if request_id in self._unfinished:
                    self._channels.publish_soon(answers, request_id.encode())
                return
            update = decode_update(content)
        except ValueError:
            logger.exception("a message on %s is not an update", self.name)
            return
        if update.is_terminal:
            self._unfinished.pop(update.request_id, None)
        self._updates.put_nowait(_Update(content, message))

    def lose(self, request_id: str) -> None:
        """End a request that the broker has lost."""
        if (update := self._unfinished.pop(request_id, None)) is not None:
            self._updates.put_nowait(_Update(update))

    def bound(self, max_unread_bytes: int, disconnect: Callable[[], None]) -> None:
        """See `Subscription.bound`. Jobs never wait for the client."""
        self._updates.bound(max_unread_bytes, disconnect)

    async def next(self) -> str | bytes:
        while True:
            update = await self._updates.get()
            update_hash = hash(update.content)
            if update_hash in self._terminal:  # received twice: published, and read from the list
                continue
            _, frame, is_terminal = decode_update(update.content)
            if is_terminal:
                self._terminal.add(update_hash)
                if update.message:
                    self._channels.confirm(self.unconfirmed, update.message)
            return frame


class Channels:
    """The open channels of one process, by name.

    Owns the task that connects, reads messages into channels, and reconnects. A message without the
    server's signature reaches no channel. `client` comes from `connect_for_pubsub`; `commands` is a client
    for all other commands.
    """

    def __init__(self, client: Redis, commands: Redis, signer: Signer) -> None:
        self._client = client
        self._commands = commands
        self._signer = signer
        self._publishing: set[asyncio.Task[None]] = set()
        self._open: dict[str, RedisChannel] = {}
        self._pubsub: PubSub | None = None
        """The connection; None while disconnected."""
        self._subscribing: dict[str, asyncio.Future[None]] = {}
        self._unsubscribing: dict[str, asyncio.Future[None]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._recovering: asyncio.Task[None] | None = None
        self._confirmed: list[tuple[str, bytes]] = []
        self._confirming: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        """Close every channel and the connection."""
        tasks = filter(None, (self._reading, self._recovering, self._confirming))
        await end([*tasks, *self._publishing])
        await self._client.aclose()

    async def open(self, channel: ChannelT) -> ChannelT:
        """Start to listen, replacing any channel of the same name, or raise a `BrokerError`."""
        is_new = channel.name not in self._open
        self._open[channel.name] = channel
        if is_new:
            subscribed = self._subscribing[channel.name] = (
                asyncio.get_running_loop().create_future()
            )
            if self._reading is None:
                self._reading = asyncio.create_task(self._read_forever(), name="live channels")
            try:
                await self._send(PubSub.subscribe, channel.name)
                with broker_errors():
                    await within(subscribed, ANSWER_S)
            except BaseException:
                if self._open.get(channel.name) is channel:
                    del self._open[channel.name]
                    await self._send(PubSub.unsubscribe, channel.name)
                raise
        return channel

    def has(self, name: str) -> bool:
        """Return True if a channel of that name is open."""
        return name in self._open

    def is_open(self, subscription_id: str) -> bool:
        """Return True if this process holds the subscription."""
        return self.has(channel_of(subscription_id))

    @property
    def listening(self) -> object | None:
        """Return the connection once missed updates have been read; None before, or without one."""
        is_recovered = self._recovering is not None and self._recovering.done()
        return self._pubsub if is_recovered else None

    def unfinished(self) -> dict[str, RedisSubscription]:
        """Return the subscription of each unfinished request by the request's id."""
        subscriptions = [
            channel for channel in self._open.values() if isinstance(channel, RedisSubscription)
        ]
        return {
            request_id: subscription
            for subscription in subscriptions
            for request_id in subscription.unfinished
        }

    async def close(self, channel: RedisChannel) -> None:
        """Close a channel, unless a newer one has its name."""
        if self._open.get(channel.name) is not channel:
            return
        del self._open[channel.name]
        unsubscribed = self._unsubscribing[channel.name] = (
            asyncio.get_running_loop().create_future()
        )
        await self._send(PubSub.unsubscribe, channel.name)
        if self._pubsub is not None:  # else the subscription ended with the connection
            with contextlib.suppress(asyncio.TimeoutError):
                await within(unsubscribed, ANSWER_S)

    async def publish(self, name: str, content: bytes) -> None:
        """Sign and publish a message, which may be lost."""
        with contextlib.suppress(BrokerError):
            await self._commands.publish(name, self._signer.sign(name, content))

    def publish_soon(self, name: str, content: bytes) -> None:
        """Publish a message in the background, see `publish`."""
        start(self.publish(name, content), self._publishing, f"message to {name}")

    def confirm(self, unconfirmed: str, update: bytes) -> None:
        """Remove an update from its list in the background, batched with others."""
        self._confirmed.append((unconfirmed, update))
        if self._confirming is None:
            self._confirming = asyncio.create_task(self._confirm_all(), name="confirmed updates")

    async def _send(self, command: Callable[[PubSub, str], Awaitable[Any]], name: str) -> None:
        """Send a command if connected; a new connection subscribes to all open channels anyway."""
        pubsub = self._pubsub
        if pubsub is None:
            return
        try:
            with broker_errors():
                await within(command(pubsub, name), ANSWER_S)
        except BrokerError:
            self._lose(pubsub)

    async def _read_forever(self) -> None:
        while True:
            pubsub = self._client.pubsub()
            try:
                await self._connect(pubsub)
                # Terminal updates may have been published while there was no connection.
                await end([*filter(None, [self._recovering])])
                self._recovering = asyncio.create_task(self._read_unconfirmed(), name="recovery")
                while self._pubsub is pubsub:
                    with broker_errors():
                        message = await pubsub.get_message(timeout=None)
                    if message is not None:
                        self._receive(message)
            except Exception as error:
                is_defect = not isinstance(error, BrokerError)
                logger.warning("live channels are interrupted: %s", error, exc_info=is_defect)
            finally:
                self._lose(pubsub)
                with contextlib.suppress(Exception):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]
            await asyncio.sleep(_PAUSE_S)

    async def _connect(self, pubsub: PubSub) -> None:
        try:
            with broker_errors():
                async with timeout(ANSWER_S):
                    await pubsub.connect()  # type: ignore[no-untyped-call]
                    # From here on, `open` and `close` send their own commands.
                    self._pubsub = pubsub
                    await pubsub.subscribe(_PLACEHOLDER, *self._open)
        except BrokerError as error:
            _resolve(self._subscribing, error)
            raise

    def _lose(self, pubsub: PubSub) -> None:
        if self._pubsub is pubsub:
            self._pubsub = None
            _resolve(self._unsubscribing)

    def _receive(self, message: Mapping[str, Any]) -> None:
        name = message["channel"].decode()
        if message["type"] == "message":
            if (channel := self._open.get(name)) is not None:
                self._deliver(channel, message["data"])
            return
        pending = self._subscribing if message["type"] == "subscribe" else self._unsubscribing
        if (confirmation := pending.pop(name, None)) is not None and not confirmation.done():
            confirmation.set_result(None)

    def _deliver(self, channel: RedisChannel, message: bytes) -> None:
        try:
            signed = self._signer.split(channel.place, message)
            if signed.rest and not channel.takes_payload:
                raise SignatureError(UNSIGNED)  # noqa: TRY301
        except SignatureError as error:
            logger.warning("a message on %s is refused: %s", channel.name, error)
        else:
            channel.receive(signed, message)

    async def _read_unconfirmed(self) -> None:
        for channel in list(self._open.values()):
            if not channel.unconfirmed:
                continue
            read = partial(self._commands.lrange, channel.unconfirmed, 0, -1)
            try:
                updates = await retry(read, _RECOVER_S)
            except BrokerError as error:
                logger.warning("missed updates cannot be read: %s", error)
                return
            for update in updates:
                self._deliver(channel, bytes(update))  # type: ignore[arg-type]

    async def _confirm_all(self) -> None:
        while self._confirmed:
            await asyncio.sleep(_PAUSE_S)
            pipeline = self._commands.pipeline(transaction=False)
            for unconfirmed, update in self._confirmed:
                pipeline.lrem(unconfirmed, 1, update)  # type: ignore[arg-type]
            self._confirmed = []
            try:
                with broker_errors():
                    await within(pipeline.execute(), ANSWER_S)
            except BrokerError as error:
                logger.warning("confirmed updates expire instead: %s", error)
        self._confirming = None


def _resolve(pending: dict[str, asyncio.Future[None]], error: Exception | None = None) -> None:
    for future in pending.values():
        if not future.done():
            future.set_exception(error) if error else future.set_result(None)
    pending.clear()
