"""A call-back: the news of a job's status, for the address that its client named."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from ndif.schema.answer import answer, from_plain
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status

_MAX_DESCRIPTION = 2000
"""Characters of a job's description that its call-back tells."""
POST = "post+"
"""Prefix of the URL of a webhook that wants the signed POST."""
EVERY = "every+"
"""Prefix, before that, of the URL of a webhook that wants every status, and not the end alone."""
_UNTOLD = frozenset({Status.RECEIVED, Status.LOG, Status.STREAM})
"""The answer to the client's own request, and messages that are no status."""


@dataclass(frozen=True, slots=True)
class Times:
    """Unix times of a job, in seconds."""

    received: float
    ended: float | None = None
    """None while the job has not ended."""


@dataclass(frozen=True, slots=True)
class News:
    """The status of a job, as the signed POST carries it."""

    id: str
    status: str
    model: str
    times: Times
    description: str
    url: str | None = None
    """Address of the job's answer; None for a job whose client waits for it."""

    def encode(self) -> bytes:
        """Return the JSON object, without fields that are None."""
        return json.dumps(asdict(self, dict_factory=_given)).encode()


@dataclass(frozen=True, slots=True)
class Callback:
    """One call-back that waits for its delivery, or that was given up."""

    request_id: str
    address: str
    """The URL or e-mail address, as the client wrote it."""
    content: News
    created: float
    """Unix seconds, from which the age counts."""
    due: float
    """Unix seconds of the next attempt; of the last one if the call-back was given up."""
    user: str = ""
    """The user whose job it is."""
    key: str = ""
    """Opaque digest of the API key whose secret signs; empty for a job without one."""
    is_end: bool = True
    """True for the news of the job's end."""
    polled: bool = True
    """True if nothing is delivered before the job's end is stored."""
    attempts: int = 0
    """Attempts that failed."""
    problem: str = ""
    """Clause that says why the last attempt failed."""
    dead: bool = False
    """True if the call-back was given up."""

    @property
    def id(self) -> str:
        """Return the id of the call-back: that of the request for its end, else with the status."""
        if self.is_end:
            return self.request_id
        return f"{self.request_id}_{self.content.status}"

    @property
    def host(self) -> str:
        """Return the host of a webhook in lower case; empty for an e-mail."""
        if "://" not in self.address:
            return ""
        try:
            return (urlsplit(self.address).hostname or "").lower()
        except ValueError:
            return ""

    def encode(self) -> bytes:
        """Return the call-back as bytes of a queue."""
        fields = asdict(self, dict_factory=_given)
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, content: bytes) -> Callback:
        """Return what `encode` wrote; raise a ValueError for anything else."""
        return from_plain(cls, json.loads(content))


def _given(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in fields if value is not None}


def is_notified(request: Request, status: Status) -> bool:
    """Return True if a request names an address that is told of this status."""
    if status.terminal:
        return bool(request.callback)
    return request.callback.lower().startswith(EVERY) and status not in _UNTOLD


def callback_for(request: Request, response: Response, now: float) -> Callback:
    """Return the call-back that tells of a request's response now."""
    is_end, polled = response.status.terminal, request.subscription_id is None
    content = News(
        request.id,
        response.status.value,
        request.model.repo_id,
        Times(round(request.received, 3), round(now, 3) if is_end else None),
        response.description[:_MAX_DESCRIPTION],
        f"{request.base_url}/response/{request.id}" if polled else None,
    )
    return Callback(
        request.id,
        request.callback,
        content,
        created=now,
        due=now,
        user=request.user,
        key=request.key,
        is_end=is_end,
        polled=polled and is_end,
    )


# As operators see them

_SOME_TIME = 1_785_000_000.0


@answer()
class ListedCallback:
    """A call-back that was not delivered yet."""

    request_id: str
    to: str
    """Address of the call-back, without what may be secret in it."""
    status: str
    """Status of the job that it tells of."""
    state: Literal["waiting", "given up"]
    attempts: int
    created: float
    due: float
    """Unix time of the next attempt; of the last one if it was given up."""
    problem: str
    """Reason for which the last attempt failed; empty if there was none."""


@answer(
    example={
        "waiting": 0,
        "given_up": 1,
        "callbacks": [
            {
                "request_id": "0d9ff6ea-2f0c-4b1f-8f4e-6c1d5a7b9e21",
                "to": "https://lab.example.org/…",
                "status": "COMPLETED",
                "state": "given up",
                "attempts": 12,
                "created": _SOME_TIME,
                "due": _SOME_TIME + 86_400,
                "problem": "it answered 500",
            }
        ],
    }
)
class Callbacks:
    """The call-backs that wait, and those that were given up; not more than some of many are listed."""

    waiting: int
    given_up: int
    callbacks: list[ListedCallback]
