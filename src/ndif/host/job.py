"""One request in a process that holds it, from its claim to its end."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import datetime, timezone

from ndif.host.job_states import ENDS, HELD, REPORTS, RUNS, TRANSITIONS, Event, Party, next_state
from ndif.host.port import RequestRunner
from ndif.schema.job_record import CANCELLED, JobRecord
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.schema.step import GATEWAY, Step
from ndif.telemetry import metrics
from ndif.telemetry.steps import Steps

LEFT = "The client left."
"""Reason for which a job ends whose live client is gone."""


class Job:
    """A request with its state, its turn in a queue, its steps, and the record of them.

    Only `move` changes the state, and only as `ndif.host.job_states` allows.
    """

    __slots__ = (
        *("__weakref__", "_by", "alone", "arrived", "cancelled", "cost", "dispatched", "end", "id"),
        *("losses", "over", "priority", "request", "run_since", "runner", "running", "since"),
        *("state", "steps", "unanswered_s", "user", "watching", "weight"),
    )

    def __init__(self, request: Request, by: Party) -> None:
        """Hold a request in the process of this party."""
        self.request = request
        self._by = by
        self.id, self.user = request.id, request.user
        self.weight, self.priority, self.arrived = (
            request.weight,
            request.priority,
            request.received,
        )
        self.cost = 1.0
        """Estimated seconds of its run."""
        self.alone = False
        """True once a forward pass that it was to share has not answered it."""
        self.steps = Steps(request, by.value)
        self.state: Status | None = None
        # A replica is sent the request now; its client has waited since it sent it.
        self.since = time.time() if by is Party.REPLICA else request.received
        """Unix seconds from which it is in this state; at first, of its receipt."""
        self.losses = request.attempts
        """Runs that were cut short because their replica failed, or the server."""
        self.cancelled: str | None = None
        """Reason to end the request, once it was cancelled."""
        self.runner: RequestRunner | None = None
        """The replica, or the place in one, that runs it now."""
        self.run_since = 0.0
        """Seconds of the event loop's clock at which its last run began."""
        self.watching: asyncio.Task[None] | None = None
        """The watch over its live client."""
        self.dispatched: float | None = None
        """Unix seconds of the last time that it was sent to a replica."""
        self.running: float | None = None
        """Unix seconds since which its block runs on that replica, as far as this process was told."""
        self.unanswered_s = 0.0
        """Seconds of runs that ended without a response, for which the user is charged."""
        self.end: Response | None = None
        """Terminal response, which may yet have to be delivered."""
        self.over = asyncio.Event()
        if by is Party.QUEUE and request.began:
            # The gateway has logged it, and hands it on with the request.
            self.steps.extend([Step("receive", GATEWAY, request.began, request.received)])

    @property
    def is_held(self) -> bool:
        """Return True if the request waits or runs."""
        return self.state in HELD

    @property
    def is_live(self) -> bool:
        """Return True if its client waits on a channel; False if it polls."""
        return self.request.subscription_id is not None

    def move(self, event: Event) -> None:
        """Change the state by an event; raise an `IllegalTransitionError` if that may not happen now."""
        before, self.state = self.state, next_state(self.state, event, self._by)
        if self.state is before:
            return
        now = time.time()
        if self.state is Status.RUNNING:
            self.running = now
        left = Status.RECEIVED if before is None else before
        if self._by is Party.QUEUE:
            metrics.status_left(self.request, left, max(0.0, now - self.since))
        if before is not None or self._by is Party.QUEUE:
            self.steps.add(left.value.lower(), self.since, now)
        self.since = now

    def follow(self, status: Status) -> bool:
        """Move to a reported status; return False if the request is past it."""
        event = REPORTS.get(status)
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
        self.move(ENDS[response.status])
        self.end = response
        self.steps.extend(response.steps)
        return True

    def ran_s(self) -> float:
        """Return the seconds since its block began to run, or at least was sent to a replica."""
        began = self.dispatched if self.running is None else self.running
        return 0.0 if began is None else max(0.0, time.time() - began)

    def update(self) -> Response | None:
        """Return its update as of now if a replica has it; None if it waits or has ended."""
        if self.state not in RUNS:
            return None
        status = Status.RUNNING if self.state is Status.RUNNING else Status.DISPATCHED
        return Response(self.id, status, "Your job is with a replica.")

    def steps_now(self) -> tuple[Step, ...]:
        """Return its steps up to now, the present state among them."""
        name = "" if self.state is None else self.state.value.lower()
        return (*self.steps.all, Step(name, self._by.value, self.since, time.time()))

    def record(self, response: Response | None) -> JobRecord:
        """Return the record of a request that has ended; without a response, nobody here knows how."""
        request = self.request
        status, reason = "ENDED", ""
        if response is not None:
            status = response.status.value
            if response.status is Status.ERROR and response.description in (self.cancelled, LEFT):
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
