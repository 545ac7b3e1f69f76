"""Webhooks and mails that report a job's status to the address that its client named."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from ndif.hostname import HostName
from ndif.schema.answer import answer, from_plain
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status

_MAX_DESCRIPTION = 2000
"""Maximum number of characters of a job's description in a webhook or mail."""
POST = "post+"
"""Prefix of the URL of a webhook that gets the signed POST."""
EVERY_STATUS_PREFIX = "every+"
"""Prefix, before `POST`, of the URL of a webhook that gets every status, not only the end."""
_NEVER_SENT = frozenset({Status.RECEIVED, Status.LOG, Status.STREAM})
"""Statuses that are never sent: the answer to the client's own request, and messages."""


@dataclass(frozen=True, slots=True)
class Times:
    """Unix times of a job, in seconds."""

    received: float
    ended: float | None = None
    """None until the job has ended."""


@dataclass(frozen=True, slots=True)
class JobStatusReport:
    """The status of a job: the content of the signed POST."""

    id: str
    status: str
    model: str
    times: Times
    description: str
    url: str | None = None
    """Address of the job's response; None for a job whose client waits on a live channel."""

    def encode(self) -> bytes:
        """Return the JSON object, without fields that are None."""
        return json.dumps(asdict(self, dict_factory=_without_none)).encode()


@dataclass(frozen=True, slots=True)
class Callback:
    """A webhook or mail that waits for its delivery or was given up."""

    request_id: str
    address: str
    """The URL or e-mail address, as the client wrote it."""
    content: JobStatusReport
    created: float
    """Unix time from which the age counts."""
    due: float
    """Unix time of the next attempt; of the last one if the delivery was given up."""
    user: str = ""
    """The job's user."""
    key: str = ""
    """Opaque digest of the API key whose secret signs; empty for a job without a key."""
    is_end: bool = True
    """True if it reports the end of the job."""
    polled: bool = True
    """True if the job's end must be stored before the delivery."""
    attempts: int = 0
    """Attempts that failed."""
    problem: str = ""
    """Reason why the last attempt failed, as a clause; empty if none failed."""
    dead: bool = False
    """True if the delivery was given up."""

    @property
    def id(self) -> str:
        """Return the id: the request's id for the job's end, else the request's id and the status."""
        if self.is_end:
            return self.request_id
        return f"{self.request_id}_{self.content.status}"

    @property
    def host(self) -> str:
        """Return the host of a webhook in its normal form; empty for a mail or an invalid URL."""
        if "://" not in self.address:
            return ""
        try:
            return HostName.parse(urlsplit(self.address).hostname or "").text
        except ValueError:
            return ""

    def encode(self) -> bytes:
        """Return the JSON that a queue stores."""
        fields = asdict(self, dict_factory=_without_none)
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, content: bytes) -> Callback:
        """Return the object that `encode` wrote; raise a ValueError if the content is invalid."""
        return from_plain(cls, json.loads(content))


def _without_none(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in fields if value is not None}


def is_notified(request: Request, status: Status) -> bool:
    """Return True if a request names an address to which this status is sent."""
    if status.terminal:
        return bool(request.callback)
    return request.callback.lower().startswith(EVERY_STATUS_PREFIX) and status not in _NEVER_SENT


def callback_for(request: Request, response: Response, now: float) -> Callback:
    """Return the webhook or mail that reports a response, created and due at the Unix time `now`."""
    is_end, polled = response.status.terminal, request.subscription_id is None
    content = JobStatusReport(
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
    """A webhook or mail that is not delivered yet. Times are Unix seconds."""

    request_id: str
    to: str
    """Address without its secrets."""
    status: str
    """Status of the job that is reported."""
    state: Literal["waiting", "given up"]
    attempts: int
    created: float
    due: float
    """Unix time of the next attempt; of the last one if the delivery was given up."""
    problem: str
    """Reason why the last attempt failed; empty if none failed."""


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
    """Webhooks and mails that wait or were given up. The list may be shortened; the counts are complete."""

    waiting: int
    given_up: int
    callbacks: list[ListedCallback]
