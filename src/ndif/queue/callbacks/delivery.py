"""Delivery of call-backs: at least once each, again and later after a failure, and given up at last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ndif.config.settings import Settings
from ndif.config.units import format_duration
from ndif.queue.callbacks.guard import (
    CallbackAddressError,
    Kind,
    Network,
    read_address,
    shown,
)
from ndif.queue.callbacks.mail import Mailer, message_for, open_mailer
from ndif.queue.callbacks.webhook import DeliveryError, Webhooks
from ndif.schema.callback import Callback
from ndif.stores.broker.port import BrokerError
from ndif.stores.callbacks import CallbackQueue
from ndif.stores.objects import ObjectStore, ObjectStoreError
from ndif.stores.objects.port import end_key
from ndif.tasks import end, start
from ndif.telemetry import metrics

logger = logging.getLogger(__name__)

_AT_ONCE = 16
_TO_ONE_HOST = 2
_LOOK_S = 5.0
"""Longest pause between looks at the queue."""
_RETRY_S = 2.0
_SWEEP_S = 600.0
_NO_END_S = 600.0
"""Seconds after which a call-back is given up whose job has no stored end."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 15.0
_SHOWN = 1000
_NO_MAIL = "this server sends no mail any more"


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Times of repeated attempts: each pause is three times the one before, give or take a quarter."""

    max_attempts: int = 10
    max_age_s: float = 24 * 3600.0
    first_s: float = 5.0
    factor: float = 3.0
    longest_s: float = 4 * 3600.0
    jitter: float = 0.25

    def next_due(self, callback: Callback, now: float, chance: float) -> float | None:
        """Return the time of the next attempt after `callback.attempts` failures; None to give up.

        `chance` is a random number from 0 to 1.
        """
        if callback.attempts >= self.max_attempts:
            return None
        pause_s = min(self.first_s * self.factor ** (callback.attempts - 1), self.longest_s)
        due = now + pause_s * (1 + self.jitter * (2 * chance - 1))
        return due if due <= callback.created + self.max_age_s else None


class CallbackDelivery:
    """Deliver the call-backs of a queue, in the process that leads.

    Owns the attempts under way, of which one host gets few at once. What the queue says is the truth: an
    attempt that ends with the process is made again by the next one.
    """

    def __init__(
        self,
        queue: CallbackQueue,
        objects: ObjectStore,
        webhooks: Webhooks,
        mailer: Mailer | None,
        allowed: Sequence[Network],
        policy: RetryPolicy,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Prepare; `run` delivers. `objects` has the ends of the jobs that are polled."""
        self.queue = queue
        self._objects = objects
        self._webhooks = webhooks
        self._mailer = mailer
        self._allowed = allowed
        self._policy = policy
        self._now = now
        self._attempts: set[asyncio.Task[None]] = set()
        self._under_way: dict[str, str] = {}
        """Hosts of the attempts under way, by the id of the call-back."""
        self._over: set[str] = set()
        """Ids of the call-backs whose attempts ended since the queue was last asked."""
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Deliver until cancelled; attempts under way are then made again by the next process."""
        swept = 0.0
        try:
            while True:
                try:
                    if self._now() - swept > _SWEEP_S:
                        await self.queue.forget_dead(self._now() - self._policy.max_age_s * 7)
                        swept = self._now()
                    await self._start_due()
                    await self._pause()
                except BrokerError as error:
                    logger.warning("call-backs wait: %s", error)
                    await asyncio.sleep(_RETRY_S)
        finally:
            await end(list(self._attempts))

    def close(self) -> None:
        """Release what attempts share."""
        self._webhooks.close()

    async def describe(self) -> dict[str, Any]:
        """Return the waiting and the given-up call-backs as operators see them."""
        waiting, dead = await self.queue.counts()
        listed = [_described(each) for each in await self.queue.all(_SHOWN)]
        return {"waiting": waiting, "given_up": dead, "callbacks": listed}

    async def retry(self, request_id: str | None) -> list[str]:
        """Make call-backs due now with all of their attempts, and return their requests' ids.

        `request_id` is the beginning of one; None means all that were given up.
        """
        if request_id is None:
            found = [each for each in await self.queue.all(_SHOWN) if each.dead]
        else:
            found = await self.queue.find(request_id)
        now = self._now()
        for each in found:
            again = replace(each, created=now, due=now, attempts=0, dead=False)
            await self.queue.update(again)
        return [*dict.fromkeys(each.request_id for each in found)]

    async def _start_due(self) -> None:
        free = _AT_ONCE - len(self._attempts)
        if free <= 0:
            return
        counts = Counter(self._under_way.values())
        busy = [host for host, count in counts.items() if count >= _TO_ONE_HOST]
        self._over.clear()
        found = await self.queue.due(self._now(), free + len(self._under_way), busy)
        for callback in found:
            is_free = counts[callback.host] < _TO_ONE_HOST and len(self._attempts) < _AT_ONCE
            # An attempt may have ended after the queue was read, and before it is looked at here.
            is_taken = callback.id in self._under_way or callback.id in self._over
            if is_free and not is_taken:
                counts[callback.host] += 1
                self._under_way[callback.id] = callback.host
                name = f"call-back {callback.id}"
                start(self._attempt(callback), self._attempts, name)

    async def _pause(self) -> None:
        """Wait until a call-back may be due, or an attempt has ended."""
        waits = [
            asyncio.create_task(self.queue.wait(await self._pause_s())),
            asyncio.create_task(self._changed.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end(waits)
        self._changed.clear()

    async def _pause_s(self) -> float:
        """Return the seconds until the next call-back is due, of those that are not under way."""
        horizon = self._now() + _LOOK_S
        found = await self.queue.due(horizon, 1 + len(self._under_way), ())
        dues = [each.due for each in found if each.id not in self._under_way]
        # One that is due now waits for its host.
        return min((max(due - self._now(), _FIRST_WAIT_S) for due in dues), default=_LOOK_S)

    async def _attempt(self, callback: Callback) -> None:
        try:
            if not callback.polled or await self._has_end(callback):
                await self._deliver(callback)
            else:
                await self._wait_for_end(callback)
        except BrokerError as error:
            logger.warning(
                "request %s: its call-back may be made twice: %s", callback.request_id, error
            )
            await asyncio.sleep(_RETRY_S)
        except Exception:
            logger.exception("request %s: its call-back failed", callback.request_id)
            with contextlib.suppress(BrokerError):
                await self._failed(callback, DeliveryError("the server failed; its log says why"))
        finally:
            del self._under_way[callback.id]
            self._over.add(callback.id)
            self._changed.set()

    async def _has_end(self, callback: Callback) -> bool:
        """Return True if a client that is called back finds the end of its job."""
        if callback.attempts:
            return True
        try:
            return await self._objects.get(end_key(callback.request_id)) is not None
        except ObjectStoreError:
            return False

    async def _wait_for_end(self, callback: Callback) -> None:
        """Look again later: the process that ended the job stores its end, or died before."""
        now = self._now()
        age_s = now - callback.created
        if age_s > _NO_END_S:
            problem = "the end of its job is not stored"
            await self.queue.update(replace(callback, due=now, problem=problem, dead=True))
        else:
            pause_s = min(max(age_s / 2, _FIRST_WAIT_S), _LONGEST_WAIT_S)
            await self.queue.update(replace(callback, due=now + pause_s))

    async def _deliver(self, callback: Callback) -> None:
        try:
            await self._send(callback)
        except DeliveryError as error:
            await self._failed(callback, error)
        else:
            metrics.CALLBACKS.labels("delivered").inc()
            logger.info("request %s: its call-back is delivered", callback.request_id)
            await self.queue.remove(callback.id)

    async def _send(self, callback: Callback) -> None:
        try:
            address = read_address(callback.address, self._allowed)
        except CallbackAddressError as error:
            raise DeliveryError("its address is not one that is called", final=True) from error
        if address.kind is not Kind.MAIL:
            await self._webhooks.send(callback, address)
        elif self._mailer is None:
            raise DeliveryError(_NO_MAIL)
        else:
            sender = self._mailer.sender
            await self._mailer.send(message_for(callback, address.mail, sender, self._now()))

    async def _failed(self, callback: Callback, error: DeliveryError) -> None:
        now = self._now()
        failed = replace(callback, attempts=callback.attempts + 1, problem=str(error))
        chance = random.random()  # noqa: S311 - no secret
        due = None if error.final else self._policy.next_due(failed, now, chance)
        metrics.CALLBACKS.labels("given_up" if due is None else "failed").inc()
        if due is None:
            then = "given up; `ndif callbacks` lists it"
            await self.queue.update(replace(failed, due=now, dead=True))
        else:
            then = f"again in {format_duration(due - now)}"
            await self.queue.update(replace(failed, due=due))
        logger.warning(
            "request %s: attempt %d of its call-back failed: %s; %s",
            *(callback.request_id, failed.attempts, error, then),
        )


def open_delivery(
    settings: Settings,
    queue: CallbackQueue,
    objects: ObjectStore,
    secrets: Sequence[str],
    allowed: Sequence[Network],
) -> CallbackDelivery:
    """Return the delivery that the settings describe, to public addresses and `allowed` networks."""
    return CallbackDelivery(
        queue,
        objects,
        Webhooks(allowed, secrets, settings.callback_timeout_s, time.time),
        open_mailer(settings),
        allowed,
        RetryPolicy(settings.callback_attempts, settings.callback_max_age_s),
    )


def _described(callback: Callback) -> dict[str, Any]:
    return {
        "request_id": callback.request_id,
        "to": shown(callback.address),
        "status": callback.content["status"],
        "state": "given up" if callback.dead else "waiting",
        "attempts": callback.attempts,
        "created": callback.created,
        "due": callback.due,
        "problem": callback.problem,
    }
