"""Lanes: the quick way to a replica that is in another process, and the news of how its jobs ended.

What goes this way may be lost, with a connection or a Redis that is restarted. Whoever has heard nothing
asks again by a way on which nothing is (`ndif.cluster.ray_actors`), and what is asked twice is done once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

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
from ndif.stores.broker.redis import RedisBroker
from ndif.stores.broker.redis_channels import Channel, channel_of
from ndif.stores.broker.redis_scripts import ENDS
from ndif.stores.redis.client import speaking
from ndif.tasks import end

logger = logging.getLogger(__name__)

_AGAIN_S = 1.0


def _lane_of(replica: str) -> str:
    return f"replica:{replica}"


class Lane:
    """A replica's end of its lane."""

    def __init__(self, broker: RedisBroker, channel: Channel) -> None:
        self._broker = broker
        self._channel = channel

    @classmethod
    async def open(cls, broker: RedisBroker, replica: str) -> Lane:
        """The one of the replica of that name.

        Raises:
            BrokerError: if nothing would come on it.
        """
        return cls(broker, await broker.channels.listen(_lane_of(replica)))

    async def next(self) -> Request:
        """The next job, with its payload where that is small."""
        while True:
            content = await self._channel.get()
            try:
                return decode_job(content)
            except Exception:
                logger.exception("what came on %s is no job of ours", self._channel.name)

    async def give_back(self, request: Request) -> None:
        """Have whoever leads ask at once what became of a job that came here and has no end."""
        with contextlib.suppress(BrokerError):  # then it asks soon
            async with speaking():
                await self._broker.client.publish(ENDS, encode_return(request.id))


class Lanes:
    """The other end of all lanes."""

    def __init__(self, broker: RedisBroker) -> None:
        self._broker = broker
        self._expected: dict[str, asyncio.Future[Response | None]] = {}
        self._hearing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Hear how jobs end."""
        self._hearing = asyncio.create_task(self._hear_forever(), name="ends of jobs")

    async def stop(self) -> None:
        """Hear it no longer."""
        if self._hearing is not None:
            await end([self._hearing])

    async def run(
        self,
        request: Request,
        announced: Response,
        replica: str,
        news: asyncio.Future[Response | None],
    ) -> Response | None:
        """How a request ended that was sent to `replica`, once its live client was told `announced`.

        None if it was not sent, or what `news` is given.

        Raises:
            ClientLeftError: if its client was not there to hear of it: then it was not sent.
        """
        channel, update = "", b""
        if request.session is not None:
            channel, update = channel_of(request.session), encode_update(request, announced)
        self._expected[request.id] = news
        try:
            async with speaking():
                heard = await self._broker.scripts.hand_over(
                    request.id, _lane_of(replica), encode_job(request), channel, update
                )
            if heard is None:
                raise ClientLeftError
            return await news if heard else None
        except BrokerError:
            return None
        finally:
            self._expected.pop(request.id, None)

    async def has_ended(self, request: Request) -> bool:
        """Whether a request is known to have had its last response."""
        with contextlib.suppress(BrokerError):
            return await self._broker.has_ended(request)
        return False

    async def _hear_forever(self) -> None:
        channel = None
        while channel is None:
            with contextlib.suppress(BrokerError):
                channel = await self._broker.channels.listen(ENDS)
            if channel is None:
                await asyncio.sleep(_AGAIN_S)
        while True:
            request_id, response = decode_end(await channel.get())
            news = self._expected.get(request_id)
            if news is not None and not news.done():
                news.set_result(response)
