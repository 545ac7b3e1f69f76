"""Mail through a real SMTP server and through a stand-in for Mailgun's API."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
import subprocess
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult, Envelope, LoginPassword
from pydantic import ValidationError

from ndif.config.settings import Settings
from ndif.delivery.loop import DeliveryError
from ndif.delivery.mail import Mailer, MailgunMailer, open_mailer
from ndif.errors import problems
from ndif.queue.callbacks.delivery import message_for
from ndif.schema.callback import Callback, JobStatusReport, Times
from tests.on_loop import on_loop
from tests.queue.callbacks.receiver import receiving
from tests.services.process import free_port
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.process

REQUEST = "8f14e45f-ceea-467f-a8f5-0d1c9c6b2f10"
CONTENT = JobStatusReport(
    *(REQUEST, "COMPLETED", "org/name", Times(1000.0, 1001.0), ""),
    url="https://ndif.example.org/response/x",
)
CALLBACK = Callback(REQUEST, "ada@example.org", CONTENT, 0.0, 0.0)


class Post:
    """The handler of a mail server's messages."""

    def __init__(self) -> None:
        self.received: list[Envelope] = []
        self.answer = "250 OK"
        self.refused: dict[str, str] = {}

    async def handle_RCPT(  # noqa: N802 - aiosmtpd's name
        self, server: Any, session: Any, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        if address in self.refused:
            return self.refused[address]
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: Any, session: Any, envelope: Envelope) -> str:  # noqa: N802
        self.received.append(envelope)
        return self.answer


class Users:
    """The accounts of a mail server."""

    def __init__(self) -> None:
        self.asked: list[LoginPassword] = []

    def __call__(self, server: Any, session: Any, envelope: Any, how: str, data: Any) -> AuthResult:
        self.asked.append(data)
        is_valid = data == LoginPassword(b"ndif@example.org", b"p@ss/word")
        return AuthResult(success=is_valid, handled=is_valid)


@contextlib.contextmanager
def mail_server(post: Post, **options: Any) -> Iterator[int]:
    # The controller connects once to check that it serves.
    controller = Controller(post, hostname="127.0.0.1", port=free_port(), **options)
    controller.start()
    try:
        yield controller.port
    finally:
        controller.stop()


def mailer(url: str, **settings: Any) -> Mailer:
    settings = {"callback_timeout_s": PATIENCE_S, **settings}
    opened = open_mailer(Settings(smtp_url=url, mail_from="ndif@example.org", **settings))
    assert opened is not None
    return opened


async def send(opened: Mailer, recipient: str = "ada@example.org") -> None:
    await opened.send(message_for(CALLBACK, recipient, opened.sender, 1002.0))


async def problem(opened: Mailer, recipient: str = "ada@example.org") -> DeliveryError:
    with pytest.raises(DeliveryError) as failed:
        await send(opened, recipient)
    return failed.value


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a self-signed certificate for 127.0.0.1 and its key."""
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *(
                "-nodes",
                "-days",
                "2",
                "-subj",
                "/CN=mail",
                "-addext",
                "subjectAltName=IP:127.0.0.1",
            ),
            *("-keyout", str(folder / "key.pem"), "-out", str(folder / "certificate.pem")),
        ],
        check=True,
        capture_output=True,
    )
    return folder


def server_side(tls: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls / "certificate.pem", tls / "key.pem")
    return context


@on_loop
async def test_smtp_delivers_message() -> None:
    post = Post()
    with mail_server(post) as port:
        await send(mailer(f"smtp://127.0.0.1:{port}"))
    (envelope,) = post.received
    assert (envelope.mail_from, envelope.rcpt_tos) == ("ndif@example.org", ["ada@example.org"])
    assert isinstance(envelope.content, bytes)
    text = envelope.content.decode()
    assert "Subject: NDIF job 8f14e45f: COMPLETED" in text
    assert "https://ndif.example.org/response/x" in text


@on_loop
async def test_smtp_uses_starttls_and_password(tls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tls / "certificate.pem"))
    post, users = Post(), Users()
    options = {
        "tls_context": server_side(tls),
        "authenticator": users,
        "auth_required": True,
        "require_starttls": True,
    }
    with mail_server(post, **options) as port:
        await send(mailer(f"smtp://ndif%40example.org:p%40ss%2Fword@127.0.0.1:{port}"))
        wrong = await problem(mailer(f"smtp://ndif%40example.org:wrong@127.0.0.1:{port}"))
    assert len(post.received) == 1
    assert (str(wrong), wrong.final) == ("the mail server refuses NDIF_SMTP_URL's password", False)


@on_loop
async def test_smtps_requires_trusted_certificate(
    tls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    post = Post()
    with mail_server(post, ssl_context=server_side(tls), server_hostname="127.0.0.1") as port:
        url = f"smtps://127.0.0.1:{port}"
        assert str(await problem(mailer(url))) == "the mail server cannot be reached"
        monkeypatch.setenv("SSL_CERT_FILE", str(tls / "certificate.pem"))
        await send(mailer(url))
    assert len(post.received) == 1


@on_loop
async def test_password_is_not_sent_unencrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    post, users = Post(), Users()
    options = {"authenticator": users, "auth_require_tls": False}
    with mail_server(post, **options) as port:
        monkeypatch.setattr("ndif.delivery.mail.is_loopback", lambda host: False)
        elsewhere = mailer(f"smtp://ndif%40example.org:p%40ss%2Fword@127.0.0.1:{port}")
        assert str(await problem(elsewhere)) == "the mail server cannot be reached"
        assert users.asked == []
        monkeypatch.undo()
        await send(elsewhere)
    assert len(users.asked) == len(post.received) == 1


@pytest.mark.parametrize(
    ("answer", "final"), [("550 No such user", True), ("450 Try again later", False)]
)
@on_loop
async def test_refused_address_is_final_only_if_permanent(answer: str, final: bool) -> None:
    post = Post()
    post.refused["nobody@example.org"] = answer
    with mail_server(post) as port:
        error = await problem(mailer(f"smtp://127.0.0.1:{port}"), "nobody@example.org")
    assert (str(error), error.final) == ("the mail server refuses the address", final)


@pytest.mark.parametrize(("answer", "final"), [("554 Spam", True), ("451 Busy", False)])
@on_loop
async def test_refused_message_is_final_only_if_permanent(answer: str, final: bool) -> None:
    post = Post()
    post.answer = answer
    with mail_server(post) as port:
        error = await problem(mailer(f"smtp://127.0.0.1:{port}"))
    assert (str(error), error.final) == (f"the mail server answered {answer[:3]}", final)


@on_loop
async def test_silent_or_unreachable_mail_server_is_reported() -> None:
    silent = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    hasty = mailer(f"smtp://127.0.0.1:{port}", callback_timeout_s=0.2)
    assert str(await problem(hasty)) == "the mail server does not answer in time"
    silent.close()
    await silent.wait_closed()
    patient = mailer(f"smtp://127.0.0.1:{port}")
    assert str(await problem(patient)) == "the mail server cannot be reached"


# Mailgun


def mailgun(url: str, **settings: Any) -> Mailer:
    settings = {
        "MAILGUN_API_KEY": "key-7",
        "MAILGUN_DOMAIN": "mg.example.org",
        "callback_timeout_s": PATIENCE_S,
        **settings,
    }
    opened = open_mailer(Settings(MAILGUN_URL=url, **settings))
    assert isinstance(opened, MailgunMailer)
    return opened


@on_loop
async def test_mailgun_receives_message_as_form() -> None:
    async with receiving() as receiver:
        receiver.status = 200
        await send(mailgun(receiver.url))
    (asked,) = receiver.asked
    assert (asked.method, asked.target) == ("POST", "/v3/mg.example.org/messages")
    scheme, _, given = asked.headers["authorization"].partition(" ")
    assert (scheme, base64.b64decode(given)) == ("Basic", b"api:key-7")
    form = dict(urllib.parse.parse_qsl(asked.body.decode()))
    assert form.pop("text").startswith(f"Your job {REQUEST} has ended: COMPLETED.\n")
    assert form == {
        "from": "ndif@mg.example.org",
        "to": "ada@example.org",
        "subject": "NDIF job 8f14e45f: COMPLETED",
        "h:Message-Id": f"<{REQUEST}@mg.example.org>",
        "h:Auto-Submitted": "auto-generated",
        "o:tracking": "no",
    }


@pytest.mark.parametrize(
    ("status", "final"), [(400, True), (401, False), (429, False), (500, False)]
)
@on_loop
async def test_only_bad_request_of_mailgun_is_final(status: int, final: bool) -> None:
    async with receiving() as receiver:
        receiver.status = status
        error = await problem(mailgun(receiver.url))
    assert (str(error), error.final) == (f"Mailgun answered {status}", final)


@on_loop
async def test_unreachable_mailgun_is_reported() -> None:
    async with receiving() as receiver:
        opened = mailgun(receiver.url)
    assert str(await problem(opened)) == "Mailgun cannot be reached"


# Settings


def test_no_mailer_is_opened_without_settings() -> None:
    assert open_mailer(Settings()) is None
    assert not Settings().sends_mail
    assert Settings(smtp_url="smtp://mail", mail_from="a@b.example").sends_mail


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"smtp_url": "smtp://mail"}, "NDIF_SMTP_URL needs NDIF_MAIL_FROM"),
        ({"MAILGUN_API_KEY": "k"}, "MAILGUN_API_KEY needs MAILGUN_DOMAIN"),
        (
            {"MAILGUN_API_KEY": "k", "MAILGUN_DOMAIN": "d.example", "smtp_url": "smtp://m"},
            "must not both be set",
        ),
        ({"smtp_url": "http://mail"}, "is not like smtp://user"),
        ({"smtp_url": "smtp://u:sec/ret@mail:25"}, "is not like smtp://user"),
        ({"smtp_url": "smtp://mail:x"}, "is not like smtp://user"),
        ({"mail_from": "not an address"}, "is not an address like"),
        ({"mail_from": "a@b\r\nBcc: c@d"}, "is not an address like"),
        ({"MAILGUN_DOMAIN": "a/b"}, "is not a domain like"),
        ({"callback_networks": "10.0.0.1/8"}, "write a network like"),
        ({"callback_networks": "intranet"}, "write a network like"),
        ({"callback_secret": "short"}, "at least 16 characters"),
    ],
)
def test_invalid_mail_settings_are_rejected_without_secrets(
    settings: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ValidationError, match=sentence) as refused:
        Settings(**settings)
    assert "sec/ret" not in problems(refused.value)[0].sentence


def test_allowed_callback_networks_are_parsed() -> None:
    networks = Settings(callback_networks="10.20.0.0/16, fd12::/32").allowed_callback_networks
    assert [*map(str, networks)] == ["10.20.0.0/16", "fd12::/32"]
    assert Settings().allowed_callback_networks == ()
