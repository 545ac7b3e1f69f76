"""One update about a request, before a wire gives it its form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ndif.schema.status import Status
from ndif.schema.step import Step


class InlineResult(msgspec.Struct, frozen=True, tag="inline"):
    """A result that travels in the response: the runner's bytes, opaque."""

    content: bytes
    compressed: bool


class StoredResult(msgspec.Struct, frozen=True, tag="stored"):
    """A result that the client downloads."""

    url: str
    size: int
    """Bytes to download."""


@dataclass(frozen=True, slots=True)
class Response:
    """A status of request `id`, and the data that comes with it."""

    id: str
    status: Status
    description: str = ""
    data: InlineResult | StoredResult | bytes | None = None
    """A result on COMPLETED, the streamed function's bytes on STREAM."""
    meta: Mapping[str, Any] | None = None
    """The run's cost: `execution_time` in seconds, `peak_memory` in bytes."""
    result_bytes: int = 0
    """Size of the result, as it is sent or downloaded."""
    delivered: bool = False
    """True if the process that made the response has sent it to the client already."""
    limit: str = ""
    """The limit for which the run was ended, for metrics; empty if none was. No client has it."""
    steps: tuple[Step, ...] = field(default=(), compare=False)
    """Steps that another process recorded of the request, on its terminal response. No client has them."""

    @property
    def execution_s(self) -> float:
        """Return the run's seconds; 0 of a request that did not run."""
        return float((self.meta or {}).get("execution_time", 0.0))

    @property
    def peak_memory(self) -> int:
        """Return the run's peak memory in bytes; 0 where it is not known."""
        return int((self.meta or {}).get("peak_memory", 0))
