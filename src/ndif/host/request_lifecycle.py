"""The life of a request: its states, the events between them, and the one class that performs these.

`TRANSITIONS` says which event takes a request from which states to which state, who may cause the event and
what is stored by then. `RequestLifecycle` holds the requests of one process and applies that table.

Both of its users can import this file from here: the queue, which claims requests from the broker, and the
jobs of a replica in a process of its own (`ndif.cluster.remote_actor`), to which the queue sends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Set
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from ndif.host.port import (
    EndedError,
    NotSharedError,
    ReplicaEvictedError,
    ReplicaLostError,
    RequestRunner,
)
from ndif.schema.job_record import CANCELLED, JobRecord
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.schema.step import GATEWAY, Step
from ndif.stores.broker.port import Broker, BrokerAwayError, BrokerError, ClientLeftError
from ndif.stores.objects import ObjectStoreError
from ndif.stores.responder import Responder
from ndif.tasks import end, within
from ndif.telemetry import metrics
from ndif.telemetry.steps import Steps, fields_of, recording

logger = logging.getLogger(__name__)
_log = logging.getLogger("ndif.requests")
"""One line for each request, when it has ended."""

# States, events and what may follow what


class Party(Enum):
    """A part of the server that causes events."""

    GATEWAY = "gateway"
    QUEUE = "queue"
    """The process that claims requests from the broker: the embedded server, or the leader of many."""
    REPLICA = "replica"
    """The process of a replica that outlives leaders. It holds the requests that it was sent."""


class Event(Enum):
    """A step in the life of a request."""

    SUBMIT = "submit"
    CLAIM = "claim"
    WAIT = "wait"
    PROVISION = "provision"
    DEPLOY = "deploy"
    DISPATCH = "dispatch"
    START = "start"
    GIVE_BACK = "give back"
    COMPLETE = "complete"
    FAIL = "fail"
    RELEASE = "release"


class Stored(Enum):
    """A change in the stores that an event makes."""

    REQUEST = "the request and its payload, with the broker"
    CLAIM = "the claim, with the broker, for the next leader to take over"
    STATUS = "the status: published to a live client, an object for a client that polls"
    END = "the terminal response likewise, as an object of its own; then the broker forgets the request"
    RELEASED = "the request, its payload and its claim are deleted"


class Transition(NamedTuple):
    """An event: where it may happen, who may cause it and what it leaves."""

    sources: Set[Status | None]
    """States before it; None is a request that this process does not hold."""
    target: Status | None
    by: Set[Party]
    stored: Stored | None
    """None where the claim alone says all that has to survive."""


WAITING: Set[Status | None] = {Status.QUEUED, Status.PROVISIONING, Status.DEPLOYING}
"""States of a request that is in a queue."""
RUNS: Set[Status | None] = {Status.DISPATCHED, Status.RUNNING}
"""States of a request that a replica was given."""
_HELD = WAITING | RUNS
_QUEUE, _HOLDERS = {Party.QUEUE}, {Party.QUEUE, Party.REPLICA}

TRANSITIONS = {
    Event.SUBMIT: Transition({None}, Status.RECEIVED, {Party.GATEWAY}, Stored.REQUEST),
    Event.CLAIM: Transition({None, Status.RECEIVED}, Status.QUEUED, _HOLDERS, Stored.CLAIM),
    Event.WAIT: Transition(WAITING, Status.QUEUED, _QUEUE, Stored.STATUS),
    Event.PROVISION: Transition(WAITING, Status.PROVISIONING, _QUEUE, Stored.STATUS),
    Event.DEPLOY: Transition(WAITING, Status.DEPLOYING, _QUEUE, Stored.STATUS),
    Event.DISPATCH: Transition(WAITING, Status.DISPATCHED, _HOLDERS, Stored.STATUS),
    Event.START: Transition(RUNS, Status.RUNNING, _HOLDERS, Stored.STATUS),
    # A request that waits is given back where its client is away: it waits for that client first.
    Event.GIVE_BACK: Transition(_HELD, Status.QUEUED, _HOLDERS, None),
    Event.COMPLETE: Transition(RUNS, Status.COMPLETED, _HOLDERS, Stored.END),
    Event.FAIL: Transition(_HELD, Status.ERROR, _HOLDERS, Stored.END),
    # Another process has stored the end: this one lets go.
    Event.RELEASE: Transition(_HELD, None, _HOLDERS, Stored.RELEASED),
}

_REPORTS = {
    Status.QUEUED: Event.WAIT,
    Status.PROVISIONING: Event.PROVISION,
    Status.DEPLOYING: Event.DEPLOY,
    Status.RUNNING: Event.START,
}
_ENDS = {Status.COMPLETED: Event.COMPLETE, Status.ERROR: Event.FAIL}


class IllegalTransitionError(Exception):
    """An event that cannot happen in a request's state, or that its party may not cause."""


def next_state(state: Status | None, event: Event, by: Party) -> Status | None:
    """Return the state after an event; raise if `by` may not cause the event, or not in this state."""
    transition = TRANSITIONS[event]
    if by not in transition.by or state not in transition.sources:
        found = state.value if state is not None else "unknown"
        raise IllegalTransitionError(f"{by.value}: {event.value} of a request that is {found}")
    return transition.target


# Their effects

_LOOKS, _LOOK_S = 10, 0.5
_REMEMBERED = 1000
"""Ends that a process remembers: whoever else takes part may not have heard of them."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_STOP_S = 5.0
_LOST = "The job ended, and its result was lost with its replica. Send it again."
_UNDELIVERED = "The job ended, and its result could not be delivered."
_LEFT = "The client left."
_DEFECT = "The server failed while it ran this job; its log says why."


@dataclass(slots=True, eq=False)
class _Life:
    """One request that this process holds."""

    request: Request
    steps: Steps
    state: Status | None = None
    since: float = 0.0
    """Unix seconds from which it is in this state; at first, of its receipt."""
    losses: int = 0
    """Runs that were cut short because their replica failed, or the server."""
    cancelled: str | None = None
    """Reason to end the request, once it was cancelled."""
    actor: RequestRunner | None = None
    watching: asyncio.Task[None] | None = None
    """The watch over its live client."""
    dispatched: float | None = None
    """Unix seconds of the last time that it was sent to a replica."""
    running: float | None = None
    """Unix seconds since which its block runs on that replica, as far as this process was told."""
    unanswered_s: float = 0.0
    """Seconds of runs that ended without a response, for which the user is charged."""
    end: Response | None = None
    """Terminal response, which may yet have to be delivered."""
    over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class RequestLifecycle:
    """The requests of one process, from `claim` to `complete`.

    Keeps each request's state, reports updates in order, and delivers exactly one terminal response. In the
    queue it owns the broker's claims: a request that it claimed ends here or is claimed by the next
    leader. In a replica's process it owns no claim: a request that does not end there is the queue's again.

    Which request goes next, and on which replica, is for its callers to say.
    """

    broker: Broker
    responder: Responder
    by: Party
    """The party that this process is."""
    max_attempts: int = 1
    """Times that a request runs whose replica fails."""
    on_absence: Callable[[Request], None] = lambda _: None
    """Receives a request on no replica whose live client has disconnected."""
    on_end: Callable[[JobRecord], None] = lambda _: None
    """Receives the record of each request that has ended, where this process is the queue's."""
    _lives: dict[str, _Life] = field(default_factory=dict)
    _ended: dict[str, Response] = field(default_factory=dict)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def held(self) -> list[Request]:
        """Requests that have not ended."""
        return [life.request for life in self._lives.values()]

    @property
    def remembered(self) -> list[str]:
        """Ids of the requests that ended most recently."""
        return [*self._ended]

    def unfinished(self) -> Iterator[tuple[Request, Status, float | None]]:
        """Yield each request that has not ended, its state, and when it was sent to a replica."""
        for life in list(self._lives.values()):
            if life.state is not None and life.state in _HELD:
                yield life.request, life.state, life.dispatched

    def owner_of(self, request_id: str) -> str | None:
        """Return the user of a request that is held; None if it is not."""
        life = self._lives.get(request_id)
        return None if life is None else life.request.user

    def holds(self, request_id: str) -> bool:
        """Return True if a request is held, or ended not long ago."""
        return request_id in self._lives or request_id in self._ended

    def steps_of(self, request_id: str) -> tuple[Request, Status, tuple[Step, ...]] | None:
        """Return a request that is held, its state, and its steps up to now; None for any other."""
        life = self._lives.get(request_id)
        if life is None or life.state is None:
            return None
        now = Step(life.state.value.lower(), self.by.value, life.since, time.time())
        return life.request, life.state, (*life.steps.all, now)

    def end_of(self, request_id: str) -> Response | None:
        """Return how a request ended here, without its result; None if it is not known to have ended."""
        return self._ended.get(request_id)

    def run_of(self, request_id: str) -> tuple[Request, Response] | None:
        """Return a request that a replica has, and its update as of now; None for any other."""
        life = self._lives.get(request_id)
        if life is None or life.state not in RUNS:
            return None
        status = Status.RUNNING if life.state is Status.RUNNING else Status.DISPATCHED
        return life.request, Response(request_id, status, "Your job is with a replica.")

    def exhausted(self, request: Request) -> str | None:
        """Return why a request that was just claimed does not run again; None if it may."""
        losses = self._lives[request.id].losses
        if losses < self.max_attempts:
            return None
        return (
            f"The server ended {_times(losses)} while it ran this job. "
            "It may need more memory than the server has."
        )

    # The five verbs

    def claim(self, request: Request) -> bool:
        """Hold a request from now on; return False if it is held or has ended here already.

        A broker whose connection was lost may hand out the same request twice.
        """
        if request.id in self._lives or request.id in self._ended:
            return False
        steps = Steps(request, self.by.value)
        # A replica is sent the request now; its client has waited since it sent it.
        since = time.time() if self.by is Party.REPLICA else request.received
        life = _Life(request, steps, since=since, losses=request.attempts)
        if self.by is Party.QUEUE and request.began:
            # The gateway has logged it, and hands it on with the request.
            steps.extend([Step("receive", GATEWAY, request.began, request.received)])
        self._move(life, Event.CLAIM)
        self._lives[request.id] = life
        self._watch(life)
        return True

    async def dispatch(
        self, request: Request, actor: RequestRunner, replica_id: str = ""
    ) -> Response:
        """Run a request on a replica and return its terminal response, which `complete` takes.

        `replica_id` names the replica in the log. The errors of `RequestRunner.run` say that the request
        did not run to its end. After an `EndedError` `release` follows, after the others `give_back`.
        """
        life = self._lives[request.id]
        life.steps.replica = replica_id
        self._move(life, Event.DISPATCH)
        if self.by is Party.QUEUE:
            self.broker.note_attempts(request, life.losses + 1)
        life.dispatched, life.running = time.time(), None
        life.actor = actor
        try:
            if life.cancelled is not None:
                return Response(request.id, Status.ERROR, life.cancelled)
            with recording(life.steps):
                return await actor.run(request, partial(self._report_from_replica, request))
        except (BrokerAwayError, ClientLeftError, EndedError, NotSharedError, ReplicaLostError):
            raise
        except (BrokerError, ObjectStoreError) as error:
            logger.error("request %s: %s", request.id, error)  # noqa: TRY400 - a sentence
            return Response(request.id, Status.ERROR, f"The job could not be run: {error}.")
        except Exception:
            # A defect of ours costs one request, not the queue.
            logger.exception("request %s failed in its replica", request.id)
            return Response(request.id, Status.ERROR, _DEFECT)
        finally:
            life.actor = None

    async def give_back(
        self,
        request: Request,
        error: BrokerAwayError | ClientLeftError | NotSharedError | ReplicaLostError | None = None,
    ) -> bool:
        """Take a request back from a replica, or from the queue where its client is away.

        A request whose client is away waits some seconds for that client: a gateway that lost its
        connection has it again soon. While the broker is away, the request waits for the broker. Return
        True if the request is to wait in the queue again.
        """
        life = self._lives.get(request.id)
        if life is None or life.over.is_set() or life.state not in _HELD:
            return False
        if self.by is Party.REPLICA:
            self._forget(life)
            return False
        if isinstance(error, ReplicaLostError) and not isinstance(error, ReplicaEvictedError):
            life.unanswered_s += _since_start(life)
        self._move(life, Event.GIVE_BACK)
        if isinstance(error, NotSharedError):
            reason = life.cancelled
        elif isinstance(error, (BrokerAwayError, ReplicaLostError)):
            if await self._is_complete_at_last(life):  # the replica was lost after that
                await self.release(request)
                return False
            reason = life.cancelled
            if isinstance(error, ReplicaLostError):
                reason = self._reason_after_loss(life, error)
        else:
            reason = await self._reason_after_absence(life)
        if reason is None:
            self.broker.note_attempts(request, life.losses)
            self._watch(life)
            if not isinstance(error, NotSharedError):  # it runs at once
                await self._report_return(request, error)
            if life.cancelled is None:
                return True
            reason = life.cancelled  # while a slow store was told
        await self.fail(request, reason)
        return False

    async def complete(self, request: Request, response: Response) -> Response:
        """Deliver the terminal response, with which the request has ended. A second end changes nothing.

        Return the end, without its result; `delivered` says whether the client can know of it.
        """
        life = self._leave_for_good(request, response)
        if life is None:
            return self._ended.get(request.id, response)
        is_silent = response.meta is None and response.status is Status.ERROR
        if is_silent and life.running is not None:
            # Its runner was ended, and did not say how long the block had run.
            ran_s = round(max(0.0, life.since - life.running), 6)
            response = replace(response, meta={"peak_memory": 0, "execution_time": ran_s})
            life.end = response
        if self.by is Party.REPLICA:
            # The process that leads may hear of the end by the very message that its client has.
            response = replace(response, steps=life.steps.all)
        return await self._end(life, response)

    async def fail(self, request: Request, reason: str) -> None:
        """End a request as an ERROR, even if the caller is cancelled meanwhile."""
        response = Response(request.id, Status.ERROR, reason)
        life = self._lives.get(request.id)
        ran_s = 0.0 if life is None or life.state not in RUNS else _since_start(life)
        if (life := self._leave_for_good(request, response)) is not None:
            life.unanswered_s += ran_s
            await asyncio.shield(self._spawn(self._end(life, response), f"end of {request.id}"))

    async def release(self, request: Request) -> None:
        """Drop a request whose terminal response was already delivered, and which a poll finds."""
        if (life := self._lives.get(request.id)) is not None:
            self._move(life, Event.RELEASE)
            self._forget(life)
            self._note_end(life, self._ended.get(request.id))
        if request.subscription_id is not None:
            return
        end_ = self._ended.get(request.id) or Response(request.id, Status.ERROR, _LOST)
        try:
            await self.responder.ensure_end(request, end_)
        except Exception:
            logger.exception("request %s: its end could not be delivered", request.id)

    # Beside them

    async def report(self, request: Request, response: Response) -> bool:
        """Deliver an update, unless the request is past that state when the update's turn comes.

        Return False if a live client of the request was not there to receive it.
        """
        return await self.responder.respond(
            request, response, unless=lambda: not self._follows(request.id, response.status)
        )

    def cancel(self, request_id: str, reason: str) -> bool:
        """End a request as an ERROR with `reason`; return False if none is held that has not ended.

        A request that waits ends when it would be sent to a replica, unless its caller ends it before.
        """
        life = self._lives.get(request_id)
        if life is None or life.state not in _HELD:
            return False
        life.cancelled = reason
        if life.actor is not None:
            life.actor.cancel(reason)
        return True

    async def ensure_cancelled(self, request_id: str, within_s: float) -> bool:
        """Return once a cancelled request has ended; end it without its replica if that takes too long.

        Return False if it ended by itself before it could be cancelled.
        """
        if (life := self._lives.get(request_id)) is None:
            return False
        with contextlib.suppress(asyncio.TimeoutError):
            await within(life.over.wait(), within_s)
        if not life.over.is_set() and life.cancelled is not None:
            logger.warning("request %s: its replica does not answer; it ends without", request_id)
            await self.fail(life.request, life.cancelled)
        return life.end is not None and life.end.description == life.cancelled

    async def until_over(self, requests: Iterable[Request]) -> None:
        """Return once none of these requests is held."""
        lives = [self._lives[request.id] for request in requests if request.id in self._lives]
        await asyncio.gather(*(life.over.wait() for life in lives))

    async def disconnected(self, requests: Iterable[Request]) -> set[str]:
        """Return the ids of the requests whose live client is not there."""
        live = {request.id: request.subscription_id for request in requests}
        gone = await self.broker.disconnected({id_ for id_ in live.values() if id_ is not None})
        return {request_id for request_id, id_ in live.items() if id_ in gone}

    async def stop(self) -> None:
        """Give responses on their way a few seconds to be delivered.

        Runs that end with this process, which was told to stop, are not held against their requests.
        """
        for life in self._lives.values():
            if life.state in RUNS and self.by is Party.QUEUE:
                self.broker.note_attempts(life.request, life.losses)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_STOP_S)
        watching = [life.watching for life in self._lives.values() if life.watching is not None]
        await end([*self._tasks, *watching])

    # How it is done

    def _move(self, life: _Life, event: Event) -> None:
        before, life.state = life.state, next_state(life.state, event, self.by)
        if life.state is before:
            return
        now = time.time()
        if life.state is Status.RUNNING:
            life.running = now
        left = Status.RECEIVED if before is None else before
        if self.by is Party.QUEUE:
            metrics.status_left(life.request, left, max(0.0, now - life.since))
        if before is not None or self.by is Party.QUEUE:
            life.steps.add(left.value.lower(), life.since, now)
        life.since = now

    def _leave_for_good(self, request: Request, response: Response) -> _Life | None:
        """Move a request to the state of its terminal response; return None if it has ended already."""
        life = self._lives.get(request.id)
        if life is None or life.state not in _HELD:
            return None
        self._move(life, _ENDS[response.status])
        life.end = response
        life.steps.extend(response.steps)
        return life

    def _follows(self, request_id: str, status: Status) -> bool:
        """Move a request to a reported status; return False if the request is past it."""
        life = self._lives.get(request_id)
        if life is None:
            return False
        event = _REPORTS.get(status)
        if event is None:  # DISPATCHED, LOG and STREAM change no state
            return life.state in RUNS
        if life.state not in TRANSITIONS[event].sources:
            return False
        self._move(life, event)
        return True

    async def _report_from_replica(self, request: Request, response: Response) -> bool:
        if response.status is Status.DISPATCHED and self.by is Party.REPLICA:
            return True  # the queue has said so
        try:
            return await self.report(request, response)
        except BrokerAwayError as error:
            if response.status is Status.STREAM:  # its client's part of the block waits for that
                raise BrokerError(str(error)) from error
            logger.warning("request %s: %s is not told: %s", request.id, response.status, error)
            return True

    def _watch(self, life: _Life) -> None:
        """Watch over the live client of a request that waits: without one, it only holds up the others."""
        subscription_id = life.request.subscription_id
        if self.by is not Party.QUEUE or subscription_id is None:
            return
        if life.watching is None or life.watching.done():
            life.watching = asyncio.create_task(self._await_absence(life, subscription_id))

    async def _await_absence(self, life: _Life, subscription_id: str) -> None:
        await self.broker.until_disconnected(subscription_id)
        if life.actor is not None:
            life.actor.cancel(_LEFT)
        elif life.state in WAITING:
            self.on_absence(life.request)

    async def _report_return(self, request: Request, error: Exception | None) -> None:
        """Store for a client that polls that its request waits again: DISPATCHED or RUNNING is stored."""
        if request.subscription_id is None:
            text = f"Your job waits again: {error}." if error else "Your job waits again."
            try:
                await self.report(request, Response(request.id, Status.QUEUED, text))
            except Exception:
                logger.exception("request %s could not be told that it waits again", request.id)

    async def _is_complete_at_last(self, life: _Life) -> bool:
        """Return True if a request has had its terminal response, once the broker answers.

        Without a broker nothing can run anyway. A request that is cancelled waits no longer.
        """
        while life.cancelled is None:
            try:
                return await self.broker.is_complete(life.request)
            except BrokerError as error:
                logger.warning("request %s waits: %s", life.request.id, error)
            await asyncio.sleep(_LOOK_S)
        return False

    async def _is_complete(self, request: Request) -> bool:
        try:
            return await self.broker.is_complete(request)
        except BrokerError as error:
            logger.warning("request %s: %s", request.id, error)
            return False

    def _reason_after_loss(self, life: _Life, error: ReplicaLostError) -> str | None:
        """Return why a request does not run again after its replica was lost; None if it does."""
        if life.cancelled is not None:
            return life.cancelled
        if isinstance(error, ReplicaEvictedError):
            logger.info("request %s: %s; it waits for another replica", life.request.id, error)
            return None
        life.losses += 1
        if life.losses < self.max_attempts:
            logger.warning("request %s: %s; it is tried again", life.request.id, error)
            return None
        return (
            f"The model's process was lost {_times(life.losses)} while it ran this job ({error}). "
            "It may need more memory than the server has."
        )

    async def _reason_after_absence(self, life: _Life) -> str | None:
        """Return why a request ends whose client is away; None if it goes on once that client is back."""
        for _ in range(_LOOKS):
            if not await self.disconnected([life.request]):
                return life.cancelled
            await asyncio.sleep(_LOOK_S)
        logger.info("request %s: its client left", life.request.id)
        return life.cancelled or _LEFT

    async def _end(self, life: _Life, response: Response) -> Response:
        """Deliver a terminal response; try again in the background while the object store is away."""
        request = life.request
        try:
            await self._deliver(request, response)
        except ObjectStoreError as error:
            if self.by is Party.QUEUE:
                logger.warning("request %s: its end is not stored yet: %s", request.id, error)
                self._spawn(self._deliver_later(life, response), f"late end of {request.id}")
                return response
            return self._remember(life, _undelivered(request))
        except Exception:
            logger.exception("request %s: its end could not be delivered", request.id)
            if self.by is Party.QUEUE:
                await self.broker.release(request)
            return self._remember(life, _undelivered(request))
        if not response.delivered:
            life.steps.add("deliver", life.since)
        return self._remember(life, replace(response, delivered=True))

    async def _deliver(self, request: Request, response: Response) -> None:
        if request.subscription_id is not None:
            if not response.delivered:
                await self.responder.respond(request, response)
        elif response.delivered:
            # The replica that delivered the response may be lost before it lets go of the request.
            await self.broker.release(request)
        elif request.refusal:
            # Nobody signed it, and it may have the id of another job, whose end stays.
            await self.responder.ensure_end(request, response)
            await self.broker.release(request)
        elif await self._is_complete(request):
            # Two leaders sent it to two replicas: the first end holds.
            await self.responder.ensure_end(request, response)
        else:
            await self.responder.respond(request, response)

    async def _deliver_later(self, life: _Life, response: Response) -> None:
        """Deliver an end however long the store is away: without it, a poll would never find one."""
        pause_s = _FIRST_PAUSE_S
        try:
            while True:
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
                try:
                    await self._deliver(life.request, response)
                except ObjectStoreError as error:
                    logger.warning("request %s: %s", life.request.id, error)
                else:
                    life.steps.add("deliver", life.since)
                    self._remember(life, replace(response, delivered=True))
                    return
        except Exception:
            logger.exception("request %s: its end could not be delivered", life.request.id)
        await self.broker.release(life.request)
        self._remember(life, _undelivered(life.request))

    def _remember(self, life: _Life, response: Response) -> Response:
        """Keep the end of a request in mind; no client fetches a live result a second time."""
        self._forget(life)
        self._note_end(life, response)
        if life.request.subscription_id is not None:
            response = replace(response, data=None)
        self._ended[life.request.id] = response
        if len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]
        return response

    def _note_end(self, life: _Life, response: Response | None) -> None:
        """Log and record a request that has ended. A replica's queue does so for the replica."""
        if self.by is Party.QUEUE:
            record = _record_of(life, response, time.time())
            peak_memory, limit = (
                (0, "") if response is None else (response.peak_memory, response.limit)
            )
            metrics.job_ended(record, peak_memory, limit)
            fields = {**fields_of(life.request), "status": record.status}
            _log.info("%s", _describe(record), extra=fields)
            if not life.request.refusal:  # nobody signed whose it is
                self.on_end(record)

    def _forget(self, life: _Life) -> None:
        self._lives.pop(life.request.id, None)
        life.over.set()
        if life.watching is not None:
            life.watching.cancel()
            # A task that is cancelled keeps its frames, and they the end of the request.
            life.watching = None

    def _spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _since_start(life: _Life) -> float:
    """Return the seconds since a request's block began to run, or at least was sent to a replica."""
    began = life.dispatched if life.running is None else life.running
    return 0.0 if began is None else max(0.0, time.time() - began)


def _record_of(life: _Life, response: Response | None, now: float) -> JobRecord:
    """Return the record of a request that has ended; with no response, nobody here knows how."""
    request = life.request
    status, reason = "ENDED", ""
    if response is not None:
        status = response.status.value
        if response.status is Status.ERROR and response.description in (life.cancelled, _LEFT):
            status, reason = CANCELLED, response.description
    return JobRecord(
        id=request.id,
        user=request.user,
        key=request.key,
        model=request.model.label,
        generation=request.generation,
        status=status,
        received=request.received,
        dispatched=life.dispatched,
        ended=now,
        execution_s=life.unanswered_s + (0.0 if response is None else response.execution_s),
        result_bytes=0 if response is None else response.result_bytes,
        steps=life.steps.all,
        traceparent=request.traceparent,
        reason=reason,
    )


def _describe(record: JobRecord) -> str:
    """Return a record's id, user, model, status and times, as `name=value`."""
    left = record.ended if record.dispatched is None else record.dispatched
    received = datetime.fromtimestamp(record.received, timezone.utc).isoformat("T", "milliseconds")
    values = {
        "id": record.id,
        "user": record.user,
        "model": record.model,
        "nnsight": record.generation,
        "status": record.status,
        "received": received,
        "waited": f"{max(0.0, left - record.received):.3f}s",
        "ran": f"{max(0.0, record.ended - left):.3f}s",
    }
    # A user's name may have spaces and lines.
    return "request " + " ".join(
        f"{name}={value if value.isprintable() and ' ' not in value else json.dumps(value)}"
        for name, value in values.items()
    )


def _undelivered(request: Request) -> Response:
    return Response(request.id, Status.ERROR, _UNDELIVERED)
