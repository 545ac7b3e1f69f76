"""Where a request is in its life (specification, section 4.3; design, "Life of a request")."""

from __future__ import annotations

from enum import Enum


class Status(str, Enum):
    """A request's state; LOG and STREAM are messages in between, not states."""

    RECEIVED = "RECEIVED"
    QUEUED = "QUEUED"
    PROVISIONING = "PROVISIONING"
    DEPLOYING = "DEPLOYING"
    DISPATCHED = "DISPATCHED"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    ERROR = "ERROR"
    LOG = "LOG"
    STREAM = "STREAM"

    @property
    def terminal(self) -> bool:
        """Whether nothing follows it."""
        return self in (Status.COMPLETED, Status.ERROR)
