"""Gateways in other processes: operations that they ask the leader for, and models that it publishes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from ndif.cluster.controller import Controller
from ndif.cluster.model_files import ModelFilesStorage
from ndif.cluster.status import client_status, describe_details, publish
from ndif.config.units import format_duration
from ndif.control.answers import Stopping
from ndif.control.control_plane import ControlPlane
from ndif.control.operations import OPERATIONS, Operation, Stop
from ndif.host.request_lifecycle import RUNS
from ndif.probe.history import Histories
from ndif.runtime.typed_json import from_json, to_json
from ndif.schedule.schedule import Window
from ndif.schema import answer
from ndif.schema.deployment import OperationError
from ndif.schema.model_key import ModelKey
from ndif.schema.public_state import NextState
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.schema.structure import ModelDetails
from ndif.schema.wires import envelope_fields
from ndif.stores.broker import LOST, BrokerError
from ndif.stores.events import OperatorsEvent
from ndif.stores.responder import StoredResponse
from ndif.tasks import within

if TYPE_CHECKING:
    # A server of one process has no client of Redis.
    from ndif.stores.broker.redis.broker import RedisBroker
    from ndif.stores.leader import LeaderRpc, SharedCache

logger = logging.getLogger(__name__)

UPDATE, NOTE = "UPDATE", "NOTE"
"""The calls that ask for the update of one request, and that have events noted for operators."""
DETAILS = "MODEL_DETAILS"
"""The event that asks for the structure of one model."""
OVERVIEW = "OVERVIEW"
"""The event that asks for the state that the dashboard shows, once it is another."""
STATUS, MODELS, FILES = "status", "models", "files"
"""Names of the published values in the shared cache."""

_ASK_S = 1.0
_NO_SUCH_EVENT = 400
_OVERVIEW_S = 15.0
"""Seconds after which the leader is not waited for that was asked for the next state."""
_INTERVAL_S = 0.5
_WRITES_PER_LIFE = 3
"""Writes of an unchanged value before it would expire."""
_SILENT = "The process of this server that leads does not answer now."
_MAX_QUOTED = 100
"""Characters of an unknown event's name that an error repeats."""


@dataclass(eq=False)
class Publisher:
    """Writes the models, their state and the addresses of their files to the shared cache.

    It writes a value when it changes, and again before it expires. `PublishedCatalogue` and
    `PublishedModels` of each gateway read the values.
    """

    controller: Controller
    model_files: ModelFilesStorage
    cache: SharedCache
    life_s: float
    """Seconds until a value expires whose writer is gone."""
    coming: Callable[[], Sequence[Window]] = tuple
    """Return the calendar's next windows."""
    probes: Histories | None = None
    """The outcomes of the server's own probes."""
    _written: dict[str, tuple[float, Any]] = field(default_factory=dict, init=False)

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            models, replicas = self.controller.models, self.controller.replicas()
            try:
                await self._write(MODELS, publish(models))
                status = client_status(self.controller, self.coming(), self.probes)
                await self._write(STATUS, msgspec.Raw(answer.to_json(status)))
                self.model_files.note(replicas)
                await self._write(FILES, self.model_files.stored)
            except BrokerError as error:
                logger.warning("the models could not be published: %s", error)
            await asyncio.sleep(_INTERVAL_S)

    async def _write(self, name: str, value: Any) -> None:
        now = asyncio.get_running_loop().time()
        at, written = self._written.get(name, (now, None))
        if value != written or now - at > self.life_s / _WRITES_PER_LIFE:
            await self.cache.write(name, value, self.life_s)
            self._written[name] = now, value


@dataclass(frozen=True)
class RemoteControlPlane:
    """The gateway's side: sends each operation to the leader, except the one that stops the server."""

    leader: LeaderRpc
    stop: Callable[[], None]
    """End the server that this gateway belongs to."""
    status_timeout_s: float
    """Seconds after which the leader is not waited for, if it is only to tell something."""

    async def perform(self, operation: Operation) -> Any:
        """Return the leader's answer to the operation; raise OperationError if no process leads."""
        if isinstance(operation, Stop):
            self.stop()
            return Stopping(stopping=True)
        asked = self.leader.ask(operation.event, operation.model_dump(mode="json"))
        if operation.method == "GET":
            limit = format_duration(self.status_timeout_s)
            silent = (
                f"The leader did not answer within {limit} (STATUS_REQUEST_TIMEOUT_S); "
                "`ndif logs dispatcher` says what it does."
            )
            asked = _within(asked, self.status_timeout_s, silent)
        return answer.from_json(operation.answer, await asked)


async def _within(asked: Coroutine[Any, Any, bytes], limit_s: float, silent: str) -> bytes:
    """Return the leader's answer; raise an OperationError with this sentence if it takes longer."""
    try:
        return await within(asked, limit_s)
    except asyncio.TimeoutError as error:
        raise OperationError(504, silent) from error


@dataclass(frozen=True, slots=True)
class _Update:
    """The leader's answer to the question of where a job is."""

    held: bool
    """True if the leader has the job."""
    update: StoredResponse | None


@dataclass(frozen=True)
class RemoteQueue:
    """The gateway's side of the queue: asks the leader where a polled request is."""

    leader: LeaderRpc
    broker: RedisBroker

    async def update_of(self, request_id: str, stored: Status | None) -> StoredResponse | None:
        """Return what follows the stored update of a request; None if nothing does.

        That is its update if it waits, or runs and nothing is stored, and the end of one that is lost.
        """
        is_known = await self.broker.knows(request_id)
        # A job is lost that had a response and is neither stored, nor held, nor ended.
        if (is_known and stored in RUNS) or not (is_known or stored):
            return None
        question = {"request_id": request_id, "is_stored": stored is not None}
        try:
            told = from_json(_Update, await within(self.leader.ask(UPDATE, question), _ASK_S))
        except (OperationError, asyncio.TimeoutError):
            return None
        if told.held or is_known:
            return told.update
        return StoredResponse(envelope_fields(Response(request_id, Status.ERROR, LOST)), "")


@dataclass(frozen=True)
class RemoteEvents:
    """The gateway's side of the log of events: has the leader note them."""

    leader: LeaderRpc

    async def note(self, events: Sequence[OperatorsEvent]) -> None:
        """Send events to the leader. Without one they are in this process's log alone."""
        try:
            asked = self.leader.ask(NOTE, {"events": [asdict(each) for each in events]})
            await within(asked, _ASK_S)
        except (OperationError, asyncio.TimeoutError):
            for each in events:
                logger.warning(
                    "Not noted, for nobody leads: %s %s, by %s: %s",
                    *(each.kind, each.subject, each.by, each.text),
                )


@dataclass(frozen=True)
class RemoteDetails:
    """The gateway's side of facts that the leader has of a model and does not publish."""

    leader: LeaderRpc
    timeout_s: float

    async def __call__(self, key: ModelKey) -> ModelDetails:
        """Return the leader's `describe_details`; raise OperationError if no process leads."""
        asked = self.leader.ask(DETAILS, {"key": str(key)})
        silent = f"The leader did not answer within {format_duration(self.timeout_s)}."
        return ModelDetails.read(json.loads(await _within(asked, self.timeout_s, silent)))


@dataclass(frozen=True)
class RemoteOverview:
    """The gateway's side of the dashboard: asks the leader for the next state."""

    leader: LeaderRpc

    async def next(self, seen: str, users: Sequence[str]) -> NextState:
        """See `Overview.next`; raise an OperationError if the leader does not answer."""
        asked = self.leader.ask(OVERVIEW, {"seen": seen, "users": list(users)})
        return answer.from_json(NextState, await _within(asked, _OVERVIEW_S, _SILENT))


async def perform_event(control: ControlPlane, event: str, arguments: Mapping[str, Any]) -> bytes:
    """Perform the operation that an event asks the leader for, and return the JSON of its answer.

    Raises:
        OperationError: If there is no such operation, or it cannot be done.
    """
    if event == UPDATE:
        request_id = str(arguments["request_id"])
        dispatcher = control.dispatcher
        update = dispatcher.update_of(request_id, is_stored=arguments["is_stored"])
        return to_json(_Update(dispatcher.holds(request_id), update))
    if event == NOTE:
        for each in arguments["events"]:
            control.events.add(OperatorsEvent(**each))
        return b"{}"
    if event == DETAILS:
        key = ModelKey.parse(str(arguments["key"]))
        return answer.to_json(describe_details(control.controller.models, key))
    if event == OVERVIEW:
        return answer.to_json(await control.overview.next(arguments["seen"], arguments["users"]))
    for kind in OPERATIONS:
        if kind.event == event:
            return answer.to_json(await kind.model_validate(arguments).perform(control))
    raise OperationError(_NO_SUCH_EVENT, f"There is no event {event[:_MAX_QUOTED]!r}.")
