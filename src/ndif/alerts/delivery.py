"""Delivery of alerts to each destination: in order, with retries, and without blocking the caller."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import ssl
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from http import HTTPStatus
from math import inf
from urllib.parse import urlsplit

import httpx

from ndif.alerts import messages
from ndif.alerts.messages import Message
from ndif.config.settings import Settings
from ndif.config.units import format_duration
from ndif.delivery.loop import Delivery, DeliveryError, Policy
from ndif.delivery.mail import Mailer, open_mailer
from ndif.queue.callbacks.guard import shown
from ndif.schema.alerts import AlertDestination, Form, TestedAlertDestination
from ndif.schema.answer import JsonObject
from ndif.tasks import within

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
_MAX_WAITING = 100
"""Maximum messages that wait for one destination; the oldest are dropped."""
POLICY = Policy(
    max_attempts=inf, max_age_s=inf, longest_s=600.0, jitter=0.0, at_once=1000, to_one_host=1
)
"""Retry policy of alerts: in order, and until a message is too old."""
_MAX_AGE_S = 24 * 3600.0
"""Age in seconds at which a message is dropped as useless."""
_REFUSES_CONTENT = (400, 410, 413, 422)
"""Status codes at which a message is dropped; other codes may mean an address that can be corrected."""

Body = Callable[[Message], JsonObject]
FORMS: Mapping[Form, Body] = {
    "slack": messages.slack,
    "discord": messages.discord,
    "json": messages.plain_json,
}


class Destination(ABC):
    """A webhook or mailbox of the operator, and the queue of its messages."""

    def __init__(self, address: str, form: Form, shown: str) -> None:
        """Create the destination; `shown` is the part of the address that is not secret."""
        self.id = self.host = hashlib.sha256(address.encode()).hexdigest()[:16]
        """Digest of the address, the same in every process."""
        self.form = form
        self.shown = shown
        self.waiting: deque[Message] = deque(maxlen=_MAX_WAITING)
        self.attempted: Message | None = None
        self.problem: str | None = None
        """Reason why the last attempt failed; None if it succeeded."""
        self.attempts = 0
        """Failed attempts since the last success."""
        self.due = 0.0

    @abstractmethod
    async def send(self, message: Message) -> None:
        """Deliver a message, or raise a `DeliveryError`."""

    def remove_attempted(self) -> None:
        """Remove the message that was attempted, unless the full queue has dropped it already."""
        if self.waiting and self.waiting[0] is self.attempted:
            self.waiting.popleft()


class Webhook(Destination):
    """A URL to which messages are posted; any network is allowed, since the operator chose the URL."""

    def __init__(self, address: str) -> None:
        """Parse an address from the settings, which may have a prefix that names its form."""
        form, self._url = form_and_url(address)
        parts = urlsplit(self._url)
        port = "" if parts.port is None else f":{parts.port}"
        super().__init__(address, form, f"{parts.scheme}://{parts.hostname}{port}/…")

    async def send(self, message: Message) -> None:
        """See `Destination.send`. Redirects are not followed."""
        body = FORMS[self.form](message)
        try:
            answer = await within(self._answer(body), _TIMEOUT_S)
        except (asyncio.TimeoutError, httpx.TimeoutException) as error:
            limit = format_duration(_TIMEOUT_S)
            raise DeliveryError(f"it did not answer within {limit}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise DeliveryError("it cannot be reached") from error
        if answer.is_success:
            return
        problem = f"it answered {answer.status_code}"
        if answer.status_code == HTTPStatus.TOO_MANY_REQUESTS:
            wait_s = _seconds(answer.headers.get("retry-after", ""))
            raise DeliveryError(problem, wait_s=wait_s)
        raise DeliveryError(problem, final=answer.status_code in _REFUSES_CONTENT)

    async def _answer(self, body: JsonObject) -> httpx.Response:
        """Return the answer without reading its body."""
        tls = await asyncio.to_thread(_tls_context)
        async with (
            httpx.AsyncClient(verify=tls, timeout=_TIMEOUT_S) as client,
            client.stream("POST", self._url, json=body, headers={"User-Agent": "ndif"}) as answer,
        ):
            return answer


class Mailbox(Destination):
    """A mail address of the operator."""

    def __init__(self, mailer: Mailer, recipient: str, template: str) -> None:
        """Create the destination; `template` is the template of its mails."""
        super().__init__(recipient, "email", shown(recipient))
        self._mailer = mailer
        self._recipient = recipient
        self._template = template

    async def send(self, message: Message) -> None:
        mail = messages.mail(
            message, self._template, self._recipient, self._mailer.sender, time.time()
        )
        await self._mailer.send(mail)


def form_and_url(address: str) -> tuple[Form, str]:
    """Return the form of a webhook, from its prefix or its host, and its URL."""
    for form in FORMS:
        if address.startswith(f"{form}+"):
            return form, address.removeprefix(f"{form}+")
    parts = urlsplit(address)
    host = parts.hostname or ""
    if host == "hooks.slack.com" and not parts.path.startswith("/triggers/"):
        return "slack", address
    is_discord = host in ("discord.com", "discordapp.com") or host.endswith(".discord.com")
    if is_discord and parts.path.startswith("/api/"):
        return "discord", address
    return "json", address


def open_destinations(settings: Settings) -> list[Destination]:
    """Return the destinations that the settings name."""
    destinations: list[Destination] = [
        Webhook(address) for address in settings.alert_webhook_addresses
    ]
    mailer = open_mailer(settings)
    if mailer is not None and settings.alert_recipients:
        file = settings.alert_email_template
        template = messages.DEFAULT_TEMPLATE if file is None else file.read_text()
        destinations += [
            Mailbox(mailer, recipient, template) for recipient in settings.alert_recipients
        ]
    return destinations


class AlertDelivery(Delivery[Destination]):
    """Delivery whose items are the destinations that have messages.

    A destination receives its messages one at a time. `take` adds messages that an earlier process saved
    but did not deliver.
    """

    name = "alerts"

    def __init__(self, destinations: Sequence[Destination], policy: Policy = POLICY) -> None:
        super().__init__(policy)
        self.brought = asyncio.Event()
        """Set when a message was delivered or dropped."""
        self.destinations = destinations
        self._added = asyncio.Event()

    def send(self, message: Message) -> None:
        """Add a message for every destination; a full queue drops its oldest."""
        for destination in self.destinations:
            destination.waiting.append(message)
        self._added.set()

    async def try_each(self, message: Message) -> list[TestedAlertDestination]:
        """Send a message once to every destination now, and return the outcomes."""
        return await asyncio.gather(
            *(_test(destination, message) for destination in self.destinations)
        )

    def describe(self) -> list[AlertDestination]:
        """Return the destinations as operators see them."""
        return [
            AlertDestination(
                to=destination.shown,
                form=destination.form,
                waiting=len(destination.waiting),
                problem=destination.problem,
            )
            for destination in self.destinations
        ]

    def waiting(self) -> dict[str, tuple[Message, ...]]:
        """Return the waiting messages by the id of their destination."""
        return {
            destination.id: tuple(destination.waiting)
            for destination in self.destinations
            if destination.waiting
        }

    def take(self, waiting: Mapping[str, Sequence[Message]]) -> None:
        """Add the undelivered messages of an earlier process; drop messages to an unknown destination."""
        for destination in self.destinations:
            destination.waiting += waiting.get(destination.id, ())
        self._added.set()

    def title(self, item: Destination) -> str:
        return f"an alert to {item.shown}"

    async def due(self, now: float, limit: int, busy: Collection[str] = ()) -> list[Destination]:
        self._added.clear()
        ready = [
            destination
            for destination in self.destinations
            if destination.waiting and destination.due <= now
        ]
        return [destination for destination in ready if destination.host not in busy]

    async def wait(self, seconds: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await within(self._added.wait(), seconds)

    async def attempt(self, item: Destination) -> None:
        """See `Delivery.attempt`. A message that is too old is dropped."""
        message = item.attempted = item.waiting[0]
        if self._now() - message.at < _MAX_AGE_S:
            await item.send(message)
            if item.problem is not None:
                logger.warning("Alerts reach %s again", item.shown)
            item.problem = None
        item.attempts = 0
        item.remove_attempted()
        self.brought.set()

    async def failed(self, item: Destination, error: DeliveryError) -> None:
        """See `Delivery.failed`. Only the first failure since a success is logged."""
        if item.problem is None:
            logger.warning("Alerts do not reach %s: %s", item.shown, error)
        item.problem = str(error)
        item.attempts += 1
        pause_s = self.pause_s(item.attempts, 0.0, error)
        if pause_s is None:
            item.remove_attempted()
            self.brought.set()
        else:
            item.due = self._now() + pause_s


async def _test(destination: Destination, message: Message) -> TestedAlertDestination:
    problem = None
    try:
        await destination.send(message)
    except DeliveryError as error:
        problem = str(error)
    return TestedAlertDestination(to=destination.shown, form=destination.form, problem=problem)


@cache
def _tls_context() -> ssl.SSLContext:
    """Return the TLS context; call this in a thread, as loading the CA certificates takes a while."""
    return httpx.create_ssl_context()


def _seconds(text: str) -> float:
    """Return the seconds of a Retry-After header; 0 for a date or an invalid value."""
    try:
        return max(0.0, float(text))
    except ValueError:
        return 0.0
