"""A call-back: the news of a job's end, for the address that its client named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from ndif.schema.request import Request
from ndif.schema.response import Response

_MAX_DESCRIPTION = 2000
"""Characters of a job's description that its call-back tells."""
POST = "post+"
"""Prefix of the URL of a webhook that wants the signed POST."""


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
    key: str = ""
    """Opaque digest of the API key whose secret signs; empty for a job without one."""
    polled: bool = True
    """True if nothing is delivered before the job's end is stored."""
    attempts: int = 0
    """Attempts that failed."""
    problem: str = ""
    """Clause that says why the last attempt failed."""
    dead: bool = False
    """True if the call-back was given up."""

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


def callback_for(request: Request, end: Response, now: float) -> Callback:
    """Return the call-back of a request that names an address and ends now."""
    content = {
        "id": request.id,
        "status": end.status.value,
        "model": request.model.repo_id,
        "times": {"received": round(request.received, 3), "ended": round(now, 3)},
        "description": end.description[:_MAX_DESCRIPTION],
    }
    polled = request.subscription_id is None
    if polled:
        content["url"] = f"{request.base_url}/response/{request.id}"
    return Callback(
        request.id, request.callback, content, created=now, due=now, key=request.key, polled=polled
    )
