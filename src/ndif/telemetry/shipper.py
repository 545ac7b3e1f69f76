"""A queue in memory, and a thread that sends its items to a remote store."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ndif.errors import NdifError
from ndif.telemetry import metrics

logger = logging.getLogger(__name__)

Item = TypeVar("Item")


class UnavailableError(NdifError):
    """A store is unavailable; the same batch may be sent again."""


class RefusedBatchError(NdifError):
    """A store refuses a batch, and would refuse it again."""


@dataclass(frozen=True, slots=True)
class ShippingPolicy:
    """Limits of one `Shipper`. Sizes have the unit of the `size` argument of `Shipper.put`."""

    max_waiting: int
    """Maximum size of all queued items; beyond it, the oldest items are dropped."""
    max_batch: int
    """Size at which a batch is full."""
    interval_s: float = 1.0
    """Maximum seconds that an item waits while the store is available."""
    first_pause_s: float = 1.0
    """Seconds until the first retry of a batch; the pause doubles after each failure."""
    longest_pause_s: float = 30.0


class Shipper(Generic[Item]):
    """Sends items to a store; `put` never waits for the store.

    Owns a queue of bounded size and one daemon thread, which calls `send` with batches. After an
    `UnavailableError` the thread sends the batch again after a pause; meanwhile a full queue drops its
    oldest items. After any other error the batch is dropped. Dropped items are counted. The log has one
    line when a store begins to fail, and one when it recovers.
    """

    def __init__(
        self, destination: str, send: Callable[[Sequence[Item]], None], policy: ShippingPolicy
    ) -> None:
        """Start the thread. `destination` is the store's name in the log and in metrics."""
        self._destination = destination
        self._send = send
        self._policy = policy
        # Reentrant: a finalizer that logs may interrupt a thread inside `put`.
        self._lock = threading.RLock()
        self._waiting: deque[tuple[Item, int]] = deque()
        self._size = 0
        self._lost = 0
        self._fails = False
        self._has_refused = False
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"ship to {destination}", daemon=True
        )
        self._thread.start()

    @property
    def thread_id(self) -> int | None:
        """Return the id of the thread that sends."""
        return self._thread.ident

    def put(self, item: Item, size: int = 1) -> None:
        """Queue an item, from any thread; drop the oldest items if the queue is full."""
        with self._lock:
            self._waiting.append((item, size))
            self._size += size
            while self._size > self._policy.max_waiting:
                self._size -= self._waiting.popleft()[1]
                self._lost += 1

    def close(self, timeout_s: float = 2.0) -> None:
        """Send the queued items, for `timeout_s` at most, and stop."""
        self._closing.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("The last items for %s were not sent in time", self._destination)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(self._policy.interval_s)
            self._count_lost()
            while batch := self._take():
                self._deliver(batch)
                self._count_lost()

    def _take(self) -> list[Item]:
        batch: list[Item] = []
        size = 0
        with self._lock:
            while self._waiting and size < self._policy.max_batch:
                item, item_size = self._waiting.popleft()
                batch.append(item)
                size += item_size
            self._size = self._size - size if self._waiting else 0
        return batch

    def _deliver(self, batch: Sequence[Item]) -> None:
        """Send a batch until the store accepts or refuses it, or the shipper closes."""
        pause_s = self._policy.first_pause_s
        while True:
            is_last = self._closing.is_set()
            try:
                self._send(batch)
            except UnavailableError as error:
                self._note_failure(error)
                if is_last:
                    self._count_lost(len(batch))
                    return
                self._count_lost()
                self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, self._policy.longest_pause_s)
            except Exception as error:
                # The thread must survive any error of one batch.
                self._note_refusal(error)
                self._count_lost(len(batch))
                return
            else:
                self._note_success()
                return

    def _count_lost(self, more: int = 0) -> None:
        """Count the dropped items. `put` cannot count them, because the counter's lock is not reentrant."""
        with self._lock:
            lost, self._lost = self._lost + more, 0
        if lost:
            metrics.LOST.labels(self._destination).inc(lost)

    def _note_failure(self, error: UnavailableError) -> None:
        if not self._fails:
            self._fails = True
            logger.warning("%s fails, and is tried again: %s", self._destination, error)

    def _note_success(self) -> None:
        if self._fails:
            self._fails = False
            logger.info("%s works again", self._destination)

    def _note_refusal(self, error: Exception) -> None:
        # Refused batches may alternate with accepted ones; only the first refusal is logged.
        if not self._has_refused:
            self._has_refused = True
            expected = isinstance(error, RefusedBatchError)
            logger.warning(
                "%s refuses a batch, which is dropped. Later refusals are not logged: %s",
                self._destination,
                error,
                exc_info=None if expected else error,
            )
