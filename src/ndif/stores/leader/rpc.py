"""Events: what gateways ask of whoever leads, and its answers (specification, section 4.1).

The stream `dispatcher:events` carries what is asked; each answer goes to a list of its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ndif.schema.operation import OperationError
from ndif.stores.broker.port import BrokerError
from ndif.stores.coordination.lead import somebody_leads
from ndif.stores.redis.client import Redis, speaking
from ndif.stores.redis.link import ANSWER_S
from ndif.tasks import end

logger = logging.getLogger(__name__)

_STREAM = "dispatcher:events"
_KEPT = 1000
_LOOK_S = 2
_ANSWER_LIFE_S = 60
_STALE_S = 10.0
"""Whoever asked longer ago was told that nobody leads."""

_NOBODY_LEADS = (
    "No process of this server leads now; another takes over within seconds. Try again then."
)

Answer = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
"""What carries an event out: its name and arguments; raises `OperationError`."""


def _answer_to(event_id: str) -> str:
    return f"answer:{event_id}"


class Events:
    """Both ends of the stream."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._answering: set[asyncio.Task[Any]] = set()

    async def ask(self, event: str, arguments: Mapping[str, Any]) -> Any:
        """What the leader answers, however long that takes while one leads.

        Raises:
            OperationError: what it refuses, or 503 where nobody leads.
        """
        event_id = uuid.uuid4().hex
        said = {
            "event": event,
            "id": event_id,
            "at": time.time(),
            "arguments": json.dumps(dict(arguments)),
        }
        try:
            async with speaking():
                await self._client.xadd(_STREAM, said, maxlen=_KEPT)  # type: ignore[arg-type]
            answer = await self._answer(event_id)
        except BrokerError as error:
            raise OperationError(503, f"The server cannot be asked: {error}.") from error
        if "refused" in answer:
            raise OperationError(answer["status"], answer["refused"])
        return answer["value"]

    async def _answer(self, event_id: str) -> Any:
        alone = 0
        while alone * _LOOK_S < _STALE_S:
            async with speaking():
                found = await self._client.blpop([_answer_to(event_id)], timeout=_LOOK_S)
            if found is not None:
                return json.loads(found[1])
            alone = 0 if await somebody_leads(self._client) else alone + 1
        raise OperationError(503, _NOBODY_LEADS)

    async def serve(self, answer: Answer) -> None:
        """Answer what is asked, each in its own time, until cancelled: only whoever leads does."""
        last: str | bytes = f"{int((time.time() - _STALE_S) * 1000)}-0"
        try:
            while True:
                try:
                    last = await self._hear(last, answer)
                except BrokerError as error:
                    logger.warning("events cannot be heard: %s", error)
                    await asyncio.sleep(_LOOK_S)
        finally:
            await end(list(self._answering))

    async def _hear(self, last: str | bytes, answer: Answer) -> str | bytes:
        async with speaking():
            found: Any = await self._client.xread({_STREAM: last}, count=64, block=_LOOK_S * 1000)
        streams = found.items() if isinstance(found, dict) else found
        for _, batches in streams:
            # RESP3 nests once more than RESP2.
            entries = batches[0] if batches and isinstance(batches[0], list) else batches
            for entry_id, said in entries:
                last = entry_id
                task = asyncio.create_task(self._carry_out(said, answer), name="event")
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
        return last

    async def _carry_out(self, said: Mapping[bytes, bytes], answer: Answer) -> None:
        try:
            event_id, event = said[b"id"].decode(), said[b"event"].decode()
            arguments = json.loads(said[b"arguments"])
            if time.time() - float(said[b"at"]) > _STALE_S:
                return
        except (KeyError, ValueError):
            logger.exception("an event that is none of ours")
            return
        try:
            content: dict[str, Any] = {"value": await answer(event, arguments)}
        except OperationError as error:
            content = {"refused": str(error), "status": error.status}
        except Exception:
            logger.exception("the event %s could not be carried out", event)
            content = {"refused": "The server failed; its log says why.", "status": 500}
        try:
            async with speaking(ANSWER_S), self._client.pipeline(transaction=True) as commands:
                commands.rpush(_answer_to(event_id), json.dumps(content))
                commands.expire(_answer_to(event_id), _ANSWER_LIFE_S)
                await commands.execute()
        except BrokerError as error:
            logger.warning("the answer to %s is lost: %s", event, error)
