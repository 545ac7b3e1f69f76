"""The steps of a request: kept for the record of its job, and logged as they end.

Each process records its own, and hands them on with the request's end. The process that leads keeps
them with the record of the job, for `ndif trace` and for a store of traces.
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
"""One event for each step, where the log is JSON or of level DEBUG."""
if _log.level == logging.NOTSET:
    _log.setLevel(logging.WARNING)

_MOST, _FIRST = 60, 20
_DIGITS = 12
"""Of the digest under which a key's jobs are counted: `ndif keys list --json` has it as `account`."""


class Steps:
    """The steps of one request in this process, in the order of their ends.

    A request that is sent to many replicas keeps its first and its last steps.
    """

    def __init__(self, request: Request, by: str) -> None:
        """Begin with none; `by` is the part of the server that takes them."""
        self.by = by
        self.replica = ""
        """Id of the replica that was sent the request last."""
        self._request = request
        self._steps: list[Step] = []

    def add(self, name: str, start: float, end: float | None = None) -> None:
        """Record a step of this part that has ended, at `end` or now, and log it."""
        self.record(Step(name, self.by, start, time.time() if end is None else end))

    def record(self, step: Step) -> None:
        """Record a step that a part of the server took that has no log, and log it."""
        self.extend([step])
        log(self._request, step, self.replica)

    def extend(self, steps: Iterable[Step]) -> None:
        """Record what another process has recorded, and logged."""
        self._steps += steps
        if len(self._steps) > _MOST:
            del self._steps[_FIRST : len(self._steps) - _MOST + _FIRST]

    @property
    def all(self) -> tuple[Step, ...]:
        """Return the steps so far."""
        return tuple(self._steps)


def log(request: Request, step: Step, replica: str) -> None:
    """Log one step of a request, with what says whose and where it was."""
    if not _log.isEnabledFor(logging.INFO):
        return
    fields = fields_of(request)
    fields |= {"step": step.name, "by": step.by, "duration_s": round(step.took_s, 6)}
    if replica:
        fields["replica"] = replica
    _log.info("job %s: %s took %.3f s", request.id, step.name, step.took_s, extra=fields)


def fields_of(request: Request) -> dict[str, Any]:
    """Return the fields of an event that say which request it is about. No key leads back to its owner."""
    return {
        "job": request.id,
        "model": request.model.repo_id,
        "nnsight": request.generation,
        "account": request.key[:_DIGITS],
    }


_current: ContextVar[Steps | None] = ContextVar("steps", default=None)


@contextlib.contextmanager
def recording(steps: Steps) -> Iterator[Steps]:
    """Let `step` record into these in this block, and in the tasks that it starts."""
    token = _current.set(steps)
    try:
        yield steps
    finally:
        _current.reset(token)


def current() -> Steps | None:
    """Return where the steps of the request that is served here are recorded; None without one."""
    return _current.get()


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Record this block as a replica's step of the request that it serves, also if the block fails."""
    start = time.time()
    try:
        yield
    finally:
        if (steps := _current.get()) is not None:
            steps.record(Step(name, REPLICA, start, time.time()))
