"""One update of a request, before it is encoded for a wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ndif.schema.status import Status
from ndif.schema.step import Step


class InlineResult(msgspec.Struct, frozen=True, tag="inline"):
    """A result within the response: the runner's opaque bytes."""

    content: bytes
    compressed: bool


class StoredResult(msgspec.Struct, frozen=True, tag="stored"):
    """A result that the client downloads."""

    url: str
    size: int
    """Size of the download in bytes."""


@dataclass(frozen=True, slots=True)
class Response:
    """A status of request `id`, with its data."""

    id: str
    status: Status
    description: str = ""
    data: InlineResult | StoredResult | bytes | None = None
    """With COMPLETED, the result; with STREAM, the bytes of the streamed function."""
    meta: Mapping[str, Any] | None = None
    """Cost of the run: `execution_time` in seconds, `peak_memory` in bytes."""
    result_bytes: int = 0
    """Size of the result as sent or downloaded."""
    delivered: bool = False
    """True if the process that made the response has already sent it to the client."""
    limit: str = ""
    """The limit that ended the run, for metrics; empty if none did. Clients do not receive it."""
    steps: tuple[Step, ...] = field(default=(), compare=False)
    """Steps that another process recorded, on a terminal response. Clients do not receive them."""

    @property
    def execution_s(self) -> float:
        """Return the seconds that the request ran; 0 if it did not run."""
        return float((self.meta or {}).get("execution_time", 0.0))

    @property
    def peak_memory(self) -> int:
        """Return the peak memory of the run in bytes; 0 if unknown."""
        return int((self.meta or {}).get("peak_memory", 0))
