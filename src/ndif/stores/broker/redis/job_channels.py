"""Channels that carry jobs to replicas in other processes, and the news of how each job ended.

Messages here may be lost with a connection or a restart of Redis. A leader that has no news of a job asks
the replica over Ray, where no answer is lost (`ndif.cluster.ray.actors`). A replica runs a job that is sent
twice only once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from dataclasses import dataclass

from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.stores.broker.encoding import (
    decode_end,
    decode_job,
    encode_job,
    encode_return,
    encode_update,
)
from ndif.stores.broker.port import BrokerError, ClientLeftError
from ndif.stores.broker.redis.broker import RedisBroker
from ndif.stores.broker.redis.channels import Channel, channel_of
from ndif.stores.broker.redis.scripts import ENDS, record_of
from ndif.stores.redis import retry
from ndif.tasks import end

logger = logging.getLogger(__name__)


def _jobs_of(replica: str) -> str:
    return f"jobs:{replica}"


@dataclass(frozen=True, slots=True)
class JobReceiver:
    """The replica's end: receives its jobs."""

    _broker: RedisBroker
    _channel: Channel

    @classmethod
    async def open(cls, broker: RedisBroker, replica: str) -> JobReceiver:
        """Listen for the jobs of the replica of that name."""
        return cls(broker, await broker.channels.open(Channel(broker.channels, _jobs_of(replica))))

    async def next(self) -> Request:
        """Return the next job, with its payload if Redis stores that."""
        while True:
            content = await self._channel.messages.get()
            try:
                return decode_job(content)
            except Exception:
                logger.exception("a message on %s is not a job", self._channel.name)

    async def give_back(self, request: Request) -> None:
        """Tell the leader that a job came here and did not end."""
        with contextlib.suppress(BrokerError):  # the leader asks soon anyway
            await self._broker.client.publish(ENDS, encode_return(request.id))


class JobSender:
    """The leader's end: sends jobs to replicas, and receives the news of how they ended."""

    def __init__(self, broker: RedisBroker) -> None:
        self._broker = broker
        self._running: dict[str, asyncio.Future[Response | None]] = {}
        self._receiving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to receive news."""
        self._receiving = asyncio.create_task(self._receive_forever(), name="ends of jobs")

    async def stop(self) -> None:
        """Stop receiving news."""
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

        Return the terminal response, or whatever `news` is given meanwhile; None if it is not sent.
        If the client did not receive `announced`, the request is not sent, for a `ClientLeftError`.
        """
        channel, update = "", b""
        if request.subscription_id is not None:
            channel = channel_of(request.subscription_id)
            update = encode_update(request, announced)
        self._running[request.id] = news
        try:
            receivers = await self._broker.hand_over(
                [record_of(request.id)], [_jobs_of(replica), encode_job(request), channel, update]
            )
            if receivers is None:
                raise ClientLeftError
            return await news if receivers else None
        except BrokerError:
            return None
        finally:
            self._running.pop(request.id, None)

    async def is_complete(self, request: Request) -> bool:
        """Return True if a request is known to have had its terminal response."""
        with contextlib.suppress(BrokerError):
            return await self._broker.is_complete(request)
        return False

    async def _receive_forever(self) -> None:
        channels = self._broker.channels
        channel = await retry(lambda: channels.open(Channel(channels, ENDS)), math.inf)
        while True:
            request_id, response = decode_end(await channel.messages.get())
            news = self._running.get(request_id)
            if news is not None and not news.done():
                news.set_result(response)
