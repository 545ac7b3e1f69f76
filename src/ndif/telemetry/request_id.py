"""The id of an HTTP request or WebSocket, in its response and in every line that is logged for it.

A request's id is not a job's id. A job has many requests: one submits the job, others ask for its result.
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
"""Header in which a client may set the id of its request, and in which the response returns the id."""
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s%(request)s: %(message)s"
"""Format of a line in a log."""
TERMINAL_FORMAT = "%(message)s%(request)s"
"""Format of a line in a terminal; the terminal's handler adds time and level."""

_VALID = re.compile(r"[A-Za-z0-9_.:-]{1,64}", re.ASCII)


class RequestId:
    """A request's id, and a flag that is False after the request's end."""

    def __init__(self, given: Sequence[str] = ()) -> None:
        """Use the id in `given`, the client's headers, if there is exactly one and it is valid."""
        self._given = given
        self.is_open = True

    @cached_property
    def text(self) -> str:
        """The client's id if it is valid, else a random one."""
        if len(self._given) == 1 and _VALID.fullmatch(self._given[0]):
            return self._given[0]
        return uuid.uuid4().hex


_current: ContextVar[RequestId | None] = ContextVar("request_id", default=None)


def name(request_id: RequestId) -> None:
    """Name a request in every line that this task, and tasks that it starts, log from now on."""
    _current.set(request_id)


@contextlib.contextmanager
def naming(request_id: RequestId) -> Iterator[RequestId]:
    """Name a request in every line that is logged in this block, and in the tasks that it starts."""
    token = _current.set(request_id)
    try:
        yield request_id
    finally:
        _current.reset(token)


def current() -> RequestId:
    """Return the id of the request that this task serves, or a new one."""
    return _current.get() or RequestId()


class NameRequest(logging.Filter):
    """A filter that passes every record and adds the request's id to it, for the formats above."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "request_id"):
            request = _current.get()
            # A task may outlive the request that started it, and go on for other requests.
            record.request_id = request.text if request is not None and request.is_open else ""
        text = vars(record)["request_id"]
        record.request = f" [{text}]" if text else ""
        return True


def name_requests(handlers: Sequence[logging.Handler] | None = None) -> None:
    """Add `NameRequest` to `handlers`, by default to all handlers of the root logger."""
    for handler in logging.getLogger().handlers if handlers is None else handlers:
        handler.addFilter(NameRequest())
