"""Webhooks over real connections: form, signature and failures."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import ssl
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ndif.delivery.loop import DeliveryError
from ndif.queue.callbacks.guard import EVERYWHERE, Network, read_address
from ndif.queue.callbacks.webhook import Webhooks, signature, signing_secret
from ndif.schema.callback import Callback, JobStatusReport, Times
from tests.on_loop import on_loop
from tests.queue.callbacks.receiver import receiving
from tests.waiting import PATIENCE_S

DOCUMENT = Path(__file__).parents[3] / "docs" / "callbacks.md"
NOW = 1_700_000_000.0
REQUEST = "8f14e45f-ceea-467f-a8f5-0d1c9c6b2f10"
SECRETS = ("the secret of the server",)
NEWS = JobStatusReport(REQUEST, "COMPLETED", "org/name", Times(NOW), "Döne.")
CONTENT = {
    "id": REQUEST,
    "status": "COMPLETED",
    "model": "org/name",
    "times": {"received": NOW},
    "description": "Döne.",
}


def a_callback(address: str, key: str = "ada") -> Callback:
    return Callback(REQUEST, address, NEWS, NOW, NOW, key=key)


async def to_loopback(host: str, port: int) -> Sequence[str]:
    return ["127.0.0.1"]


def webhooks(
    secrets: Sequence[str] = SECRETS,
    timeout_s: float = PATIENCE_S,
    allowed: Sequence[Network] = EVERYWHERE,
    **options: Any,
) -> Webhooks:
    options = {"resolve": to_loopback, **options}
    return Webhooks(allowed, secrets, timeout_s, lambda: NOW, **options)


async def send(address: str, **options: Any) -> None:
    callback = a_callback(address)
    await webhooks(**options).send(callback, read_address(address, EVERYWHERE))


@on_loop
async def test_get_webhook_sends_status_and_id_in_query() -> None:
    async with receiving() as receiver:
        await send(f"{receiver.url}/done?run=7")
    (asked,) = receiver.asked
    assert (asked.method, asked.body) == ("GET", b"")
    assert asked.target == f"/done?run=7&status=COMPLETED&id={REQUEST}"
    assert asked.headers["host"] == f"localhost:{receiver.port}"
    assert asked.headers["user-agent"] == "ndif"


@on_loop
async def test_post_webhook_is_signed_by_standard_webhooks() -> None:
    """The test implements the rules of Standard Webhooks on its own."""
    async with receiving() as receiver:
        await send(f"post+{receiver.url}/done?token=t")
    (asked,) = receiver.asked
    assert (asked.method, asked.target) == ("POST", "/done?token=t")
    assert json.loads(asked.body) == CONTENT
    assert asked.headers["content-type"] == "application/json"
    assert asked.headers["webhook-id"] == f"msg_{REQUEST}"
    assert asked.headers["webhook-timestamp"] == str(int(NOW))
    secret = signing_secret(SECRETS[0], "ada")
    assert secret.startswith("whsec_")
    signed = f"msg_{REQUEST}.{int(NOW)}.".encode() + asked.body
    mac = hmac.new(base64.b64decode(secret[6:]), signed, hashlib.sha256).digest()
    assert asked.headers["webhook-signature"] == f"v1,{base64.b64encode(mac).decode()}"


@on_loop
async def test_documented_code_verifies_webhook() -> None:
    (shown,) = re.findall(
        r"^```python\n(import base64.+?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL
    )
    names: dict[str, Any] = {}
    exec(shown, names)
    verify = names["verify"]
    secrets = ("the next secret", *SECRETS)
    async with receiving() as receiver:
        sender = Webhooks(EVERYWHERE, secrets, 5.0, time.time, resolve=to_loopback)
        callback = a_callback(f"post+{receiver.url}/")
        await sender.send(callback, read_address(callback.address, EVERYWHERE))
        await send(f"post+{receiver.url}/")  # long ago
    asked, old = receiver.asked
    for server in secrets:
        assert verify(signing_secret(server, "ada"), asked.headers, asked.body)
    assert not verify(signing_secret(SECRETS[0], "bob"), asked.headers, asked.body)
    assert not verify(signing_secret(SECRETS[0], "ada"), asked.headers, asked.body + b" ")
    assert not verify(signing_secret(SECRETS[0], "ada"), old.headers, old.body)


def test_signature_matches_example_of_specification() -> None:
    body = b'{"test": 2432232314}'
    secret, message_id = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "msg_p5jXN8AQM9LWM0D4loKWxJek"
    expected = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert signature(secret, message_id, 1614265330, body) == expected


def test_every_key_has_its_own_secret() -> None:
    assert signing_secret("s" * 16, "ada") == signing_secret("s" * 16, "ada")
    secrets = {
        signing_secret(server, key) for server in ("s" * 16, "t" * 16) for key in ("ada", "bob", "")
    }
    assert len(secrets) == 6


@on_loop
async def test_both_secrets_sign_during_rotation() -> None:
    async with receiving() as receiver:
        await send(f"post+{receiver.url}/", secrets=("the next secret", *SECRETS))
    (asked,) = receiver.asked
    message = (f"msg_{REQUEST}", int(NOW), asked.body)
    expected = [
        signature(signing_secret(server, "ada"), *message)
        for server in ("the next secret", *SECRETS)
    ]
    assert asked.headers["webhook-signature"].split(" ") == expected


# Failures


async def problem(address: str, **options: Any) -> DeliveryError:
    with pytest.raises(DeliveryError) as failed:
        await send(address, **options)
    assert "secretive" not in str(failed.value)
    assert "localhost" not in str(failed.value)
    return failed.value


@pytest.mark.parametrize("status", [400, 404, 410, 429, 500, 503])
@on_loop
async def test_error_status_fails_webhook(status: int) -> None:
    async with receiving() as receiver:
        receiver.status = status
        error = await problem(receiver.url)
    assert str(error) == f"it answered {status}"
    assert error.final is (status == 410)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
@on_loop
async def test_webhook_does_not_follow_redirects(status: int) -> None:
    async with receiving() as receiver, receiving() as other:
        receiver.status, receiver.headers = status, f"Location: {other.url}/\r\n"
        error = await problem(receiver.url)
        assert str(error) == f"it answered {status}, and no redirect is followed"
        assert (len(receiver.asked), other.asked) == (1, [])


@on_loop
async def test_silent_receiver_times_out() -> None:
    async with receiving() as receiver:
        receiver.status = 0
        assert str(await problem(receiver.url, timeout_s=0.2)) == "it did not answer within 0.2s"


@on_loop
async def test_receiver_with_endless_headers_times_out() -> None:
    async with receiving() as receiver:
        receiver.status = -2
        error = await problem(receiver.url, timeout_s=0.3)
    assert "did not answer within" in str(error)


@on_loop
async def test_receiver_without_http_fails_webhook() -> None:
    async with receiving() as receiver:
        receiver.status = -1
        assert str(await problem(receiver.url)) == "it does not speak HTTP"


@on_loop
async def test_unreachable_receiver_fails_webhook() -> None:
    async with receiving() as receiver:
        pass
    assert str(await problem(receiver.url)) == "it cannot be reached"


@on_loop
async def test_unresolvable_host_is_temporary_failure() -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        raise OSError("no such name")

    error = await problem("http://nobody.example/", resolve=resolve)
    assert (str(error), error.final) == ("its host has no address", False)


@on_loop
async def test_forbidden_host_is_final_failure() -> None:
    async with receiving() as receiver:
        error = await problem(f"http://intranet.example:{receiver.port}/", allowed=())
        assert error.final
        assert str(error) == "its host has an address that this server does not call"
        assert receiver.asked == []


@on_loop
async def test_webhook_ignores_proxy_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    async with receiving() as receiver, receiving() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        await send(receiver.url)
        assert (len(receiver.asked), proxy.asked) == (1, [])


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for hook.example, signed by itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=hook.example"),
            *("-addext", "subjectAltName=DNS:hook.example"),
            *("-keyout", str(folder / "pair.pem"), "-out", str(folder / "certificate.pem")),
        ],
        check=True,
        capture_output=True,
    )
    with (folder / "pair.pem").open("a") as pair:
        pair.write((folder / "certificate.pem").read_text())
    return folder


@pytest.mark.process
@on_loop
async def test_tls_verifies_host_name_of_url(certificate: Path) -> None:
    server_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_side.load_cert_chain(certificate / "pair.pem")
    trusts = ssl.create_default_context(cafile=str(certificate / "certificate.pem"))
    async with receiving(server_side) as receiver:
        await send(f"https://hook.example:{receiver.port}/done", tls=trusts)
        (asked,) = receiver.asked
        assert asked.headers["host"] == f"hook.example:{receiver.port}"
        for host, tls in (("other.example", trusts), ("127.0.0.1", trusts), ("hook.example", None)):
            error = await problem(f"https://{host}:{receiver.port}/", tls=tls)
            assert str(error) == "TLS with it failed, perhaps because of its certificate"
        assert len(receiver.asked) == 1
