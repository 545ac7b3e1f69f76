"""The id of an HTTP request or WebSocket: in its answer, and in every line that is logged for it.

It is not the id of a job. A job has many requests: one that submits it, others that ask for its end.
"""

from __future__ import annotations

import contextlib
import logging
import re
import uuid
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from functools import cached_property

HEADER = "X-Request-Id"
"""Header in which a client may name its request, and in which it is told the name."""
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s%(request)s: %(message)s"
"""Format of a log's lines."""
TERMINAL_FORMAT = "%(message)s%(request)s"
"""Format of a line in a terminal, which shows time and level beside it."""

_SANE = re.compile(r"[A-Za-z0-9_.:-]{1,64}", re.ASCII)


class RequestId:
    """A request's id, for as long as the request is open."""

    def __init__(self, given: Sequence[str] = ()) -> None:
        """Take the client's own ids of the request: one that is sane is used."""
        self._given = given
        self.is_open = True

    @cached_property
    def text(self) -> str:
        """The id."""
        if len(self._given) == 1 and _SANE.fullmatch(self._given[0]):
            return self._given[0]
        return uuid.uuid4().hex


_current: ContextVar[RequestId | None] = ContextVar("request_id", default=None)


def name(request_id: RequestId) -> None:
    """Name a request in every line that this task and those that it starts log from now on."""
    _current.set(request_id)


@contextlib.contextmanager
def named(request_id: RequestId) -> Iterator[RequestId]:
    """Name a request in every line that is logged in this block, and in the tasks that it starts."""
    token = _current.set(request_id)
    try:
        yield request_id
    finally:
        _current.reset(token)


def current() -> RequestId:
    """Return the id of the request that is answered here, or a new one."""
    return _current.get() or RequestId()


class NameRequest(logging.Filter):
    """A filter that drops nothing, and adds the request's id to each record, for the formats above."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "request_id"):
            found = _current.get()
            # A task that a request has started may go on for others.
            record.request_id = found.text if found is not None and found.is_open else ""
        found_id = vars(record)["request_id"]
        record.request = f" [{found_id}]" if found_id else ""
        return True


def name_requests(handlers: Sequence[logging.Handler] | None = None) -> None:
    """Add `NameRequest` to these handlers; by default to all of the root logger."""
    for handler in logging.getLogger().handlers if handlers is None else handlers:
        handler.addFilter(NameRequest())
