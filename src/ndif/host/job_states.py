"""The states of a request, and the events between them.

`TRANSITIONS` says which event takes a request from which states to which state, who may cause the event and
what is stored by then. `ndif.host.lifecycle` performs the events of every process that holds requests,
`ndif.queue.lifecycle` those that are the queue's alone.
"""

from __future__ import annotations

from collections.abc import Set
from enum import Enum
from typing import NamedTuple

from ndif.schema.status import Status


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
HELD = WAITING | RUNS
"""States of a request that has not ended."""
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
    Event.GIVE_BACK: Transition(HELD, Status.QUEUED, _HOLDERS, None),
    Event.COMPLETE: Transition(RUNS, Status.COMPLETED, _HOLDERS, Stored.END),
    Event.FAIL: Transition(HELD, Status.ERROR, _HOLDERS, Stored.END),
    # Another process has stored the end: this one lets go.
    Event.RELEASE: Transition(HELD, None, _HOLDERS, Stored.RELEASED),
}

REPORTS = {
    Status.QUEUED: Event.WAIT,
    Status.PROVISIONING: Event.PROVISION,
    Status.DEPLOYING: Event.DEPLOY,
    Status.RUNNING: Event.START,
}
"""The event that each reported status is."""
ENDS = {Status.COMPLETED: Event.COMPLETE, Status.ERROR: Event.FAIL}
"""The event that each terminal status is."""


class IllegalTransitionError(Exception):
    """An event that cannot happen in a request's state, or that its party may not cause."""


def next_state(state: Status | None, event: Event, by: Party) -> Status | None:
    """Return the state after an event; raise if `by` may not cause the event, or not in this state."""
    transition = TRANSITIONS[event]
    if by not in transition.by or state not in transition.sources:
        found = state.value if state is not None else "unknown"
        raise IllegalTransitionError(f"{by.value}: {event.value} of a request that is {found}")
    return transition.target
