"""The states of a request, as clients are told them."""

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

    def __init__(self, value: str) -> None:
        self.terminal = value in ("COMPLETED", "ERROR")
        """True if no other status follows."""

    @property
    def on_header_wire(self) -> Status:
        """The status that clients of the header wire are told; they know only the earliest ones."""
        return Status.QUEUED if self in _UNKNOWN_ON_HEADER_WIRE else self


_UNKNOWN_ON_HEADER_WIRE = {Status.PROVISIONING, Status.DEPLOYING}
