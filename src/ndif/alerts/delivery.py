"""Delivery of alerts: to each destination in order, again after failures, and never in anybody's way."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx

from ndif.alerts import messages
from ndif.alerts.messages import Message
from ndif.config.settings import Settings
from ndif.config.units import format_duration
from ndif.queue.callbacks.guard import shown
from ndif.queue.callbacks.mail import Mailer, open_mailer
from ndif.queue.callbacks.webhook import DeliveryError
from ndif.tasks import end, within

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
_MOST_WAITING = 100
"""Messages that wait for one destination; the oldest make room."""
_FIRST_PAUSE_S, _FACTOR, _LONGEST_PAUSE_S = 5.0, 3.0, 600.0
_TOO_OLD_S = 24 * 3600.0
"""Age at which a message is dropped: nobody needs to know any more."""
_REFUSES_CONTENT = frozenset(
    (HTTPStatus.BAD_REQUEST, HTTPStatus.GONE, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
) | {HTTPStatus.UNPROCESSABLE_ENTITY}
"""Answers to one message that is not sent again; others may be of an address that the operator corrects."""

Body = Callable[[Message], dict[str, Any]]
FORMS: Mapping[str, Body] = {
    "slack": messages.slack,
    "discord": messages.discord,
    "json": messages.plain_json,
}


class AskedToWaitError(DeliveryError):
    """A destination takes no message for a time that it names."""

    def __init__(self, problem: str, seconds: float) -> None:
        """Say why, and for how long."""
        super().__init__(problem)
        self.seconds = seconds


class Destination(Protocol):
    """One webhook or mailbox of the operator's."""

    id: str
    """Digest of the address, by which another process knows it."""
    form: str
    shown: str
    """The address without what is secret in it."""

    async def send(self, message: Message) -> None:
        """Deliver a message, or raise a `DeliveryError`."""


class Webhook:
    """An address that messages are posted to. It is the operator's own, so that no network is refused."""

    def __init__(self, address: str) -> None:
        """Take an address as the settings have it, perhaps with a prefix that names its form."""
        self.form, self._url = form_and_url(address)
        self.id = _digest(address)
        parts = urlsplit(self._url)
        port = "" if parts.port is None else f":{parts.port}"
        self.shown = f"{parts.scheme}://{parts.hostname}{port}/…"

    async def send(self, message: Message) -> None:
        """See `Destination.send`. No redirect is followed."""
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
            raise AskedToWaitError(problem, _seconds(answer.headers.get("retry-after", "")))
        raise DeliveryError(problem, final=answer.status_code in _REFUSES_CONTENT)

    async def _answer(self, body: dict[str, Any]) -> httpx.Response:
        """Return the answer, of which no more than its headers is read."""
        tls = await asyncio.to_thread(_authorities)
        async with (
            httpx.AsyncClient(verify=tls, timeout=_TIMEOUT_S) as client,
            client.stream("POST", self._url, json=body, headers={"User-Agent": "ndif"}) as answer,
        ):
            return answer


class Mailbox:
    """A mail address of the operator's."""

    form = "email"

    def __init__(self, mailer: Mailer, recipient: str, template: str) -> None:
        """Send to `recipient`, through the mailer of call-backs."""
        self._mailer = mailer
        self._recipient = recipient
        self._template = template
        self.id = _digest(recipient)
        self.shown = shown(recipient)

    async def send(self, message: Message) -> None:
        """See `Destination.send`."""
        mail = messages.mail(
            message, self._template, self._recipient, self._mailer.sender, time.time()
        )
        await self._mailer.send(mail)


def form_and_url(address: str) -> tuple[str, str]:
    """Return the form of a webhook, by its prefix or its host, and its URL."""
    prefix, plus, rest = address.partition("+")
    if plus and prefix in FORMS:
        return prefix, rest
    parts = urlsplit(address)
    host = parts.hostname or ""
    if host == "hooks.slack.com" and not parts.path.startswith("/triggers/"):
        return "slack", address
    is_discord = host in ("discord.com", "discordapp.com") or host.endswith(".discord.com")
    if is_discord and parts.path.startswith("/api/"):
        return "discord", address
    return "json", address


def open_destinations(settings: Settings) -> list[Destination]:
    """Return everybody whom the settings name."""
    found: list[Destination] = [Webhook(each) for each in settings.alert_webhook_addresses]
    mailer = open_mailer(settings)
    if mailer is not None and settings.alert_recipients:
        file = settings.alert_email_template
        template = messages.DEFAULT_TEMPLATE if file is None else file.read_text()
        found += [Mailbox(mailer, each, template) for each in settings.alert_recipients]
    return found


@dataclass(eq=False)
class Courier:
    """Brings one destination its messages in order.

    Owns those that wait. A message that a dead process had not brought is taken from what it saved.
    """

    destination: Destination
    now: Callable[[], float]
    brought: asyncio.Event
    """Set when a message no longer waits."""

    def __post_init__(self) -> None:
        self.waiting: deque[Message] = deque()
        self.problem: str | None = None
        """Reason for which the last attempt failed; None if it did not."""
        self._added = asyncio.Event()

    def add(self, message: Message) -> None:
        """Take a message that is to be brought."""
        if len(self.waiting) >= _MOST_WAITING:
            self.waiting.popleft()
        self.waiting.append(message)
        self._added.set()

    async def run(self) -> None:
        """Bring messages until cancelled."""
        failures = 0
        while True:
            if not self.waiting:
                self._added.clear()
                await self._added.wait()
            message = self.waiting[0]
            try:
                if self.now() - message.at < _TOO_OLD_S:
                    await self.destination.send(message)
            except DeliveryError as error:
                self._failed(error)
                failures += 1
                if not error.final:
                    await asyncio.sleep(_pause_s(error, failures))
                    continue
            except Exception:
                # A defect of one message must not keep the next ones.
                logger.exception("an alert could not be sent to %s", self.destination.shown)
            else:
                failures = 0
                if self.problem is not None:
                    logger.warning("Alerts reach %s again", self.destination.shown)
                self.problem = None
            if self.waiting and self.waiting[0] is message:
                self.waiting.popleft()
            self.brought.set()

    def _failed(self, error: DeliveryError) -> None:
        if self.problem is None:  # one line, however often it fails
            logger.warning("Alerts do not reach %s: %s", self.destination.shown, error)
        self.problem = str(error)


def _pause_s(error: DeliveryError, failures: int) -> float:
    """Return the seconds until the next attempt, after so many that failed in a row."""
    asked_s = error.seconds if isinstance(error, AskedToWaitError) else 0.0
    pause_s = _FIRST_PAUSE_S * _FACTOR ** min(failures - 1, 10)
    return min(max(pause_s, asked_s), _LONGEST_PAUSE_S)


class Delivery:
    """Every destination and its courier."""

    def __init__(
        self, destinations: Sequence[Destination], now: Callable[[], float] = time.time
    ) -> None:
        """Prepare; `run` delivers."""
        self.brought = asyncio.Event()
        """Set when a message no longer waits."""
        self.couriers = [Courier(each, now, self.brought) for each in destinations]

    def send(self, message: Message) -> None:
        """Add a message for every destination."""
        for courier in self.couriers:
            courier.add(message)

    async def run(self) -> None:
        """Deliver until cancelled; what waits then is in `saved`."""
        tasks = [asyncio.create_task(each.run(), name="alerts") for each in self.couriers]
        try:
            await asyncio.gather(*tasks)
        finally:
            await end(tasks)

    async def try_each(self, message: Message) -> list[dict[str, Any]]:
        """Send a message to every destination now and once, and return what became of it."""
        return await asyncio.gather(*(_tried(each.destination, message) for each in self.couriers))

    def saved(self) -> dict[str, list[dict[str, Any]]]:
        """Return the messages that wait as JSON, by the id of their destination."""
        return {
            each.destination.id: [asdict(message) for message in each.waiting]
            for each in self.couriers
            if each.waiting
        }

    def take(self, saved: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Take the messages that a predecessor had not brought; those of others' addresses are dropped."""
        for courier in self.couriers:
            for each in saved.get(courier.destination.id, ()):
                courier.add(Message(**{**each, "lines": tuple(each["lines"])}))


async def _tried(destination: Destination, message: Message) -> dict[str, Any]:
    problem = None
    try:
        await destination.send(message)
    except DeliveryError as error:
        problem = str(error)
    return {"to": destination.shown, "form": destination.form, "problem": problem}


@cache
def _authorities() -> ssl.SSLContext:
    """Return the context of TLS; reading the authorities takes a while, in which no job should wait."""
    return httpx.create_ssl_context()


def _digest(address: str) -> str:
    return hashlib.sha256(address.encode()).hexdigest()[:16]


def _seconds(text: str) -> float:
    """Return the seconds of a header Retry-After; 0 for a date or nonsense."""
    try:
        return max(0.0, float(text))
    except ValueError:
        return 0.0
