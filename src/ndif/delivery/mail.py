"""E-mail, through the operator's SMTP server or Mailgun's HTTP API."""

from __future__ import annotations

import asyncio
from email.message import EmailMessage
from email.utils import formatdate, parseaddr
from http import HTTPStatus
from typing import Protocol
from urllib.parse import unquote, urlsplit

import aiosmtplib
import httpx

from ndif.config.settings import Settings
from ndif.delivery.loop import DeliveryError
from ndif.hostname import is_loopback
from ndif.tasks import in_own_task, within

_PERMANENT = 500
"""Lowest SMTP code of a permanent refusal."""
_RETRYABLE = {
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.TOO_MANY_REQUESTS,
}
"""Status codes of Mailgun after which a later attempt may succeed, perhaps once the operator acts."""


class Mailer(Protocol):
    """Sends mail from the server's own address."""

    sender: str

    async def send(self, message: EmailMessage) -> None:
        """Hand a message to the mail service, or raise a `DeliveryError`."""


def open_mailer(settings: Settings) -> Mailer | None:
    """Return the mailer that the settings name; None if the server sends no mail."""
    timeout_s = settings.callback_timeout_s
    if url := settings.smtp_url.get_secret_value():
        return SmtpMailer(url, settings.mail_from, timeout_s)
    if key := settings.mailgun_api_key.get_secret_value():
        sender = settings.mail_from or f"ndif@{settings.mailgun_domain}"
        return MailgunMailer(settings.mailgun_url, settings.mailgun_domain, key, sender, timeout_s)
    return None


def new_mail(
    sender: str, recipient: str, subject: str, name: str, text: str, now: float
) -> EmailMessage:
    """Return a mail from the server. `name` is unique to the mail and the same in every attempt."""
    message = EmailMessage()
    message["From"], message["To"] = sender, recipient
    message["Subject"] = subject
    message["Date"] = formatdate(now, usegmt=True)
    message["Auto-Submitted"] = "auto-generated"
    domain = parseaddr(sender)[1].rpartition("@")[2]
    # Mailboxes recognise a second copy by this id.
    message["Message-ID"] = f"<{name}@{domain}>"
    message.set_content(text)
    return message


class SmtpMailer:
    """Sends mail through one SMTP server: `smtps://` with TLS, `smtp://` with STARTTLS.

    Without TLS, a password is sent only to a server on this machine.
    """

    def __init__(self, url: str, sender: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        self.sender = sender
        self._host = parts.hostname or ""
        self._is_tls = parts.scheme == "smtps"
        self._port = parts.port
        self._user = unquote(parts.username) if parts.username else None
        self._password = unquote(parts.password) if parts.password else None
        self._timeout_s = timeout_s

    async def send(self, message: EmailMessage) -> None:
        needs_tls = self._user is not None and not is_loopback(self._host)
        try:
            await within(
                in_own_task(
                    aiosmtplib.send(
                        message,
                        hostname=self._host,
                        port=self._port,
                        username=self._user,
                        password=self._password,
                        use_tls=self._is_tls,
                        # None: use STARTTLS if the server offers it.
                        start_tls=True if needs_tls and not self._is_tls else None,
                        timeout=self._timeout_s,
                    )
                ),
                self._timeout_s,
            )
        except aiosmtplib.SMTPRecipientsRefused as error:
            codes = [refusal.code for refusal in error.recipients]
            final = all(code >= _PERMANENT for code in codes)
            raise DeliveryError("the mail server refuses the address", final=final) from error
        except aiosmtplib.SMTPAuthenticationError as error:
            raise DeliveryError("the mail server refuses NDIF_SMTP_URL's password") from error
        except (aiosmtplib.SMTPTimeoutError, asyncio.TimeoutError) as error:
            raise DeliveryError("the mail server does not answer in time") from error
        except aiosmtplib.SMTPResponseException as error:
            final = error.code >= _PERMANENT
            raise DeliveryError(f"the mail server answered {error.code}", final=final) from error
        except (aiosmtplib.SMTPException, OSError) as error:
            raise DeliveryError("the mail server cannot be reached") from error


class MailgunMailer:
    """Sends mail through Mailgun's API."""

    def __init__(self, url: str, domain: str, key: str, sender: str, timeout_s: float) -> None:
        self.sender = sender
        self._url = f"{url}/v3/{domain}/messages"
        self._auth = ("api", key)
        self._timeout_s = timeout_s

    async def send(self, message: EmailMessage) -> None:
        form = {
            "from": str(message["From"]),
            "to": str(message["To"]),
            "subject": str(message["Subject"]),
            "text": message.get_content(),
            "h:Message-Id": str(message["Message-ID"]),
            "h:Auto-Submitted": str(message["Auto-Submitted"]),
            "o:tracking": "no",
        }
        try:
            async with httpx.AsyncClient(timeout=self._timeout_s) as client:
                answer = await within(
                    client.post(self._url, data=form, auth=self._auth), self._timeout_s
                )
        except (httpx.HTTPError, asyncio.TimeoutError) as error:
            raise DeliveryError("Mailgun cannot be reached") from error
        if not answer.is_success:
            final = answer.is_client_error and answer.status_code not in _RETRYABLE
            raise DeliveryError(f"Mailgun answered {answer.status_code}", final=final)
