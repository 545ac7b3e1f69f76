"""The steps of a request: recorded for the record of its job, and logged as they end.

Each process records its own steps, and passes them on at the request's end. The leader keeps them in the
job's record, for `ndif trace` and for a store of traces.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from ndif.schema.request import Request
from ndif.schema.step import REPLICA, Step

_log = logging.getLogger("ndif.steps")
"""Logger of one event for each step; `logs.configure` enables it."""
if _log.level == logging.NOTSET:
    _log.setLevel(logging.WARNING)

_MAX_STEPS, _FIRST_STEPS = 60, 20
_DIGITS = 12
"""Digits of the digest that identifies a key: `ndif keys list --json` shows it as `account`."""


class Steps:
    """The steps of one request in this process, in the order of their ends.

    A request that is sent to many replicas keeps only its first and its last steps.
    """

    def __init__(self, request: Request, by: str) -> None:
        """Start without steps; `by` is the part of the server that performs them."""
        self.by = by
        self.replica = ""
        """Id of the replica to which the request was last sent."""
        self._request = request
        self._steps: list[Step] = []

    def add(self, name: str, start: float, end: float | None = None) -> None:
        """Record and log a step of this part that ended at `end`, by default now."""
        self.record(Step(name, self.by, start, time.time() if end is None else end))

    def record(self, step: Step) -> None:
        """Record and log a step of any part of the server; a part without a log reports its steps here."""
        self.extend([step])
        log(self._request, step, self.replica)

    def extend(self, steps: Iterable[Step]) -> None:
        """Record steps without logging them, because another process has logged them."""
        self._steps += steps
        if len(self._steps) > _MAX_STEPS:
            del self._steps[_FIRST_STEPS : len(self._steps) - _MAX_STEPS + _FIRST_STEPS]

    @property
    def all(self) -> tuple[Step, ...]:
        """Return the steps so far."""
        return tuple(self._steps)


def log(request: Request, step: Step, replica: str) -> None:
    """Log one step of a request with the request's fields, the part of the server and the replica."""
    if not _log.isEnabledFor(logging.INFO):
        return
    fields = fields_of(request)
    fields |= {"step": step.name, "by": step.by, "duration_s": round(step.took_s, 6)}
    if replica:
        fields["replica"] = replica
    _log.info("job %s: %s took %.3f s", request.id, step.name, step.took_s, extra=fields)


def fields_of(request: Request) -> dict[str, Any]:
    """Return the fields that identify a request in a log event. `account` abbreviates the key's digest."""
    return {
        "job": request.id,
        "model": request.model.repo_id,
        "nnsight": request.generation,
        "account": request.key[:_DIGITS],
    }


_current: ContextVar[Steps | None] = ContextVar("steps", default=None)


@contextlib.contextmanager
def recording(steps: Steps) -> Iterator[Steps]:
    """Make `step` record into `steps` in this block, and in the tasks that the block starts."""
    token = _current.set(steps)
    try:
        yield steps
    finally:
        _current.reset(token)


def current() -> Steps | None:
    """Return the steps of the request that this task serves; None if it serves none."""
    return _current.get()


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Record this block as a replica's step of the current request, even if the block fails."""
    start = time.time()
    try:
        yield
    finally:
        if (steps := _current.get()) is not None:
            steps.record(Step(name, REPLICA, start, time.time()))
