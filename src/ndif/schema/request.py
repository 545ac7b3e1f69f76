"""A request: the fields that the client sends, and the fields that the server adds."""

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
    """The server's address for this client: scheme and host, without a path."""
    nearby: bool = False
    """True if the client is on this machine, where compression takes longer than it saves."""
    subscription_id: str | None = None
    """Id of the subscription on which the client waits; None for a polled job."""
    env: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the model for this request only, such as a PEFT adapter."""
    callback: str = ""
    """URL or e-mail address that receives the job's end, or with a prefix each status; empty for none."""
    user: str = ""
    """The user in fair scheduling: opaque, and not secret."""
    key: str = ""
    """Opaque digest of the API key that the server verified; empty without a key.

    Requests with equal keys may run in one process. The digest never stands for an address.
    """
    weight: float = 1.0
    """The user's share of the model relative to other users."""
    priority: bool = False
    """True if the request is served before others of its age."""
    hotswapping: bool = False
    """True if the user may load a model on demand."""
    trusted: bool = False
    """True if the code may run unconfined. The server decides; a client cannot request it."""
    gated: bool = False
    """True if the user may load a model that the hub does not give to everyone."""
    max_result_bytes: int | None = None
    """Maximum size of the result, in addition to the server's limit; None for no other."""
    max_stored_bytes: int | None = None
    """Maximum size of the user's stored results, in addition to the server's limits; None for no other."""
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    received: float = field(default_factory=time.time)
    """Unix time at which the whole request had arrived."""
    began: float = 0.0
    """Unix time at which the HTTP request began; 0 if unknown."""
    traceparent: str = ""
    """The W3C Trace Context `traceparent` of the client's request; empty without one."""
    attempts: int = field(default=0, compare=False)
    """Number of runs that ended with a server, before this process claimed the request."""
    receipt: str = field(default="", compare=False)
    """The broker's handle of the claim under which the request runs."""
    digest: str = field(default="", compare=False)
    """Digest of a payload that is sent through Redis; empty for any other payload."""
    refusal: str = field(default="", compare=False)
    """Error that ends a request without a valid signature; its other fields are then unverified."""

    @property
    def names_adapter(self) -> bool:
        """Return True if the request names a PEFT adapter."""
        return self.env.get("peft") is not None
