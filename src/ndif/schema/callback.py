"""A call-back: the news of a job's status, for the address that its client named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

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
class Callback:
    """One call-back that waits for its delivery, or that was given up."""

    request_id: str
    address: str
    """The URL or e-mail address, as the client wrote it."""
    content: Mapping[str, Any]
    """The JSON object that the signed POST carries."""
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
        return f"{self.request_id}_{self.content['status']}"

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
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, content: bytes) -> Callback:
        """Return what `encode` wrote; raise a ValueError or TypeError for anything else."""
        return cls(**json.loads(content))


def is_told(request: Request, status: Status) -> bool:
    """Return True if a request names an address that is told of this status."""
    if status.terminal:
        return bool(request.callback)
    return request.callback.lower().startswith(EVERY) and status not in _UNTOLD


def callback_for(request: Request, response: Response, now: float) -> Callback:
    """Return the call-back that tells of a request's response now."""
    is_end, polled = response.status.terminal, request.subscription_id is None
    times = {"received": round(request.received, 3)}
    content = {
        "id": request.id,
        "status": response.status.value,
        "model": request.model.repo_id,
        "times": {**times, "ended": round(now, 3)} if is_end else times,
        "description": response.description[:_MAX_DESCRIPTION],
    }
    if polled:
        content["url"] = f"{request.base_url}/response/{request.id}"
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
