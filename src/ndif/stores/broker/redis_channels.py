"""The channels of one process, on one connection to Redis: those of its clients, and of what it does.

A client is present while its session has a subscriber: a gateway that dies takes its clients with it,
and leaves nothing behind. What is terminal also waits in a mailbox, for a gateway whose connection was
lost when it was published.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from typing import Any

from ndif.stores.broker.encoding import decode_update
from ndif.stores.broker.port import BrokerError
from ndif.stores.broker.redis_feed import Feed
from ndif.stores.redis.client import Redis, speaking
from ndif.tasks import end, within

logger = logging.getLogger(__name__)

_CONFIRM_S = 5.0
_PAUSE_S = 0.2
_NOBODY = "nobody"
"""A connection with no channel at all cannot be waited on."""


def channel_of(session: str) -> str:
    """Where the updates of a session are published."""
    return f"session:{session}"


def mailbox_of(session: str) -> str:
    """The list of what a session must not miss."""
    return f"mailbox:{session}"


class Channel:
    """What is published under one name while this process listens."""

    mailbox = ""
    """The list of what must not be missed, if there is one."""

    def __init__(self, channels: Channels, name: str) -> None:
        self.name = name
        self._channels = channels
        self._messages: asyncio.Queue[bytes] = asyncio.Queue()

    def put(self, message: bytes) -> None:
        """Deliver one message."""
        self._messages.put_nowait(message)

    async def get(self) -> bytes:
        """The next message."""
        return await self._messages.get()

    async def close(self) -> None:
        """Listen no longer."""
        await self._channels.close(self)


class RedisSubscription(Channel):
    """A live channel that this process holds open."""

    def __init__(self, channels: Channels, session: str) -> None:
        super().__init__(channels, channel_of(session))
        self.mailbox = mailbox_of(session)
        self._session = session
        self._ended: set[int] = set()

    @property
    def session(self) -> str:
        """See `Subscription.session`."""
        return self._session

    async def next(self) -> str | bytes:
        """See `Subscription.next`."""
        while True:
            update = await self.get()
            if hash(update) in self._ended:  # it came, and was found in the mailbox as well
                continue
            try:
                frame, is_last = decode_update(update)
            except ValueError:
                logger.exception("what came for %s is no update of ours", self.name)
                continue
            if is_last:
                self._ended.add(hash(update))
                self._channels.received(self.mailbox, update)
            return frame


class Channels:
    """Opens channels and reads what comes through them."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._open: dict[str, Channel] = {}
        self._confirmations: dict[tuple[str, str], asyncio.Future[None]] = {}
        self._feed: Feed | None = None
        self._turn = asyncio.Lock()
        self._returning: asyncio.Task[None] | None = None
        self._received: list[tuple[str, bytes]] = []
        self._tidying: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        """Close everything."""
        await end([*filter(None, (self._tidying, self._returning))])
        self._disconnect()

    async def subscribe(self, session: str | None) -> RedisSubscription:
        """See `Broker.subscribe`."""
        subscription = RedisSubscription(self, session or uuid.uuid4().hex)
        await self._listen(subscription)
        return subscription

    async def listen(self, name: str) -> Channel:
        """Hear what is published under a name.

        Raises:
            BrokerError: if nothing would be heard.
        """
        channel = Channel(self, name)
        await self._listen(channel)
        return channel

    async def _listen(self, channel: Channel) -> None:
        replaced = self._open.get(channel.name)
        self._open[channel.name] = channel
        if replaced is None:
            try:
                await self._say("SUBSCRIBE", channel.name)
            except BaseException:
                self._open.pop(channel.name, None)
                raise

    async def close(self, channel: Channel) -> None:
        """Let go of one, unless there is a newer of its name."""
        if self._open.get(channel.name) is channel:
            del self._open[channel.name]
            with contextlib.suppress(BrokerError):  # then nobody counts it any more
                await self._say("UNSUBSCRIBE", channel.name)

    def has(self, session: str) -> bool:
        """Whether its client listens here."""
        return channel_of(session) in self._open

    def received(self, mailbox: str, update: bytes) -> None:
        """Nobody has to find this in the mailbox any more."""
        self._received.append((mailbox, update))
        if self._tidying is None:
            self._tidying = asyncio.create_task(self._tidy(), name="mailboxes")

    async def _tidy(self) -> None:
        """Empty mailboxes, many at a time."""
        while True:
            await asyncio.sleep(_PAUSE_S)
            received, self._received = self._received, []
            try:
                async with speaking():
                    await asyncio.gather(
                        *(self._client.lrem(mailbox, 1, update) for mailbox, update in received)  # type: ignore[arg-type]
                    )
            except BrokerError as error:
                logger.warning("mailboxes end by themselves in time: %s", error)
            except Exception:
                logger.exception("mailboxes end by themselves in time")
            if not self._received:
                self._tidying = None
                break

    async def _say(self, command: str, name: str) -> None:
        """Subscribe to a channel or no longer, and return when that is so."""
        confirmed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._confirmations[command, name] = confirmed
        try:
            async with self._turn:
                feed = await self._connected()
                try:
                    feed.say(command, name)
                except BrokerError:  # it was lost, and nobody has noticed yet
                    self._disconnect()
                    await self._connect()
                    if name not in self._open:
                        return
            await within(confirmed, _CONFIRM_S)
        except asyncio.TimeoutError as error:
            raise BrokerError("the broker does not answer") from error
        finally:
            if self._confirmations.get((command, name)) is confirmed:
                del self._confirmations[command, name]

    async def _connected(self) -> Feed:
        if self._feed is None:
            await self._connect()
        if self._returning is None:
            self._returning = asyncio.create_task(self._return_forever(), name="live channels")
        assert self._feed is not None  # noqa: S101
        return self._feed

    async def _connect(self) -> None:
        self._feed = await Feed.open(self._client, self._hear, _NOBODY, *self._open)
        # What was closed meanwhile is subscribed to no longer, and nobody else confirms that.
        for (command, name), confirmed in self._confirmations.items():
            if command == "UNSUBSCRIBE" and name not in self._open and not confirmed.done():
                confirmed.set_result(None)

    def _disconnect(self) -> None:
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.close()

    async def _return_forever(self) -> None:
        while True:
            feed = self._feed
            if feed is not None:
                logger.warning("the live channels are interrupted: %s", await feed.over())
            if self._feed is feed:  # else there is another already
                self._disconnect()
            await self._come_back()

    async def _come_back(self) -> None:
        while True:
            await asyncio.sleep(_PAUSE_S)
            try:
                async with self._turn:
                    if self._feed is None:
                        await self._connect()
                await self._look_into_mailboxes()
            except BrokerError:
                continue
            except Exception:
                logger.exception("the live channels do not come back")
                continue
            return

    async def _look_into_mailboxes(self) -> None:
        for channel in list(self._open.values()):
            if not channel.mailbox:
                continue
            async with speaking():
                kept = await self._client.lrange(channel.mailbox, 0, -1)
            for update in kept:
                channel.put(bytes(update))  # type: ignore[arg-type]

    def _hear(self, kind: str, name: str, content: Any) -> None:
        if kind == "message":
            if (channel := self._open.get(name)) is not None:
                channel.put(content)
            return
        confirmed = self._confirmations.get((kind.upper(), name))
        if confirmed is not None and not confirmed.done():
            confirmed.set_result(None)
