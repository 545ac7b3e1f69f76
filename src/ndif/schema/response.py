"""One update about a request, before a wire gives it its form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ndif.schema.status import Status


@dataclass(frozen=True, slots=True)
class InlineResult:
    """A result that rides on the live channel: what the runner wrote, opaque."""

    content: bytes
    compressed: bool


@dataclass(frozen=True, slots=True)
class StoredResult:
    """A result that waits to be fetched."""

    url: str
    size: int
    """Bytes to download."""


@dataclass(frozen=True, slots=True)
class Response:
    """A status of request `id`, with what it carries."""

    id: str
    status: Status
    description: str = ""
    data: InlineResult | StoredResult | bytes | None = None
    """A result on COMPLETED, the streamed function's bytes on STREAM."""
    meta: Mapping[str, Any] | None = None
    """What the run cost: `execution_time` in seconds, `peak_memory` in bytes."""
    delivered: bool = False
    """Whether its client was told where it was made, so that nobody has to."""
