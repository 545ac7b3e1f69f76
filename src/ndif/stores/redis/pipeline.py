"""Commands on one connection, none of which waits for the answer to another.

They are answered in the order in which they were sent. What is asked for in one turn of the event loop
is sent in one write, and no task is started for any of it: a command costs a fraction of what it does
with the client library's own connections.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

import hiredis
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from ndif.stores.redis.link import ANSWER_S, Link
from ndif.tasks import end

logger = logging.getLogger(__name__)

_LOSSES = 2
"""On so many more connections, one after the other, a command is sent again."""

_PAUSE_S = 0.02
"""Before the next of them; each time twice as long."""
_STALL_S = 1.0
"""A timer that is so late tells of this process, and nothing of the server."""

_ITS_OWN = (RedisError, OSError, asyncio.TimeoutError)
"""What goes wrong with a server, or on the way there."""


@dataclass(slots=True)
class _Command:
    content: bytes
    answer: asyncio.Future[Any]
    asked: float


class Pipeline:
    """Of one event loop. Connects when it is first used, and again when it has lost its connection."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._unanswered: deque[_Command] = deque()
        self._link: Link | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._losses = 0
        self._heard = 0.0
        self._alarm: asyncio.TimerHandle | None = None

    def ask(self, content: bytes) -> asyncio.Future[Any]:
        """Send a command (see `packed`); what is answered.

        RedisError, OSError or asyncio.TimeoutError is set on it if it fails, or the server is away.
        """
        loop = asyncio.get_running_loop()
        command = _Command(content, loop.create_future(), loop.time())
        self._unanswered.append(command)
        if self._alarm is None:
            self._alarm = loop.call_later(ANSWER_S, self._look)
        if self._link is not None:
            self._link.write(content)
        elif self._connecting is None:
            self._connect()
        return command.answer

    async def close(self) -> None:
        """Have nobody wait for an answer any more."""
        if self._connecting is not None:
            await end([self._connecting])
            # Of a task that was cancelled before it began nothing has run.
            self._connecting = None
        self._fail(RedisConnectionError("the connection is closed"))

    def _connect(self) -> None:
        self._connecting = asyncio.create_task(self._open(), name="a connection to Redis")

    async def _open(self) -> None:
        try:
            if self._losses:
                await asyncio.sleep(_PAUSE_S * 2**self._losses)
            self._link = await Link.open(self._client, self._hear, self._lose)
        except _ITS_OWN as error:
            self._fail(error)
        except Exception as error:
            # A defect of ours is none of those who ask.
            logger.exception("no connection to Redis")
            self._fail(RedisError(f"{type(error).__name__}: {error}"))
        else:
            # What nobody waits for any more is not asked again.
            self._unanswered = deque(each for each in self._unanswered if not each.answer.done())
            self._link.write(b"".join(each.content for each in self._unanswered))
        finally:
            self._connecting = None

    def _hear(self, said: Any) -> None:
        if isinstance(said, hiredis.PushNotification):
            return
        if isinstance(said, RedisConnectionError) and self._link is not None:
            # It does not serve yet, as while it reads its data.
            self._link.close()
            self._lose(said)
            return
        self._losses, self._heard = 0, asyncio.get_running_loop().time()
        answer = self._unanswered.popleft().answer
        if answer.done():
            return
        if isinstance(said, Exception):
            answer.set_exception(said)
        else:
            answer.set_result(said)

    def _lose(self, error: Exception) -> None:
        """Ask again, on another connection, what was not answered on this one."""
        self._link = None
        self._losses += 1
        if self._losses > _LOSSES:
            self._fail(error)
        elif self._unanswered:
            self._connect()

    def _look(self) -> None:
        """See that the server answers, if not at once: those who ask much wait for each other."""
        due = self._alarm.when() if self._alarm is not None else 0.0
        self._alarm = None
        if not self._unanswered:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        late = max(self._unanswered[0].asked, self._heard) + ANSWER_S
        if now - due > _STALL_S:
            # It was this process that stood still.
            late = now + _STALL_S
        if late > now:
            self._alarm = loop.call_at(late, self._look)
        else:
            # Those who asked after it have the same server.
            self._fail(asyncio.TimeoutError())

    def _fail(self, error: Exception) -> None:
        """Have nobody wait, and begin anew with what is asked next."""
        link, self._link, self._losses = self._link, None, 0
        if link is not None:
            link.close()
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        unanswered, self._unanswered = self._unanswered, deque()
        for each in unanswered:
            if not each.answer.done():
                each.answer.set_exception(error)
