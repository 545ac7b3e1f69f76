"""The delivery loop: it sends messages, retries after growing pauses, and finally gives up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, Protocol, TypeVar

from ndif.stores.broker.port import BrokerError
from ndif.tasks import end, start

logger = logging.getLogger(__name__)

_POLL_S = 5.0
"""Maximum pause between two reads of the waiting messages."""
_RETRY_S = 2.0
_FIRST_WAIT_S = 0.2
_MAX_STEPS = 10
"""Failures after which pauses stop growing, even below `Policy.longest_s`."""
_DEFECT = "the server failed; its log says why"


class DeliveryError(Exception):
    """A failed delivery; its text is a clause, and quotes no content of the receiver's answer."""

    def __init__(self, problem: str, *, final: bool = False, wait_s: float = 0.0) -> None:
        """Create the error: `final` rules out a retry; the receiver asks for a pause of `wait_s`."""
        super().__init__(problem)
        self.final = final
        self.wait_s = wait_s


class Item(Protocol):
    """A message that waits for delivery."""

    @property
    def id(self) -> str:
        """Return the message's id; no two attempts of one id run at the same time."""

    @property
    def host(self) -> str:
        """Return the receiver; `Policy.to_one_host` limits its concurrent attempts."""

    @property
    def due(self) -> float:
        """Return the Unix time of the next attempt."""


T = TypeVar("T", bound=Item)


@dataclass(frozen=True, slots=True)
class Policy:
    """Retry policy. Each pause is `factor` times the previous pause, plus or minus the jitter."""

    max_attempts: float = 10
    """Attempts before a message is given up; if infinite, an unexpected exception gives it up too."""
    max_age_s: float = 24 * 3600.0
    first_s: float = 5.0
    factor: float = 3.0
    longest_s: float = 4 * 3600.0
    jitter: float = 0.25
    at_once: int = 16
    to_one_host: int = 2
    """Maximum number of concurrent attempts to one receiver."""

    def pause_s(
        self, attempts: int, age_s: float, chance: float, wait_s: float = 0.0
    ) -> float | None:
        """Return the seconds until the next attempt after `attempts` failures; None to give up.

        `chance` is a random number from 0 to 1. The receiver asks for a pause of `wait_s`.
        """
        pause_s = self.first_s * self.factor ** min(attempts - 1, _MAX_STEPS)
        pause_s = min(max(pause_s, wait_s), self.longest_s)
        pause_s *= 1 + self.jitter * (2 * chance - 1)
        is_over = attempts >= self.max_attempts or age_s + pause_s > self.max_age_s
        return None if is_over else pause_s


class Delivery(ABC, Generic[T]):
    """Delivery loop with retries; a subclass stores and sends the messages.

    A message is attempted until it is delivered or given up, so it may arrive twice. The store behind `due`
    is authoritative: if the process dies during an attempt, the next process repeats it. The methods of a
    subclass raise a `BrokerError` if their store fails.
    """

    name: str
    """Plural of the messages, for the log."""

    def __init__(self, policy: Policy, now: Callable[[], float] = time.time) -> None:
        """Create the loop; `run` delivers."""
        self._policy = policy
        self._now = now
        self._attempts: set[asyncio.Task[None]] = set()
        self._running: dict[str, str] = {}
        """Hosts of the running attempts, by message id."""
        self._changed = asyncio.Event()

    @abstractmethod
    def title(self, item: T) -> str:
        """Return the message's name for the log, without secrets."""

    @abstractmethod
    async def due(self, now: float, limit: int, busy: Collection[str] = ()) -> Sequence[T]:
        """Return messages due at `now`, the longest overdue first, except messages to hosts in `busy`."""

    @abstractmethod
    async def wait(self, seconds: float) -> None:
        """Return after `seconds`, or earlier if a message may have arrived."""

    @abstractmethod
    async def attempt(self, item: T) -> None:
        """Send a message and remove it from the store, or raise a `DeliveryError`."""

    @abstractmethod
    async def failed(self, item: T, error: DeliveryError) -> None:
        """Record a failed attempt; `pause_s` returns the pause before the next."""

    async def run(self) -> None:
        """Deliver until cancelled."""
        try:
            while True:
                try:
                    await self._pause(await self._start_due())
                except BrokerError as error:
                    logger.warning("%s wait: %s", self.name, error)
                    await asyncio.sleep(_RETRY_S)
        finally:
            await end(list(self._attempts))

    def pause_s(self, attempts: int, created: float, error: DeliveryError) -> float | None:
        """Return the pause after `attempts` failures, the last of them now; None to give up."""
        chance = random.random()  # noqa: S311 - no secret
        age_s = self._now() - created
        pause_s = self._policy.pause_s(attempts, age_s, chance, error.wait_s)
        return None if error.final else pause_s

    async def _start_due(self) -> float:
        """Start the attempts that are due, and return the seconds until the next is due."""
        now, wait_s = self._now(), _POLL_S
        # Copied before `due` reads: if an attempt ends meanwhile, its row is stale.
        running = frozenset(self._running)
        counts = Counter(self._running.values())
        busy = [host for host, count in counts.items() if count >= self._policy.to_one_host]
        free = self._policy.at_once - len(running)
        for item in await self.due(now + _POLL_S, 1 + free + len(running), busy):
            if item.id in running:
                continue
            if item.due <= now and free and counts[item.host] < self._policy.to_one_host:
                free -= 1
                counts[item.host] += 1
                self._running[item.id] = item.host
                start(self._attempt(item), self._attempts, self.title(item))
            else:
                wait_s = min(wait_s, max(item.due - now, _FIRST_WAIT_S))
        return wait_s

    async def _pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until a message has arrived or an attempt has ended."""
        waits = [
            asyncio.create_task(self.wait(seconds)),
            asyncio.create_task(self._changed.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end(waits)
        self._changed.clear()

    async def _attempt(self, item: T) -> None:
        title = self.title(item)
        try:
            try:
                await self.attempt(item)
            except DeliveryError as error:
                await self.failed(item, error)
        except BrokerError as error:
            logger.warning("%s may be delivered twice: %s", title, error)
            await asyncio.sleep(_RETRY_S)
        except Exception:
            logger.exception("%s failed", title)
            # Without a limit of attempts, the message would fail for ever and block the messages behind it.
            is_final = self._policy.max_attempts == inf
            with contextlib.suppress(BrokerError):
                await self.failed(item, DeliveryError(_DEFECT, final=is_final))
        finally:
            del self._running[item.id]
            self._changed.set()
