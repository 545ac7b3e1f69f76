"""Delivery of callbacks: at least once each, with retries after failures until a callback is given up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from email.message import EmailMessage
from email.utils import formatdate

from ndif.config.settings import Settings
from ndif.config.units import format_duration
from ndif.delivery.loop import Delivery, DeliveryError, Policy
from ndif.delivery.mail import Mailer, new_mail, open_mailer
from ndif.queue.callbacks.guard import (
    CallbackAddressError,
    CallbackKind,
    CallbackRules,
    Network,
    read_address,
    shown,
)
from ndif.queue.callbacks.webhook import Webhooks
from ndif.schema.callback import Callback, Callbacks, ListedCallback
from ndif.stores.callbacks import CallbackQueue
from ndif.stores.objects import ObjectStore, ObjectStoreError
from ndif.stores.objects.port import end_key
from ndif.telemetry import metrics

logger = logging.getLogger(__name__)

_SWEEP_S = 600.0
_NO_END_S = 600.0
"""Seconds after which a callback is given up if its job has no stored end."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 15.0
_MAX_LISTED = 1000
_NO_MAIL = "this server sends no mail any more"


class CallbackDelivery(Delivery[Callback]):
    """The delivery of a queue's callbacks, in the leader.

    No order is kept: a receiver that fails delays its own callbacks and no others.
    """

    name = "webhooks and mails"

    def __init__(
        self,
        queue: CallbackQueue,
        objects: ObjectStore,
        webhooks: Webhooks,
        mailer: Mailer | None,
        allowed: Sequence[Network],
        policy: Policy,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Prepare; `run` delivers. `objects` has the ends of polled jobs."""
        super().__init__(policy, now)
        self.queue = queue
        self._objects = objects
        self._webhooks = webhooks
        self._mailer = mailer
        self._allowed = allowed
        self._swept = 0.0

    def close(self) -> None:
        """Release the resources that attempts share."""
        self._webhooks.close()

    async def describe(self) -> Callbacks:
        """Return the waiting and the given-up callbacks as operators see them."""
        waiting, dead = await self.queue.counts()
        listed = [_list_entry(callback) for callback in await self.queue.all(_MAX_LISTED)]
        return Callbacks(waiting=waiting, given_up=dead, callbacks=listed)

    async def retry(self, request_id: str | None) -> list[str]:
        """Make callbacks due now, with no attempts used, and return the ids of their requests.

        `request_id` is the beginning of an id; None selects all callbacks that were given up.
        """
        if request_id is None:
            callbacks = [
                callback for callback in await self.queue.all(_MAX_LISTED) if callback.dead
            ]
        else:
            callbacks = await self.queue.find(request_id)
        now = self._now()
        for callback in callbacks:
            renewed = replace(callback, created=now, due=now, attempts=0, dead=False)
            await self.queue.update(renewed)
        return [*dict.fromkeys(callback.request_id for callback in callbacks)]

    def title(self, item: Callback) -> str:
        return f"request {item.request_id}: its webhook or mail"

    async def due(self, now: float, limit: int, busy: Collection[str] = ()) -> list[Callback]:
        """See `Delivery.due`. Also forget callbacks that were given up long ago."""
        if self._now() - self._swept > _SWEEP_S:
            await self.queue.forget_dead(self._now() - self._policy.max_age_s * 7)
            self._swept = self._now()
        return await self.queue.due(now, limit, busy)

    async def wait(self, seconds: float) -> None:
        await self.queue.wait(seconds)

    async def attempt(self, item: Callback) -> None:
        """See `Delivery.attempt`. Nothing is sent before the end of a polled job is stored."""
        if item.polled and not await self._has_end(item):
            await self._wait_for_end(item)
            return
        await self._send(item)
        metrics.CALLBACKS.labels("delivered").inc()
        logger.info("%s is delivered", self.title(item))
        await self.queue.remove(item.id)

    async def failed(self, item: Callback, error: DeliveryError) -> None:
        attempts, problem = item.attempts + 1, str(error)
        pause_s = self.pause_s(attempts, item.created, error)
        is_over = pause_s is None
        metrics.CALLBACKS.labels("given_up" if is_over else "failed").inc()
        due = self._now() + (pause_s or 0.0)
        await self.queue.update(
            replace(item, attempts=attempts, problem=problem, due=due, dead=is_over)
        )
        outcome = "given up; `ndif callbacks` lists it"
        logger.warning(
            "request %s: attempt %d of its webhook or mail failed: %s; %s",
            *(item.request_id, attempts, problem),
            outcome if is_over else f"again in {format_duration(pause_s)}",
        )

    async def _send(self, callback: Callback) -> None:
        try:
            address = read_address(callback.address, self._allowed)
        except CallbackAddressError as error:
            raise DeliveryError("this server does not call its address", final=True) from error
        if address.kind is not CallbackKind.MAIL:
            await self._webhooks.send(callback, address)
        elif self._mailer is None:
            raise DeliveryError(_NO_MAIL)
        else:
            sender = self._mailer.sender
            await self._mailer.send(message_for(callback, address.mail, sender, self._now()))

    async def _has_end(self, callback: Callback) -> bool:
        """Return True if the end of the job is stored, so that the client finds it after the callback."""
        if callback.attempts:
            return True
        try:
            return await self._objects.get(end_key(callback.request_id)) is not None
        except ObjectStoreError:
            return False

    async def _wait_for_end(self, callback: Callback) -> None:
        """Check again later, or give up: the process that ended the job stores its end, or died before."""
        now = self._now()
        age_s = now - callback.created
        if age_s > _NO_END_S:
            problem = "the end of its job is not stored"
            await self.queue.update(replace(callback, due=now, problem=problem, dead=True))
        else:
            pause_s = min(max(age_s / 2, _FIRST_WAIT_S), _LONGEST_WAIT_S)
            await self.queue.update(replace(callback, due=now + pause_s))


def open_delivery(
    settings: Settings,
    queue: CallbackQueue,
    objects: ObjectStore,
    rules: CallbackRules,
) -> CallbackDelivery:
    """Return the delivery that the settings and `rules` describe."""
    webhooks = Webhooks(rules.networks, rules.secrets, settings.callback_timeout_s, time.time)
    return CallbackDelivery(
        queue,
        objects,
        webhooks,
        open_mailer(settings),
        rules.networks,
        Policy(settings.callback_attempts, settings.callback_max_age_s),
    )


def message_for(callback: Callback, recipient: str, sender: str, now: float) -> EmailMessage:
    """Return the mail about a job's end.

    The text contains nothing that the user's code wrote: otherwise users could make the server send
    arbitrary mail to anyone.
    """
    news, request_id = callback.content, callback.request_id
    lines = [
        f"Your job {request_id} has ended: {news.status}.",
        "",
        f"Model:    {news.model}",
        f"Received: {formatdate(news.times.received, usegmt=True)}",
        f"Ended:    {formatdate(news.times.ended, usegmt=True)}",
    ]
    if news.url is not None:
        lines += ["", f"Its answer, for your API key: {news.url}"]
    lines += ["", "You get this mail because the job named your address as its callback.", ""]
    subject = f"NDIF job {request_id[:8]}: {news.status}"
    return new_mail(sender, recipient, subject, request_id, "\n".join(lines), now)


def _list_entry(callback: Callback) -> ListedCallback:
    return ListedCallback(
        request_id=callback.request_id,
        to=shown(callback.address),
        status=callback.content.status,
        state="given up" if callback.dead else "waiting",
        attempts=callback.attempts,
        created=callback.created,
        due=callback.due,
        problem=callback.problem,
    )
