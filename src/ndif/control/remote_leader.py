"""The `Leader` of a gateway in another process, and the leader's handler of its calls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ndif.cluster.models import Models
from ndif.cluster.status import PublishedModel, describe_details, read
from ndif.config.units import format_duration
from ndif.control.answers import Stopping
from ndif.control.control_plane import ControlPlane
from ndif.control.operations import OPERATIONS, Operation, Stop
from ndif.control.publisher import MODELS, STATUS
from ndif.host.job import RUNS
from ndif.runtime.typed_json import from_json, to_json
from ndif.schema import answer
from ndif.schema.client_status import ServerStatus
from ndif.schema.deployment import OperationError
from ndif.schema.model_key import ModelKey
from ndif.schema.public_state import NextState
from ndif.schema.repositories import Repositories
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.schema.structure import ModelDetails
from ndif.schema.wires import envelope_fields
from ndif.stores.broker import LOST
from ndif.stores.events import OperatorsEvent
from ndif.stores.responder import StoredResponse
from ndif.tasks import within

if TYPE_CHECKING:
    # A server of one process does without Redis.
    from ndif.stores.broker.redis.broker import RedisBroker
    from ndif.stores.leader import LeaderRpc, SharedCache

logger = logging.getLogger(__name__)

UPDATE, NOTE, DETAILS, STATE = "UPDATE", "NOTE", "MODEL_DETAILS", "OVERVIEW"
"""Events of calls that are not operations: `update_of`, `record`, `details` and `next_state`."""

_CALL_TIMEOUT_S = 1.0
_NO_SUCH_EVENT = 400
_STATE_TIMEOUT_S = 15.0
"""Seconds after which a gateway stops waiting for the leader's next state."""
_POLL_S = 0.5
_NOTHING_PUBLISHED = "No process of this server can run a job yet. Try again in a moment."
_NO_ANSWER = "The leader of this server does not answer now."
_MAX_QUOTED = 100
"""Characters of an unknown event's name that an error repeats."""


@dataclass(frozen=True, slots=True)
class _Update:
    """The leader's answer to `update_of`."""

    held: bool
    """True if the leader holds the job, or the job ended recently."""
    update: StoredResponse | None


class RemoteLeader:
    """`Leader` of a gateway in its own process: calls the leader over Redis, and reads published values."""

    def __init__(
        self,
        rpc: LeaderRpc,
        cache: SharedCache,
        broker: RedisBroker,
        repositories: Repositories,
        *,
        timeout_s: float,
        stop: Callable[[], None],
    ) -> None:
        """Connect a gateway to the leader; `stop` ends the server.

        `repositories` decides which models users may load.

        Read-only operations time out after `timeout_s`; operations that change something do not.
        """
        self._rpc = rpc
        self._cache = cache
        self._broker = broker
        self._repositories = repositories
        self._timeout_s = timeout_s
        self._stop = stop
        self._published_status: msgspec.Raw | None = None
        self._status = ServerStatus(deployments={})
        self._published: list[PublishedModel] | None = None
        self._models = Models()

    async def models(self) -> Models:
        published = await self._cache.read(MODELS, list[PublishedModel])
        if published is None:
            raise OperationError(503, _NOTHING_PUBLISHED)
        if published is not self._published and published != self._published:
            self._models = read(published, self._repositories)
        self._published = published
        return self._models

    async def status(self) -> ServerStatus:
        """Return the published status; wait up to `timeout_s` for the first status."""
        deadline = time.monotonic() + self._timeout_s
        while (status := await self._cache.read(STATUS, msgspec.Raw)) is None:
            if time.monotonic() > deadline:
                raise OperationError(503, _NOTHING_PUBLISHED)
            await asyncio.sleep(_POLL_S)
        if status is not self._published_status:
            self._published_status, self._status = (
                status,
                answer.from_json(ServerStatus, bytes(status)),
            )
        return self._status

    async def details(self, key: ModelKey) -> ModelDetails:
        no_answer = f"The leader did not answer within {format_duration(self._timeout_s)}."
        content = await _within(
            self._rpc.ask(DETAILS, {"key": str(key)}), self._timeout_s, no_answer
        )
        return ModelDetails.read(msgspec.json.decode(content))

    async def connected(self) -> bool:
        from ndif.stores.leader import has_leader

        return await has_leader(self._broker.client)

    async def perform(self, operation: Operation) -> Any:
        """See `Leader.perform`; `Stop` is performed by this process."""
        if isinstance(operation, Stop):
            self._stop()
            return Stopping(stopping=True)
        call = self._rpc.ask(operation.event, operation.model_dump(mode="json"))
        if operation.method == "GET":
            limit = format_duration(self._timeout_s)
            no_answer = (
                f"The leader did not answer within {limit} (STATUS_REQUEST_TIMEOUT_S); "
                "`ndif logs dispatcher` shows its log."
            )
            call = _within(call, self._timeout_s, no_answer)
        return answer.from_json(operation.answer, await call)

    async def update_of(self, request_id: str, stored: Status | None) -> StoredResponse | None:
        is_known = await self._broker.knows(request_id)
        # A job with a stored response, but unknown to the broker and the leader, is lost.
        if (is_known and stored in RUNS) or not (is_known or stored):
            return None
        question = {"request_id": request_id, "is_stored": stored is not None}
        try:
            reply = from_json(
                _Update, await within(self._rpc.ask(UPDATE, question), _CALL_TIMEOUT_S)
            )
        except (OperationError, asyncio.TimeoutError):
            return None
        if reply.held or is_known:
            return reply.update
        return StoredResponse(envelope_fields(Response(request_id, Status.ERROR, LOST)), "")

    async def record(self, events: Sequence[OperatorsEvent]) -> None:
        """See `Leader.record`; without a leader, the events go only to this process's log."""
        try:
            call = self._rpc.ask(NOTE, {"events": [asdict(event) for event in events]})
            await within(call, _CALL_TIMEOUT_S)
        except (OperationError, asyncio.TimeoutError):
            for event in events:
                logger.warning(
                    "The event was not recorded, because there is no leader: %s %s, by %s: %s",
                    *(event.kind, event.subject, event.by, event.text),
                )

    async def next_state(self, last_name: str, users: Sequence[str]) -> NextState:
        call = self._rpc.ask(STATE, {"seen": last_name, "users": list(users)})
        return answer.from_json(NextState, await _within(call, _STATE_TIMEOUT_S, _NO_ANSWER))


async def _within(call: Coroutine[Any, Any, bytes], limit_s: float, no_answer: str) -> bytes:
    """Return the leader's answer; raise an OperationError (504) with `no_answer` after `limit_s`."""
    try:
        return await within(call, limit_s)
    except asyncio.TimeoutError as error:
        raise OperationError(504, no_answer) from error


async def answer_call(control: ControlPlane, event: str, arguments: Mapping[str, Any]) -> bytes:
    """Perform a call from a `RemoteLeader` and return the answer as JSON.

    Raises:
        OperationError: If no such event exists, or the operation fails.
    """
    if event == UPDATE:
        request_id = str(arguments["request_id"])
        dispatcher = control.dispatcher
        update = dispatcher.update_of(request_id, is_stored=arguments["is_stored"])
        return to_json(_Update(dispatcher.holds(request_id), update))
    if event == NOTE:
        for fields in arguments["events"]:
            control.events.add(OperatorsEvent(**fields))
        return b"{}"
    if event == DETAILS:
        key = ModelKey.parse(str(arguments["key"]))
        return answer.to_json(describe_details(control.controller.models, key))
    if event == STATE:
        return answer.to_json(await control.overview.next(arguments["seen"], arguments["users"]))
    for kind in OPERATIONS:
        if kind.event == event:
            return answer.to_json(await kind.model_validate(arguments).perform(control))
    raise OperationError(_NO_SUCH_EVENT, f"There is no event {event[:_MAX_QUOTED]!r}.")
