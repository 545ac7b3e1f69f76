"""Attempts: whether a request whose replica was lost runs again, and what its user is told if not."""

from __future__ import annotations

import logging
from collections import Counter

from ndif.host.port import ReplicaEvictedError, ReplicaLostError

logger = logging.getLogger(__name__)


class Attempts:
    """What is remembered of requests between one run and the next."""

    def __init__(self, most: int) -> None:
        """`most`: how often a request is run whose replica is lost."""
        self._most = most
        self._failed: Counter[str] = Counter()
        self._cancelled: dict[str, str] = {}

    def cancel(self, request_id: str, reason: str) -> None:
        """It is to end, and not to run again."""
        self._cancelled[request_id] = reason

    def cancelled(self, request_id: str) -> str | None:
        """Why it is to end, if it is."""
        return self._cancelled.get(request_id)

    def lost(self, request_id: str, error: ReplicaLostError) -> str | None:
        """Why it does not run again after its replica was lost; None where it does."""
        if (reason := self._cancelled.get(request_id)) is not None:
            return reason
        if isinstance(error, ReplicaEvictedError):
            logger.info("request %s: %s; it waits for another replica", request_id, error)
            return None
        self._failed[request_id] += 1
        if self._failed[request_id] < self._most:
            logger.warning("request %s: %s; it is tried again", request_id, error)
            return None
        times = "once" if self._most == 1 else f"{self._most} times"
        return (
            f"The model's process was lost {times} while it ran this job ({error}). "
            "It may need more memory than the server has."
        )

    def forget(self, request_id: str) -> None:
        """It has come to its end."""
        self._failed.pop(request_id, None)
        self._cancelled.pop(request_id, None)
