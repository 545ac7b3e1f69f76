"""The record of a job that has ended: its cost, and for whom."""

from __future__ import annotations

from dataclasses import dataclass


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
    """COMPLETED or ERROR; ENDED where the process that ran it is gone."""
    received: float
    """Unix seconds, as all times here."""
    dispatched: float | None
    """Time of its last dispatch to a replica; None if it never was."""
    ended: float
    execution_s: float
    """Seconds that its block ran."""
    result_bytes: int
    """Size of its result, as it was sent or downloaded."""
