"""A request: the fields that its client sends, and those that the server adds."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ndif.schema.model_key import ModelKey
from ndif.schema.payload import Payload


class Wire(str, Enum):
    """The protocol between a client and the server."""

    ENVELOPE = "envelope"
    """nnsight 0.8: WebSocket and a multipart body with a JSON envelope."""
    HEADERS = "headers"
    """nnsight 0.6 and 0.7: Socket.IO and the envelope in HTTP headers."""


@dataclass(frozen=True, slots=True)
class Request:
    """One accepted trace. Only a runner reads its `payload`."""

    model: ModelKey
    generation: str
    """The nnsight generation that wrote the payload: "0.8"."""
    wire: Wire
    payload: Payload
    compress: bool
    """True if the payload is zstd and a downloaded result must be."""
    base_url: str
    """The server's address as this client knows it: scheme and host, no path."""
    nearby: bool = False
    """True if the client is on this machine, where bytes travel faster than they compress."""
    subscription_id: str | None = None
    """The id of the subscription on which the client waits; None for a job that is polled."""
    env: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the model for this request alone (a PEFT adapter)."""
    callback: str = ""
    """URL or e-mail address that is told when the job has ended; empty for none."""
    user: str = ""
    """The user who takes turns with others: opaque, and no secret."""
    key: str = ""
    """Opaque digest of the API key that the server verified; empty without one.

    Requests with equal keys may run in one process. It never stands for an address.
    """
    weight: float = 1.0
    """The user's share of the model beside others."""
    priority: bool = False
    """True if it goes before others of its age."""
    hotswapping: bool = False
    """True if its user may have a model loaded on demand."""
    trusted: bool = False
    """True if its code may run unconfined, which the server decides and no client can ask for."""
    gated: bool = False
    """True if its user may have a model loaded that the hub does not give to everybody."""
    max_result_bytes: int | None = None
    """Maximum size of its result beside the server's own limit; None: there is no other."""
    max_stored_bytes: int | None = None
    """Maximum size of its user's stored results beside the server's own limits; None: there is no other."""
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    received: float = field(default_factory=time.time)
    """Unix seconds at which all of it was there."""
    began: float = 0.0
    """Unix seconds at which its HTTP request began; 0 where that is not known."""
    traceparent: str = ""
    """The trace of which its client's request is a part, as W3C Trace Context has it; empty for none."""
    attempts: int = field(default=0, compare=False)
    """Runs that were cut short with the server, before this process claimed the request."""
    receipt: str = field(default="", compare=False)
    """The broker's handle of the claim under which this request runs."""
    digest: str = field(default="", compare=False)
    """Digest of a payload that travels through Redis; empty for one that does not."""
    refusal: str = field(default="", compare=False)
    """Sentence with which a request ends that nobody signed; its other fields are mere claims."""

    @property
    def names_adapter(self) -> bool:
        """Return True if the model is to run with a PEFT adapter for this request."""
        return self.env.get("peft") is not None
