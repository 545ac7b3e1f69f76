"""The record of an ended job: its user and its cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ndif.schema.step import Step, steps_from

CANCELLED = "CANCELLED"
"""Status of a job that was ended by its user, by an operator, or because its client left."""
NO_ERRORS = ("COMPLETED", CANCELLED)
"""Statuses of jobs that did not fail."""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One ended job. Times are Unix seconds."""

    id: str
    user: str
    """Name of its user in fair scheduling."""
    key: str
    """Opaque digest of the API key that sent it; empty without one."""
    model: str
    """Repository, followed by `@` and the revision if one was named."""
    generation: str
    status: str
    """COMPLETED, ERROR or CANCELLED; ENDED if the process that ran the job is gone."""
    received: float
    """Time at which the whole request had arrived."""
    dispatched: float | None
    """Time of its last dispatch to a replica; None if it was never dispatched."""
    ended: float
    execution_s: float
    """Seconds that its block ran until it ended or was stopped."""
    result_bytes: int
    """Size of its result as sent or downloaded."""
    steps: tuple[Step, ...] = ()
    """The steps that the server's processes recorded."""
    traceparent: str = ""
    """The W3C Trace Context `traceparent` of the client's request; empty without one."""
    reason: str = ""
    """The reason why a CANCELLED job was ended, as a sentence; empty for other jobs."""

    @property
    def is_error(self) -> bool:
        """Return True if the job failed."""
        return self.status not in NO_ERRORS

    def as_fields(self) -> dict[str, Any]:
        """Return the fields as JSON-serialisable values."""
        # `asdict` would copy every named tuple.
        return {name: getattr(self, name) for name in _NAMES}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> JobRecord:
        """Return the record with these fields; raise a TypeError for missing or unknown fields."""
        return cls(**{**fields, "steps": steps_from(fields.get("steps") or ())})


_NAMES = tuple(field.name for field in fields(JobRecord))
