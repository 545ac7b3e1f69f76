"""A request, once the gateway has read everything in it that is not the user's payload."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ndif.schema.model_key import ModelKey


class Wire(str, Enum):
    """Which of the two client protocols a request came by."""

    ENVELOPE = "envelope"
    """nnsight 0.8: WebSocket and a multipart body with a JSON envelope."""
    HEADERS = "headers"
    """nnsight 0.6 and 0.7: Socket.IO and the envelope in HTTP headers."""


@dataclass(frozen=True, slots=True)
class Request:
    """One accepted trace. `payload` stays opaque outside a runner."""

    model: ModelKey
    generation: str
    """The nnsight generation that wrote the payload: "0.8"."""
    wire: Wire
    payload: bytes | bytearray
    compress: bool
    """Whether the payload is zstd and a fetched result must be."""
    base_url: str
    """How this client reaches the server: scheme and host, no path."""
    nearby: bool = False
    """Whether the client is on this machine, where bytes travel faster than they compress."""
    session: str | None = None
    """The live channel that waits; None for a job that is polled."""
    env: Mapping[str, Any] = field(default_factory=dict)
    """What the model must look like for this request alone (a PEFT adapter)."""
    callback: str = ""
    user: str = ""
    """Whose it is, for all to have their turns: opaque, and no secret."""
    key: str = ""
    """Opaque digest of the API key that the server verified; empty where there is none.

    Requests with equal keys may run in one process. It never stands for an address.
    """
    weight: float = 1.0
    """Its user's share of the model beside others."""
    priority: bool = False
    """Whether it goes before others of its age."""
    hotswapping: bool = False
    """Whether its user may have a model loaded on demand."""
    trusted: bool = False
    """Whether its code may run unconfined: the server's word, which no client can give."""
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    received: float = field(default_factory=time.time)
    """Unix seconds."""
    receipt: str = field(default="", compare=False)
    """By which a broker knows whoever claimed it."""
