"""The record of a job that has ended: its cost, and for whom."""

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
    """One job that has ended."""

    id: str
    user: str
    """Name under which its user takes turns."""
    key: str
    """Opaque digest of the API key that sent it; empty without one."""
    model: str
    """Repository, and the revision behind an `@` where one was named."""
    generation: str
    status: str
    """COMPLETED, ERROR or CANCELLED; ENDED where the process that ran it is gone."""
    received: float
    """Unix seconds, as all times here."""
    dispatched: float | None
    """Time of its last dispatch to a replica; None if it never was."""
    ended: float
    execution_s: float
    """Seconds that its block ran, to its end or until it was stopped."""
    result_bytes: int
    """Size of its result, as it was sent or downloaded."""
    steps: tuple[Step, ...] = ()
    """The steps of its life that its processes recorded."""
    traceparent: str = ""
    """The trace of which its client's request was a part, as W3C Trace Context has it; empty for none."""
    reason: str = ""
    """The sentence for which a CANCELLED job was ended; empty for others."""

    @property
    def is_error(self) -> bool:
        """Return True if the job failed."""
        return self.status not in NO_ERRORS

    def as_fields(self) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        # Named tuples are copied one by one otherwise.
        return {name: getattr(self, name) for name in _NAMES}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> JobRecord:
        """Return the record of which these are the fields; raise a TypeError if some are not a record's."""
        return cls(**{**fields, "steps": steps_from(fields.get("steps") or ())})


_NAMES = tuple(field.name for field in fields(JobRecord))
