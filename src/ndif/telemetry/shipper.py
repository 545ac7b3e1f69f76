"""A queue in memory, and the thread that sends what is put into it to a store elsewhere."""

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
    """A store takes nothing at the moment; the same batch may be sent again."""


class RefusedBatchError(NdifError):
    """A store refuses a batch for good."""


@dataclass(frozen=True, slots=True)
class ShippingPolicy:
    """Limits of one `Shipper`. Sizes have the unit in which its items are measured."""

    max_waiting: int
    """Size of all items that wait, beyond which the oldest are dropped."""
    max_batch: int
    """Size at which a batch is full."""
    interval_s: float = 1.0
    """Longest time for which an item waits while the store takes what it is sent."""
    first_pause_s: float = 1.0
    """Seconds until a batch is sent again; doubled after each failure."""
    longest_pause_s: float = 30.0


class Shipper(Generic[Item]):
    """Sends items to a store, and makes nobody wait for it.

    Owns a queue of bounded size and one daemon thread, in which `send` is called with a batch. A batch that
    the store does not take at the moment (`UnavailableError`) is sent again after a pause, while the oldest
    items of a full queue make room for newer ones. A batch with which `send` fails otherwise is dropped.
    Dropped items are counted. The log has one line when a store begins to fail, and one when it recovers.
    """

    def __init__(
        self, destination: str, send: Callable[[Sequence[Item]], None], policy: ShippingPolicy
    ) -> None:
        """Start the thread. `destination` is the store's name in the log and in metrics."""
        self._destination = destination
        self._send = send
        self._policy = policy
        # Reentrant: a finalizer that logs may run in a thread that is in `put`.
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
        """Queue an item, from any thread; drop the oldest ones if there is no room."""
        with self._lock:
            self._waiting.append((item, size))
            self._size += size
            while self._size > self._policy.max_waiting:
                self._size -= self._waiting.popleft()[1]
                self._lost += 1

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what waits, for `timeout_s` at most, and stop."""
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
                item, of_it = self._waiting.popleft()
                batch.append(item)
                size += of_it
            self._size = self._size - size if self._waiting else 0
        return batch

    def _deliver(self, batch: Sequence[Item]) -> None:
        """Send a batch until it is taken or refused, or the shipper closes."""
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
                # The thread must go on, whatever one batch does to it.
                self._note_refusal(error)
                self._count_lost(len(batch))
                return
            else:
                self._note_success()
                return

    def _count_lost(self, more: int = 0) -> None:
        """Count the items that were dropped, here and not in `put`: the counter's lock is not reentrant."""
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
        # Of batches that are refused in between others, one line is enough.
        if not self._has_refused:
            self._has_refused = True
            expected = isinstance(error, RefusedBatchError)
            logger.warning(
                "%s refuses a batch, which is dropped, as later ones will be without a line here: %s",
                self._destination,
                error,
                exc_info=None if expected else error,
            )
