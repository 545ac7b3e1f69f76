"""The operator's login over real HTTP: credentials, cookie, forged requests, lock-out and end."""

from __future__ import annotations

import io
import logging
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bcrypt
import httpx
import itsdangerous.timed
import pytest
from argon2 import PasswordHasher
from starlette.requests import Request

from ndif.gateway import login
from ndif.gateway.sessions import Sessions
from ndif.server.embedded import Operator
from tests.security.serving import Gateway, gateway

pytestmark = pytest.mark.process

TOKEN = "opens-it"
PASSWORD = "three words nobody knows"
# A hash of the usual cost takes half a second.
HASH = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1).hash(PASSWORD)
OWN_PAGE = {"Sec-Fetch-Site": "same-origin"}


def a_gateway(folder: Path, runtimes: Path, **settings: Any) -> Any:
    settings = {"admin_password_hash": HASH, **settings}
    return gateway(folder, runtimes, whose=Operator(TOKEN), **settings)


@pytest.fixture
def server(runtimes: Path, tmp_path: Path) -> Iterator[Gateway]:
    with a_gateway(tmp_path / "results", runtimes) as served_gateway:
        yield served_gateway


@pytest.fixture
def http(server: Gateway) -> Iterator[httpx.Client]:
    with a_browser(server) as browser:
        yield browser


def a_browser(server: Gateway, **headers: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers=headers, trust_env=False, verify=False)


def enter(http: httpx.Client, password: str = PASSWORD, **headers: str) -> httpx.Response:
    return http.post("/login", json={"password": password}, headers=headers)


def refused(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"detail"}
    detail: str = answer.json()["detail"]
    assert detail.endswith(".")
    return detail


def operator_events(server: Gateway) -> list[tuple[str, str, str, int]]:
    """Return kind, subject, caller and count of the audit events, oldest first."""
    answer = httpx.get(
        f"{server.url}/admin/events", headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False
    )
    events = [(e["kind"], e["subject"], e["by"], e["count"]) for e in answer.json()["events"]]
    return events[::-1]


# Credentials


@pytest.mark.parametrize("proof", [PASSWORD, TOKEN], ids=["password", "token"])
def test_login_opens_admin_routes(http: httpx.Client, proof: str) -> None:
    assert http.get("/admin/status").status_code == 401
    entered = enter(http, proof)
    assert entered.status_code == 200, entered.text
    (cookie,) = entered.headers.get_list("Set-Cookie")
    assert {"httponly", "samesite=strict", "path=/", "max-age=43200"} <= {
        part.strip().lower() for part in cookie.split(";")
    }
    assert (
        "secure" not in cookie.lower()
    )  # the browser would not return a secure cookie without TLS
    assert "domain" not in cookie.lower()
    assert proof not in cookie
    assert http.get("/admin/status").json().keys() >= {"models", "nodes"}
    assert http.get("/session").json() == entered.json()
    assert entered.json()["operator"] is True


def test_form_login_is_accepted(http: httpx.Client) -> None:
    assert http.post("/login", data={"password": PASSWORD}).json()["operator"] is True


def test_bcrypt_password_hash_is_accepted(tmp_path: Path, runtimes: Path) -> None:
    # bcrypt itself refuses more than 72 bytes.
    for number, password in enumerate((PASSWORD, "long words " * 10)):
        hashed = bcrypt.hashpw(password.encode()[:72], bcrypt.gensalt(4)).decode()
        folder = tmp_path / str(number)
        with (
            a_gateway(folder, runtimes, admin_password_hash=hashed) as server,
            a_browser(server) as http,
        ):
            assert enter(http, password).json()["operator"] is True
            refused(enter(http, "guessed"), 401)


def test_login_without_valid_password_is_rejected(http: httpx.Client) -> None:
    nobody = {"operator": False, "until": None, "csrf": None, "has_password": True}
    assert http.get("/session").json() == nobody
    assert "password" in refused(enter(http, "guessed"), 401)
    assert "Set-Cookie" not in enter(http, "guessed again").headers
    assert http.get("/session").json() == nobody


def test_server_without_password_explains_login(runtimes: Path, tmp_path: Path) -> None:
    with a_gateway(tmp_path, runtimes, admin_password_hash="") as server, a_browser(server) as http:
        message = refused(enter(http, "guessed"), 401)
        assert "`ndif admin password`" in message
        assert "file `token`" in message
        assert http.get("/session").json()["has_password"] is False
        assert enter(http, "").status_code == 400
        assert enter(http, TOKEN).status_code == 200


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"", "application/json", 400),
        (b"{", "application/json", 400),
        (b"\xff", "application/x-www-form-urlencoded", 400),
        (b"&".join([b"a=hidden"] * 99), "application/x-www-form-urlencoded", 400),
        (b'{"password": ["hidden"]}', "application/json", 400),
        (b'{"password": "hidden", "user": "hidden"}', "application/json", 400),
        (b'{"password": "' + b"hidden" * 300 + b'"}', "application/json", 400),
        (b'"hidden"', "", 400),
        (b"hidden" * 2000, "text/plain", 413),
    ],
)
def test_invalid_login_body_is_not_echoed(
    http: httpx.Client, content: bytes, kind: str, status: int
) -> None:
    answer = http.post("/login", content=content, headers={"Content-Type": kind})
    assert "hidden" not in refused(answer, status)


def test_log_contains_no_credentials(server: Gateway, http: httpx.Client) -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.addFilter(lambda record: not record.name.startswith("http"))  # the client's own
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        for proof in (PASSWORD, TOKEN, "guessed-by-somebody"):
            enter(http, proof)
        cookie = next(iter(http.cookies.jar)).value
        csrf = http.get("/session").json()["csrf"]
        http.post("/admin/gc", json={}, headers={**OWN_PAGE, "X-CSRF-Token": csrf})
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    text = written.getvalue()
    assert "/login" in text
    for secret in (PASSWORD, TOKEN, "guessed-by-somebody", HASH, csrf, cookie):
        assert secret
        assert secret not in text


def test_config_answer_hides_password_hash(http: httpx.Client) -> None:
    enter(http)
    assert HASH not in http.get("/admin/config").text


# Forged requests


def test_change_needs_own_page_and_csrf_token(server: Gateway, http: httpx.Client) -> None:
    csrf = enter(http).json()["csrf"]
    with a_browser(server) as other:
        others = enter(other).json()["csrf"]
    assert others != csrf

    def change(**headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return http.post("/admin/gc", json={"dry_run": True}, headers=named)

    own = {"Sec_Fetch_Site": "same-origin"}
    assert change(**own, X_CSRF_Token=csrf).status_code == 200
    assert change(Origin=server.url, X_CSRF_Token=csrf).status_code == 200
    for headers in (
        {},
        {"X_CSRF_Token": csrf},  # without the headers that browsers send
        {"Sec_Fetch_Site": "same-site", "X_CSRF_Token": csrf},
        {"Sec_Fetch_Site": "cross-site", "X_CSRF_Token": csrf},
        {"Sec_Fetch_Site": "none", "X_CSRF_Token": csrf},
        {"Sec_Fetch_Site": "same-site", "Origin": server.url, "X_CSRF_Token": csrf},
        {"Origin": "null", "X_CSRF_Token": csrf},
        {"Origin": "https://evil.example", "X_CSRF_Token": csrf},
        {"Origin": "http://127.0.0.1:1", "X_CSRF_Token": csrf},
        own,
        {**own, "X_CSRF_Token": ""},
        {**own, "X_CSRF_Token": csrf[:-1]},
        {**own, "X_CSRF_Token": others},
    ):
        refused(change(**headers), 403)
    # Reads need no CSRF token: they change nothing, and no other page can read the answer.
    answer = http.get("/admin/status", headers={"Sec-Fetch-Site": "cross-site"})
    assert answer.status_code == 200
    assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Access-Control-Allow-Origin" not in answer.headers


def test_cors_site_cannot_operate_server(runtimes: Path, tmp_path: Path) -> None:
    named = "https://notebook.example.org"
    with a_gateway(tmp_path, runtimes, cors_origins=named) as server, a_browser(server) as http:
        csrf = enter(http).json()["csrf"]
        headers = {"Origin": named, "X-CSRF-Token": csrf}
        for method, path in (
            ("POST", "/login"),
            ("POST", "/logout"),
            ("GET", "/session"),
            ("GET", "/admin/status"),
            ("POST", "/admin/gc"),
        ):
            refused(http.request(method, path, headers=headers, json={}), 403)


def test_foreign_page_cannot_log_visitor_in(http: httpx.Client) -> None:
    for headers in (
        {"Origin": "https://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ):
        refused(enter(http, **headers), 403)
    assert not http.cookies


def test_cookie_does_not_override_wrong_token(http: httpx.Client) -> None:
    enter(http)
    answer = http.get("/admin/status", headers={"Authorization": "Bearer wrong"})
    assert "token" in refused(answer, 401)


@pytest.mark.parametrize("value", ["", "x", "a.b.c", "é", '"', "x" * 5000, "W10.aaaaaa.bbbbbb"])
def test_invalid_cookie_is_rejected(http: httpx.Client, value: str) -> None:
    enter(http)
    (name,) = (cookie.name for cookie in http.cookies.jar)
    http.cookies.clear()
    header = f"{name}={value}".encode("latin-1")
    assert http.get("/admin/status", headers=[(b"Cookie", header)]).status_code == 401
    assert http.get("/session", headers=[(b"Cookie", header)]).json()["operator"] is False


def test_changed_cookie_is_rejected(http: httpx.Client) -> None:
    enter(http)
    (cookie,) = http.cookies.jar
    whole = str(cookie.value)
    for place in range(0, len(whole), 7):
        changed = whole[:place] + ("A" if whole[place] != "A" else "B") + whole[place + 1 :]
        http.cookies.clear()
        http.cookies.set(cookie.name, changed)
        # The last base64 character has unused bits.
        assert place == len(whole) - 1 or http.get("/admin/queue").status_code == 401


def test_cookie_behind_tls_is_secure(runtimes: Path, tmp_path: Path) -> None:
    public = "https://ndif.example.org"
    with a_gateway(tmp_path, runtimes, public_url=public) as server, a_browser(server) as http:
        entered = enter(http, **{"X-Forwarded-Proto": "https", "Origin": public})
        cookie = entered.headers["Set-Cookie"]
        assert cookie.startswith("__Host-")
        assert "secure" in cookie.lower()
        plain = enter(http, Origin=server.url).headers["Set-Cookie"]
        assert "secure" not in plain.lower()


def parts_of_cookie(answer: httpx.Response) -> tuple[bool, set[str]]:
    """Return whether the cookie's name has the prefix `__Host-`, and its attributes without a value."""
    (cookie,) = answer.headers.get_list("Set-Cookie")
    name, *attributes = (part.strip() for part in cookie.split(";"))
    values = {text.lower() for text in attributes if not text.lower().startswith("max-age")}
    return name.startswith("__Host-"), values


STRICT = {"httponly", "path=/", "samesite=strict"}
FORWARDED = {"X-Forwarded-Proto": "https"}
PUBLIC = "https://ndif.example.org"


@pytest.mark.parametrize(
    ("settings", "headers", "is_secure"),
    [
        # A trusted proxy forwards the scheme.
        ({"forwarded_allow_ips": "127.0.0.1"}, FORWARDED, True),
        ({"forwarded_allow_ips": "127.0.0.0/8"}, FORWARDED, True),
        ({"forwarded_allow_ips": "*"}, FORWARDED, True),
        ({"allowed_hosts": "ndif.example.org"}, {**FORWARDED, "Host": "ndif.example.org"}, True),
        ({"forwarded_allow_ips": "127.0.0.1"}, {"X-Forwarded-Proto": "http"}, False),
        ({"forwarded_allow_ips": "127.0.0.1"}, {}, False),
        # Nobody else does.
        ({}, FORWARDED, False),
        ({"forwarded_allow_ips": "192.0.2.7"}, FORWARDED, False),
        ({"forwarded_allow_ips": "127.0.0.1"}, {"Forwarded": "proto=https"}, False),
        # The public URL is https, and the proxy forwards no scheme.
        ({"public_url": PUBLIC}, {"Origin": PUBLIC}, True),
        ({"public_url": PUBLIC}, {"Host": "ndif.example.org", "Origin": PUBLIC}, True),
        ({"public_url": PUBLIC}, {}, True),
        ({"public_url": PUBLIC.upper()}, {}, True),
        ({"public_url": PUBLIC, "forwarded_allow_ips": "192.0.2.7"}, FORWARDED, True),
        ({"public_url": "http://ndif.example.org"}, {}, False),
    ],
)
def test_cookie_is_secure_exactly_behind_tls(
    runtimes: Path,
    tmp_path: Path,
    settings: dict[str, str],
    headers: dict[str, str],
    is_secure: bool,
) -> None:
    with a_gateway(tmp_path, runtimes, **settings) as server, a_browser(server) as http:
        entered = enter(http, **headers)
        assert entered.status_code == 200
        expected = STRICT | {"secure"} if is_secure else STRICT
        assert parts_of_cookie(entered) == (is_secure, expected)
        # The cookie opens the session that it was set for.
        cookie = {"Cookie": entered.headers["Set-Cookie"].partition(";")[0]}
        headers = {name: value for name, value in headers.items() if name != "Origin"}
        http.cookies.clear()
        assert http.get("/admin/status", headers={**headers, **cookie}).status_code == 200
        csrf = {"X-CSRF-Token": entered.json()["csrf"], **OWN_PAGE}
        left = http.post("/logout", headers={**headers, **cookie, **csrf})
        removed = left.headers.get_list("Set-Cookie")
        name = cookie["Cookie"].partition("=")[0]
        assert any(text.startswith(f'{name}=""; ') and "Max-Age=0" in text for text in removed)


def test_plain_cookie_is_ignored_over_tls(runtimes: Path, tmp_path: Path) -> None:
    """Another host of the domain, or the network, can set a cookie without the prefix."""
    proxied = {"forwarded_allow_ips": "127.0.0.1"}
    with a_gateway(tmp_path, runtimes, **proxied) as server, a_browser(server) as http:
        plain = enter(http).headers["Set-Cookie"].partition(";")[0]
        assert http.get("/admin/status", headers={"Cookie": plain}).status_code == 200
        over_tls = http.get("/admin/status", headers={"Cookie": plain, **FORWARDED})
        assert over_tls.status_code == 401


# The lock-out


def test_password_guesses_lock_address_but_not_token(server: Gateway, http: httpx.Client) -> None:
    messages = {refused(enter(http, f"guess {n}"), 401) for n in range(login.FROM_ADDRESS)}
    assert len(messages) == 1
    locked = enter(http)
    assert "token" in refused(locked, 429)
    assert 0 < int(locked.headers["Retry-After"]) <= 60 * login.WINDOW_MIN
    assert enter(http, TOKEN).status_code == 200
    (caller,) = {subject for _, subject, _, _ in operator_events(server)}
    assert operator_events(server) == [
        ("failed login", caller, "login", login.FROM_ADDRESS + 1),
        ("login", caller, "login", 1),
    ]


def test_password_guesses_from_many_addresses_are_limited_together(
    runtimes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(login, "IN_ALL", 12)
    with (
        a_gateway(tmp_path, runtimes, forwarded_allow_ips="127.0.0.1") as server,
        a_browser(server) as http,
    ):
        for n in range(12):
            refused(enter(http, "guess", **{"X-Forwarded-For": f"192.0.2.{n}"}), 401)
        refused(enter(http, **{"X-Forwarded-For": "192.0.2.99"}), 429)
        # IPv6 addresses of one site count as one.
        assert len(operator_events(server)) == 13


def test_password_login_is_closed_while_broker_is_unavailable(
    runtimes: Path, tmp_path: Path
) -> None:
    away = "redis://127.0.0.1:1"
    with a_gateway(tmp_path, runtimes, broker_url=away) as server, a_browser(server) as http:
        locked = enter(http)
        assert "counted" in refused(locked, 503)
        assert "Retry-After" in locked.headers
        assert enter(http, TOKEN).status_code == 200


# The end


def test_logout_removes_cookie(server: Gateway, http: httpx.Client) -> None:
    csrf = enter(http).json()["csrf"]
    for headers in ({}, OWN_PAGE, {"X-CSRF-Token": csrf}):
        refused(http.post("/logout", headers=headers), 403)
    left = http.post("/logout", headers={**OWN_PAGE, "X-CSRF-Token": csrf})
    assert left.json()["operator"] is False
    assert not http.cookies
    assert http.get("/admin/status").status_code == 401
    assert http.post("/logout").status_code == 200  # a repeated logout succeeds
    assert [kind for kind, *_ in operator_events(server)] == ["login", "logout"]


def test_events_record_caller_of_operations(server: Gateway, http: httpx.Client) -> None:
    csrf = enter(http).json()["csrf"]
    body: dict[str, Any] = {"all": True}
    page = {**OWN_PAGE, "X-CSRF-Token": csrf}
    token = {"Authorization": f"Bearer {TOKEN}"}
    http.post("/admin/callbacks/retry", json=body, headers=page)
    http.post("/admin/callbacks/retry", json=body, headers=token)
    commands = {**token, "User-Agent": "ndif-cli/1"}
    http.post("/admin/callbacks/retry", json=body, headers=commands)
    http.post("/admin/callbacks/retry", json={}, headers=commands)  # rejected, so no event
    http.get("/admin/status", headers=commands)
    events = [(kind, by) for kind, _, by, _ in operator_events(server)]
    retried = "call-backs retried"
    assert events == [
        ("login", "login"),
        (retried, "login"),
        (retried, "token"),
        (retried, "command line"),
    ]


def request_with(cookie: str) -> Request:
    headers = [(b"cookie", cookie.encode())]
    return Request({"type": "http", "method": "GET", "headers": headers, "server": ("a", 80)})


def test_session_ends_with_expiry_password_or_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sessions = Sessions(("one-secret",), HASH, 3600)
    session, value = sessions.begin("password")
    cookie = request_with(f"{sessions._name}={value}")
    assert sessions.of(cookie) is not None
    assert sessions.of(cookie).csrf == session.csrf  # type: ignore[union-attr]
    # Other processes accept the session, also one with the next secret.
    assert Sessions(("one-secret",), HASH, 3600).of(cookie) is not None
    rotated = Sessions(("new-secret", "one-secret"), HASH, 3600)
    moved = request_with(f"{rotated._name}={value}")
    assert rotated.of(moved) is not None
    assert rotated.is_token_of(session, session.csrf)
    # Processes with another password, or only another secret, reject it.
    assert Sessions(("one-secret",), f"{HASH}x", 3600).of(cookie) is None
    assert Sessions(("one-secret",), "", 3600).of(cookie) is None
    other = Sessions(("new-secret",), HASH, 3600)
    assert other.of(request_with(f"{other._name}={value}")) is None
    assert not other.is_token_of(session, session.csrf)
    later = types.SimpleNamespace(time=lambda: session.until + 1)
    monkeypatch.setattr(itsdangerous.timed, "time", later)
    assert sessions.of(cookie) is None
