"""One request in a process that holds it, from its claim to its end, and its states in between.

`TRANSITIONS` lists for each event the states before it, the state after it, the components that may cause
it and the change in the stores. `ndif.host.lifecycle` performs the events of every process that holds
requests, and `ndif.queue.lifecycle` performs the events of the queue alone.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Set
from datetime import datetime, timezone
from enum import Enum
from typing import NamedTuple

from ndif.host.port import RequestRunner
from ndif.schema.job_record import CANCELLED, JobRecord
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.schema.step import GATEWAY, Step
from ndif.telemetry import metrics
from ndif.telemetry.steps import Steps

# States, events and transitions


class Component(Enum):
    """A part of the server that causes events."""

    GATEWAY = "gateway"
    QUEUE = "queue"
    """The process that claims requests from the broker: the embedded server, or the leader of many."""
    REPLICA = "replica"
    """The process of a replica that outlives leaders; it holds the requests that were sent to it."""


class JobEvent(Enum):
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
    """An event: the states that allow it, the components that may cause it, and its effects."""

    sources: Set[Status | None]
    """States before it; None is a request that this process does not hold."""
    target: Status | None
    by: Set[Component]
    stored: Stored | None
    """None if the claim alone records all that must survive."""


WAITING: Set[Status | None] = {Status.QUEUED, Status.PROVISIONING, Status.DEPLOYING}
"""States of a request that is in a queue."""
RUNS: Set[Status | None] = {Status.DISPATCHED, Status.RUNNING}
"""States of a request that a replica was given."""
HELD = WAITING | RUNS
"""States of a request that has not ended."""
_QUEUE, _HOLDERS = {Component.QUEUE}, {Component.QUEUE, Component.REPLICA}

TRANSITIONS = {
    JobEvent.SUBMIT: Transition({None}, Status.RECEIVED, {Component.GATEWAY}, Stored.REQUEST),
    JobEvent.CLAIM: Transition({None, Status.RECEIVED}, Status.QUEUED, _HOLDERS, Stored.CLAIM),
    JobEvent.WAIT: Transition(WAITING, Status.QUEUED, _QUEUE, Stored.STATUS),
    JobEvent.PROVISION: Transition(WAITING, Status.PROVISIONING, _QUEUE, Stored.STATUS),
    JobEvent.DEPLOY: Transition(WAITING, Status.DEPLOYING, _QUEUE, Stored.STATUS),
    JobEvent.DISPATCH: Transition(WAITING, Status.DISPATCHED, _HOLDERS, Stored.STATUS),
    JobEvent.START: Transition(RUNS, Status.RUNNING, _HOLDERS, Stored.STATUS),
    # A waiting request is given back if its live client is disconnected: it first waits for that client.
    JobEvent.GIVE_BACK: Transition(HELD, Status.QUEUED, _HOLDERS, None),
    JobEvent.COMPLETE: Transition(RUNS, Status.COMPLETED, _HOLDERS, Stored.END),
    JobEvent.FAIL: Transition(HELD, Status.ERROR, _HOLDERS, Stored.END),
    # Another process has stored the end; this one only drops the request.
    JobEvent.RELEASE: Transition(HELD, None, _HOLDERS, Stored.RELEASED),
}

_REPORTS = {
    Status.QUEUED: JobEvent.WAIT,
    Status.PROVISIONING: JobEvent.PROVISION,
    Status.DEPLOYING: JobEvent.DEPLOY,
    Status.RUNNING: JobEvent.START,
}
"""The event of each reported status."""
_ENDS = {Status.COMPLETED: JobEvent.COMPLETE, Status.ERROR: JobEvent.FAIL}
"""The event of each terminal status."""


class IllegalTransitionError(Exception):
    """An event that cannot happen in a request's state, or that its component may not cause."""


def next_state(state: Status | None, event: JobEvent, by: Component) -> Status | None:
    """Return the state after an event; raise if `by` may not cause the event in this state."""
    transition = TRANSITIONS[event]
    if by not in transition.by or state not in transition.sources:
        state_name = state.value if state is not None else "unknown"
        raise IllegalTransitionError(f"{by.value}: {event.value} of a request that is {state_name}")
    return transition.target


# A request with its state

CLIENT_LEFT = "The client left."
"""Reason that ends a job whose live client has left."""


class Job:
    """A request with its state, its place in a queue, its steps and its record.

    Only `move` changes the state, and only as `TRANSITIONS` allows.
    """

    __slots__ = (
        *("__weakref__", "_by", "arrived", "cancelled", "cost", "dispatched", "end", "exclusive"),
        *("id", "losses", "over", "priority", "request", "run_since", "runner", "running", "since"),
        *("state", "steps", "unanswered_s", "user", "watching", "weight"),
    )

    def __init__(self, request: Request, by: Component) -> None:
        self.request = request
        self._by = by
        self.id, self.user, self.arrived = request.id, request.user, request.received
        self.weight, self.priority = request.weight, request.priority
        self.cost = 1.0
        """Estimated seconds of its run."""
        self.exclusive = False
        """True once a shared forward pass did not answer it."""
        self.steps = Steps(request, by.value)
        self.state: Status | None = None
        # A replica gets the request only now, but the client has waited since it submitted the request.
        self.since = time.time() if by is Component.REPLICA else request.received
        """Unix time at which it entered its state; initially, the time of its receipt."""
        self.losses = request.attempts
        """Runs that were cut short because their replica or the server failed."""
        self.cancelled: str | None = None
        """Reason to end the request, once it was cancelled."""
        self.runner: RequestRunner | None = None
        """The replica, or the place in one, that runs it now."""
        self.run_since = 0.0
        """Event-loop time at which its last run began."""
        self.watching: asyncio.Task[None] | None = None
        """The watch over its live client."""
        self.dispatched: float | None = None
        """Unix time at which it was last sent to a replica."""
        self.running: float | None = None
        """Unix time at which its block began on that replica, if this process was notified."""
        self.unanswered_s = 0.0
        """Seconds of runs that ended without a response, for which the user is charged."""
        self.end: Response | None = None
        """Terminal response, perhaps not delivered yet."""
        self.over = asyncio.Event()
        if by is Component.QUEUE and request.began:
            # The gateway recorded this step, and passes it on with the request.
            self.steps.extend([Step("receive", GATEWAY, request.began, request.received)])

    @property
    def is_held(self) -> bool:
        """Return True if the request waits or runs."""
        return self.state in HELD

    @property
    def is_live(self) -> bool:
        """Return True if its client waits on a channel; False if it polls."""
        return self.request.subscription_id is not None

    def move(self, event: JobEvent) -> None:
        """Change the state by an event; raise an `IllegalTransitionError` if that may not happen now."""
        before, self.state = self.state, next_state(self.state, event, self._by)
        if self.state is before:
            return
        now = time.time()
        if self.state is Status.RUNNING:
            self.running = now
        left = Status.RECEIVED if before is None else before
        if self._by is Component.QUEUE:
            metrics.status_left(self.request, left, max(0.0, now - self.since))
        if before is not None or self._by is Component.QUEUE:
            self.steps.add(left.value.lower(), self.since, now)
        self.since = now

    def follow(self, status: Status) -> bool:
        """Move to a reported status; return False if the request is past it."""
        event = _REPORTS.get(status)
        if event is None:  # DISPATCHED, LOG and STREAM change no state
            return self.state in RUNS
        if self.state not in TRANSITIONS[event].sources:
            return False
        self.move(event)
        return True

    def finish(self, response: Response) -> bool:
        """Move to the state of a terminal response; return False if the request has ended already."""
        if not self.is_held:
            return False
        self.move(_ENDS[response.status])
        self.end = response
        self.steps.extend(response.steps)
        return True

    def ran_s(self) -> float:
        """Return the seconds since its block began to run, or at least was sent to a replica."""
        began = self.dispatched if self.running is None else self.running
        return 0.0 if began is None else max(0.0, time.time() - began)

    def update(self) -> Response | None:
        """Return its current update if a replica has it; None if it waits or has ended."""
        if self.state not in RUNS:
            return None
        status = Status.RUNNING if self.state is Status.RUNNING else Status.DISPATCHED
        return Response(self.id, status, "Your job is with a replica.")

    def steps_now(self) -> tuple[Step, ...]:
        """Return its steps up to now, the present state among them."""
        name = "" if self.state is None else self.state.value.lower()
        return (*self.steps.all, Step(name, self._by.value, self.since, time.time()))

    def record(self, response: Response | None) -> JobRecord:
        """Return the record of a request that has ended; without a response its status is ENDED."""
        request = self.request
        status, reason = "ENDED", ""
        if response is not None:
            status = response.status.value
            if response.status is Status.ERROR and response.description in (
                self.cancelled,
                CLIENT_LEFT,
            ):
                status, reason = CANCELLED, response.description
        return JobRecord(
            id=request.id,
            user=request.user,
            key=request.key,
            model=request.model.label,
            generation=request.generation,
            status=status,
            received=request.received,
            dispatched=self.dispatched,
            ended=time.time(),
            execution_s=self.unanswered_s + (0.0 if response is None else response.execution_s),
            result_bytes=0 if response is None else response.result_bytes,
            steps=self.steps.all,
            traceparent=request.traceparent,
            reason=reason,
        )


def describe(record: JobRecord) -> str:
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
