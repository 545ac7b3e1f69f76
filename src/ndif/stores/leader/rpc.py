"""Calls from a gateway to the leader: an event on a Redis stream, and its answer in a list of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ndif.schema.deployment import OperationError
from ndif.stores.broker.port import BrokerError
from ndif.stores.leader.lock import somebody_leads
from ndif.stores.redis.client import Redis, broker_errors
from ndif.stores.redis.pipelining import ANSWER_S
from ndif.tasks import end

logger = logging.getLogger(__name__)

_STREAM = "dispatcher:events"
_MAX_EVENTS = 1000
_BLOCK_S = 2
_RETRY_S = 2.0
_ANSWER_TTL_S = 60
_STALE_S = 10.0
"""Seconds without a leader after which a call fails; the leader skips older events."""

_NOBODY_LEADS = (
    "No process of this server leads now; another takes over within seconds. Try again then."
)

Handler = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
"""Carries out an event, given its name and arguments; raises `OperationError`."""


def _answer_to(event_id: str) -> str:
    return f"answer:{event_id}"


class LeaderRpc:
    """Both ends of the calls: gateways `ask`, and the leader's `serve` answers.

    Names and arguments of events belong to its callers (`ndif.control.remote`).
    """

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._answering: set[asyncio.Task[Any]] = set()

    async def ask(self, event: str, arguments: Mapping[str, Any]) -> Any:
        """Return the leader's answer, however long that takes while a process leads.

        Raises:
            OperationError: if the leader refuses, or with 503 if no process leads.
        """
        event_id = uuid.uuid4().hex
        entry = {
            "event": event,
            "id": event_id,
            "at": time.time(),
            "arguments": json.dumps(dict(arguments)),
        }
        try:
            async with broker_errors():
                await self._client.xadd(_STREAM, entry, maxlen=_MAX_EVENTS)  # type: ignore[arg-type]
            answer = await self._answer(event_id)
        except BrokerError as error:
            raise OperationError(503, f"The server cannot be asked: {error}.") from error
        if "refused" in answer:
            raise OperationError(answer["status"], answer["refused"])
        return answer["value"]

    async def _answer(self, event_id: str) -> Any:
        looks_without_leader = 0
        while looks_without_leader * _BLOCK_S < _STALE_S:
            async with broker_errors():
                found = await self._client.blpop([_answer_to(event_id)], timeout=_BLOCK_S)
            if found is not None:
                return json.loads(found[1])
            leads = await somebody_leads(self._client)
            looks_without_leader = 0 if leads else looks_without_leader + 1
        raise OperationError(503, _NOBODY_LEADS)

    async def serve(self, handler: Handler) -> None:
        """Answer events concurrently until cancelled. Only the leader calls this."""
        last: str | bytes = f"{int((time.time() - _STALE_S) * 1000)}-0"
        try:
            while True:
                try:
                    last = await self._read(last, handler)
                except BrokerError as error:
                    logger.warning("events cannot be read: %s", error)
                    await asyncio.sleep(_RETRY_S)
        finally:
            await end(list(self._answering))

    async def _read(self, last: str | bytes, handler: Handler) -> str | bytes:
        """Start to carry out the events after `last`, and return the id of the newest."""
        async with broker_errors():
            found: Any = await self._client.xread({_STREAM: last}, count=64, block=_BLOCK_S * 1000)
        streams = found.items() if isinstance(found, dict) else found
        for _, batches in streams:
            # RESP3 nests once more than RESP2.
            entries = batches[0] if batches and isinstance(batches[0], list) else batches
            for entry_id, entry in entries:
                last = entry_id
                task = asyncio.create_task(self._carry_out(entry, handler), name="event")
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
        return last

    async def _carry_out(self, entry: Mapping[bytes, bytes], handler: Handler) -> None:
        try:
            event_id, event = entry[b"id"].decode(), entry[b"event"].decode()
            arguments = json.loads(entry[b"arguments"])
            if time.time() - float(entry[b"at"]) > _STALE_S:
                return
        except (KeyError, ValueError):
            logger.exception("an entry of %s is not an event", _STREAM)
            return
        try:
            content: dict[str, Any] = {"value": await handler(event, arguments)}
        except OperationError as error:
            content = {"refused": str(error), "status": error.status}
        except Exception:
            logger.exception("the event %s could not be carried out", event)
            content = {"refused": "The server failed; its log says why.", "status": 500}
        try:
            async with (
                broker_errors(ANSWER_S),
                self._client.pipeline(transaction=True) as commands,
            ):
                commands.rpush(_answer_to(event_id), json.dumps(content))
                commands.expire(_answer_to(event_id), _ANSWER_TTL_S)
                await commands.execute()
        except BrokerError as error:
            logger.warning("the answer to %s is lost: %s", event, error)
