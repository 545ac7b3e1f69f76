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
