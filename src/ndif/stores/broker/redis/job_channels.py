"""Channels that carry jobs to replicas in other processes, and return the end of each job.

Messages may be lost with a connection or a restart of Redis. If a leader has no news of a job, it asks the
replica over Ray, where no answer is lost (`ndif.cluster.ray.actors`). A replica refuses a repeated message:
each is signed for one replica's channel and one leader's term, and its number must exceed the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import TypedDict

from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.stores.broker.encoding import (
    decode_end,
    decode_numbered,
    decode_request,
    encode_numbered,
    encode_request,
    encode_return,
    encode_update,
)
from ndif.stores.broker.port import BrokerError, ClientLeftError
from ndif.stores.broker.redis.broker import RedisBroker
from ndif.stores.broker.redis.channels import RedisChannel, channel_of
from ndif.stores.broker.redis.scripts import ENDS, record_of
from ndif.stores.broker.signing import PROTOCOL, Signed, digest
from ndif.stores.redis import retry
from ndif.tasks import end

logger = logging.getLogger(__name__)


def _jobs_of(replica: str) -> str:
    return f"jobs:{replica}"


def _place_of(replica: str, term: str) -> str:
    return f"{_jobs_of(replica)} {term}"


class Introduction(TypedDict):
    """The facts about the leader that a replica needs; Ray carries them."""

    protocol: int
    """See `PROTOCOL`."""
    secrets: Sequence[str]
    """Secrets of the server; the first one signs."""
    term: str
    """Name of the leader's term, for which its jobs are signed."""
    broker_password: str | None
    """Password of the broker, for a node without it in its environment."""


class _Jobs(RedisChannel):
    takes_payload = True


class JobReceiver:
    """The replica's side of the channels: receives jobs."""

    def __init__(self, broker: RedisBroker, replica: str, channel: RedisChannel) -> None:
        self._broker = broker
        self._replica = replica
        self._channel = channel
        self._last = -1

    @classmethod
    async def open(cls, broker: RedisBroker, replica: str, leader: Introduction) -> JobReceiver:
        """Listen for the jobs that a leader sends to the replica of that name."""
        channel = _Jobs(broker.channels, _jobs_of(replica), _place_of(replica, leader["term"]))
        return cls(broker, replica, await broker.channels.open(channel))

    def take_from(self, leader: Introduction) -> None:
        """Accept jobs of this leader from now on, and none of an earlier leader."""
        self._broker.signer.renew(leader["secrets"])
        place = _place_of(self._replica, leader["term"])
        if place != self._channel.place:
            self._channel.place, self._last = place, -1

    async def next(self) -> Request:
        """Return the next job, with its payload if Redis stores the payload."""
        while True:
            signed = await self._channel.messages.get()
            try:
                if (request := self._read(signed)) is not None:
                    return request
            except Exception:
                logger.exception("a message on %s is not a job", self._channel.name)

    def _read(self, signed: Signed) -> Request | None:
        number, content = decode_numbered(signed.content)
        if number <= self._last:
            logger.warning("a repeated job on %s is refused", self._channel.name)
            return None
        self._last = number
        request = decode_request(content, payload=signed.rest)
        # A payload with another digest is dropped; the right one is read when the job runs.
        is_right = bool(request.digest) and request.digest == digest(signed.rest)
        return request if is_right else replace(request, payload=b"")

    async def give_back(self, request: Request) -> None:
        """Notify the leader that a job did not end here."""
        # The message may be lost, because the leader asks soon anyway.
        await self._broker.channels.publish(ENDS, encode_return(request.id))


class JobSender:
    """The leader's side of the channels: sends jobs to replicas, and receives the ends of jobs."""

    def __init__(self, broker: RedisBroker) -> None:
        self._broker = broker
        self._term = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._running: dict[str, asyncio.Future[Response | None]] = {}
        self._receiving: asyncio.Task[None] | None = None

    @property
    def introduction(self) -> Introduction:
        """Return the introduction for replicas that take jobs of this process."""
        return {
            "protocol": PROTOCOL,
            "secrets": self._broker.signer.secrets,
            "term": self._term,
            "broker_password": self._broker.password,
        }

    def start(self) -> None:
        """Start to receive the ends of jobs."""
        self._receiving = asyncio.create_task(self._receive_forever(), name="ends of jobs")

    async def stop(self) -> None:
        """Stop receiving the ends of jobs."""
        if self._receiving is not None:
            await end([self._receiving])

    async def run(
        self,
        request: Request,
        announced: Response,
        replica: str,
        news: asyncio.Future[Response | None],
    ) -> Response | None:
        """Publish `announced` to the request's client, send the request to `replica`, and await its end.

        Return the terminal response, or another result set on `news` meanwhile. Return None if the replica
        gave the request back, or may not have received it. If the client did not receive `announced`, the
        request is not sent; raise a `ClientLeftError`.
        """
        sign = self._broker.signer.sign
        channel, update = "", b""
        if request.subscription_id is not None:
            channel = channel_of(request.subscription_id)
            update = sign(channel, encode_update(request, announced))
        content = encode_numbered(next(self._numbers), encode_request(request))
        job = sign(_place_of(replica, self._term), content)
        self._running[request.id] = news
        try:
            receivers = await self._broker.scripts.hand_over(
                [record_of(request.id)], [_jobs_of(replica), job, channel, update]
            )
            if receivers is None:
                raise ClientLeftError
            return await news if receivers else None
        except BrokerError:
            return None
        finally:
            self._running.pop(request.id, None)

    async def is_complete(self, request: Request) -> bool:
        """Return True if a request has had its terminal response; False if Redis does not answer."""
        with contextlib.suppress(BrokerError):
            return await self._broker.is_complete(request)
        return False

    async def _receive_forever(self) -> None:
        channels = self._broker.channels
        channel = await retry(lambda: channels.open(RedisChannel(channels, ENDS)), math.inf)
        while True:
            request_id, response = decode_end((await channel.messages.get()).content)
            news = self._running.get(request_id)
            if news is not None and not news.done():
                news.set_result(response)
