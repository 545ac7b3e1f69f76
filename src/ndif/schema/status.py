"""The statuses of a request, as clients receive them."""

from __future__ import annotations

from enum import Enum


class Status(str, Enum):
    """The status of a request. LOG and STREAM are messages during a run, not states."""

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
        """The status for clients of the header wire: QUEUED in place of a status that they do not know."""
        return Status.QUEUED if self in _UNKNOWN_ON_HEADER_WIRE else self


_UNKNOWN_ON_HEADER_WIRE = {Status.PROVISIONING, Status.DEPLOYING}
