"""The host names of a server, and the web pages that may use the server."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
import websocket
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ndif.config.settings import Settings
from ndif.gateway.origin import SameOrigin
from tests.clients.harness import LocalServer
from tests.on_loop import on_loop
from tests.security.serving import gateway
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.process

PUBLIC = "https://ndif.example.org"


def ask(server: LocalServer, headers: dict[str, str]) -> httpx.Response:
    return httpx.post(f"{server.url}/request", headers=headers, content=b"x")


def test_foreign_page_cannot_submit(server: LocalServer) -> None:
    answer = ask(server, {"Origin": "https://evil.example"})
    assert answer.status_code == 403
    assert "web page of another site, 'https://evil.example'" in answer.json()["detail"]


def test_site_whose_name_resolves_to_loopback_is_rejected(server: LocalServer) -> None:
    port = httpx.URL(server.url).port
    host = f"evil.example:{port}"
    refused = ask(server, {"Host": host})
    assert refused.status_code == 403
    assert f"does not answer to the name {host!r}" in refused.json()["detail"]
    assert "NDIF_ALLOWED_HOSTS" in refused.json()["detail"]
    assert ask(server, {"Host": host, "Origin": f"http://{host}"}).status_code == 403


def test_programs_on_this_machine_are_allowed(server: LocalServer) -> None:
    port = httpx.URL(server.url).port
    for headers in ({}, {"Origin": server.url}, {"Host": f"localhost:{port}"}):
        assert ask(server, headers).status_code == 400


def test_foreign_page_cannot_open_websocket(server: LocalServer) -> None:
    address = server.url.replace("http", "ws") + "/subscribe"
    websocket.create_connection(address, timeout=PATIENCE_S).close()
    with pytest.raises(websocket.WebSocketBadStatusException, match=r"403.*another site"):
        websocket.create_connection(address, origin="https://evil.example", timeout=PATIENCE_S)


def test_foreign_page_cannot_open_socket_io(server: LocalServer) -> None:
    url = server.url.replace("http", "ws")
    address = f"{url}/ws/socket.io/?EIO=4&transport=websocket"
    websocket.create_connection(address, timeout=PATIENCE_S).close()
    with pytest.raises(websocket.WebSocketBadStatusException, match=r"403.*another site"):
        websocket.create_connection(address, origin="https://evil.example", timeout=PATIENCE_S)


async def status(
    host: str | None,
    origin: str | None = None,
    *,
    path: str = "/response/id",
    listens: str = "127.0.0.1",
    method: str = "GET",
    sent: dict[str, str] | None = None,
    **settings: Any,
) -> httpx.Response:
    """Return the answer of an application with these settings to a request with these headers."""

    async def answer(_: Request) -> Response:
        return JSONResponse("answered")

    app = Starlette(
        routes=[Route("/{any:path}", answer, methods=["GET", "POST"])],
        middleware=[Middleware(SameOrigin, settings=Settings(**settings), host=listens)],
    )
    headers = (sent or {}) | ({} if origin is None else {"Origin": origin})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
        request = http.build_request(method, path, headers=headers)
        del request.headers["Host"]
        if host is not None:
            request.headers["Host"] = host
        return await http.send(request)


@on_loop
async def test_server_answers_only_to_its_own_host_names() -> None:
    machine = socket.gethostname()
    for host in (
        *("localhost:8001", "127.0.0.1:8001", "[::1]:8001", "LOCALHOST.", None),
        # Another site cannot own an IP address as its name.
        *("10.0.0.7:8001", "[fe80::1]:8001", machine, f"{machine.upper()}:8001"),
    ):
        for listens in ("127.0.0.1", "0.0.0.0", "10.0.0.7", "::"):
            assert (await status(host, listens=listens)).status_code == 200, (host, listens)
    for host in (
        *("evil.example", "evil.example:8001", "localhost.evil.example", "127.0.0.1.evil.example"),
        *("ndif.example.org", "x" * 5000, "1.2.3", f"{machine}.evil.example"),
    ):
        for listens in ("127.0.0.1", "0.0.0.0"):
            refused = await status(host, listens=listens)
            assert refused.status_code == 403, (host, listens)
            assert f"to the name {host[:200]!r}" in refused.json()["detail"]
    assert (await status("lab-gpu:8001", listens="lab-gpu")).status_code == 200
    for host in ("[::1", "a b", ":8001", "*"):
        malformed = await status(host, allowed_hosts="*")
        assert malformed.status_code == 400
        assert repr(host) in malformed.json()["detail"]


LISTENS = ("127.0.0.1", "0.0.0.0", "::", "10.0.0.7")
WILDCARDS = [
    "0.0.0.0",
    "0",
    "0.0",
    "0x0",
    "[::]",
    "[::ffff:0.0.0.0]",
    "[::ffff:0:0]",
    "[64:ff9b::]",
]


@pytest.mark.parametrize("host", WILDCARDS)
@on_loop
async def test_wildcard_address_is_no_host_of_server(host: str) -> None:
    for listens in LISTENS:
        for path in ("/ping", "/request", "/login"):
            refused = await status(f"{host}:8001", listens=listens, path=path, method="POST")
            assert refused.status_code == 403, (listens, path)
            assert "Use 127.0.0.1" in refused.json()["detail"]


@on_loop
async def test_page_below_localhost_is_another_site() -> None:
    for host in ("evil.localhost", "EVIL.localhost.", "a.b.localhost"):
        for listens in LISTENS:
            for path in ("/ping", "/request", "/login"):
                for origin in (None, f"http://{host}:8001"):
                    refused = await status(
                        f"{host}:8001", origin, listens=listens, path=path, method="POST"
                    )
                    assert refused.status_code == 403, (host, listens, path)
        assert (await status("localhost:8001", f"http://{host}:8001")).status_code == 403
    # Behind a local proxy, the operator names it.
    assert (await status("ndif.localhost", allowed_hosts="*.localhost")).status_code == 200


@on_loop
async def test_loopback_is_this_machine_in_every_spelling() -> None:
    for host in (
        *("localhost.", "127.0.0.1.", "127.1", "2130706433", "0x7f000001", "0177.0.0.1"),
        *("[::ffff:127.0.0.1]", "[0:0:0:0:0:0:0:1]", "[::1%25lo]", "127.255.255.254"),
    ):
        for path in ("/ping", "/request"):
            answer = await status(f"{host}:8001", path=path, method="POST")
            assert answer.status_code == 200, (host, path)
    for host in ("[::127.0.0.1]", "[2002:7f00:1::]", "[64:ff9b::7f00:1]"):
        assert (await status(host, path="/request", method="POST")).status_code == 403, host
    for host in ("localhost..", "..", "a..b", "[localhost]", "[127.0.0.1]"):
        assert (await status(host)).status_code == 400, host


@on_loop
async def test_foreign_number_as_host_is_rejected() -> None:
    """Only other programs than browsers send such a host, and they may look it up as a name."""
    for host in ("1.2.3", "134744072", "010.8.8.8", "0x8.8.8.8", "1.2.3.4.5", "256.0.0.1"):
        assert (await status(host)).status_code == 403, host
    assert (await status("134744072", allowed_hosts="8.8.8.8")).status_code == 200


@on_loop
async def test_international_host_name_is_allowed_as_browsers_send_it() -> None:
    settings: list[dict[str, Any]] = [
        {"public_url": "https://Bücher.example"},
        {"allowed_hosts": "bücher.example."},
        {"allowed_hosts": "*.example"},
    ]
    for named in settings:
        assert (await status("xn--bcher-kva.example:8001", **named)).status_code == 200, named
    page = await status("127.0.0.1", "https://xn--bcher-kva.example", **settings[0])
    assert page.status_code == 200
    named = {"cors_origins": "https://Bücher.example:443"}
    page = await status("127.0.0.1", "https://xn--bcher-kva.example", **named)
    assert page.headers["Access-Control-Allow-Origin"] == "https://xn--bcher-kva.example"


@on_loop
async def test_spellings_of_origin_are_one_site() -> None:
    for host, origin in (
        ("localhost:8001", "http://LOCALHOST.:8001"),
        ("127.0.0.1:8001", "http://2130706433:8001"),
        ("[::1]:8001", "http://[0:0:0:0:0:0:0:1]:8001"),
        ("localhost.", "http://localhost:80"),
    ):
        assert (await status(host, origin)).status_code == 200, (host, origin)
    # Each of these leads to loopback, but its page may be another program's.
    for origin in ("http://127.0.0.2:8001", "http://[::1]:8001", "http://127.0.0.1:8001"):
        assert (await status("localhost:8001", origin)).status_code == 403, origin


@on_loop
async def test_operator_allows_further_host_names() -> None:
    named = {"allowed_hosts": "ndif.example.org, *.lab.example"}
    for host, code in (
        *(("NDIF.example.org:8001", 200), ("a.lab.example", 200), ("a.b.lab.example", 200)),
        *(("lab.example", 403), ("evillab.example", 403), ("example.org", 403), ("localhost", 200)),
    ):
        assert (await status(host, **named)).status_code == code, host
    assert (await status("ndif.example.org", public_url=PUBLIC)).status_code == 200
    assert (await status("ndif.example.org.", public_url=f"{PUBLIC}.")).status_code == 200
    assert (await status("evil.example", public_url=PUBLIC)).status_code == 403
    assert (await status("evil.example", allowed_hosts="*")).status_code == 200
    # A host wildcard does not admit foreign pages.
    foreign = await status("localhost", "https://evil.example", allowed_hosts="*")
    assert foreign.status_code == 403


@on_loop
async def test_page_origin_must_match_host_or_public_url() -> None:
    for host, origin, code in (
        # Proxies may keep or replace the Host header.
        ("ndif.example.org", PUBLIC, 200),
        ("ndif.example.org:443", PUBLIC, 200),
        ("127.0.0.1:8001", PUBLIC, 200),
        ("127.0.0.1:8001", f"{PUBLIC}:443", 200),
        ("127.0.0.1:8001", "http://127.0.0.1:8001", 200),
        ("127.0.0.1:8001", "http://127.0.0.1", 403),
        ("127.0.0.1:8001", "http://ndif.example.org", 403),
        ("127.0.0.1:8001", f"{PUBLIC}:8443", 403),
        ("127.0.0.1:8001", "https://evil.example", 403),
        ("127.0.0.1:8001", "null", 403),
        *(("127.0.0.1:8001", bad, 400) for bad in ("", "https://[", "https://a:port")),
    ):
        answer = await status(host, origin, public_url=PUBLIC)
        assert answer.status_code == code, (host, origin)
    assert (await status("127.0.0.1:8001", PUBLIC)).status_code == 403


@on_loop
async def test_any_page_may_read_public_routes_of_public_server() -> None:
    public: list[dict[str, Any]] = [{"public_url": PUBLIC}, {"listens": "0.0.0.0"}]
    for path in ("/ping", "/status", "/env"):
        for how in public:
            for origin in (None, "https://a.page.example"):
                answer = await status("127.0.0.1", origin, path=path, **how)
                assert answer.status_code == 200
                # Without an Origin, the answer allows no page and varies by Origin for caches.
                allowed = answer.headers.get("Access-Control-Allow-Origin")
                assert allowed == (None if origin is None else "*")
                assert "Access-Control-Allow-Credentials" not in answer.headers
                assert "Origin" in answer.headers["Vary"] or allowed
        hidden = await status("127.0.0.1", path=path)
        assert "Access-Control-Allow-Origin" not in hidden.headers
        assert (await status("127.0.0.1", "https://a.page", path=path)).status_code == 403
    for path, method in (("/request", "POST"), ("/request", "GET"), ("/status", "POST")):
        answer = await status("127.0.0.1", "https://a.page", path=path, method=method, **public[0])
        assert answer.status_code == 403
        assert "Access-Control-Allow-Origin" not in answer.headers


async def preflight(
    path: str, method: str, origin: str = "https://a.page", sent: str = "", **settings: Any
) -> httpx.Response:
    """Return the answer to a CORS preflight request."""
    asked = {"Access-Control-Request-Method": method}
    if sent:
        asked["Access-Control-Request-Headers"] = sent
    return await status("127.0.0.1", origin, path=path, method="OPTIONS", sent=asked, **settings)


@on_loop
async def test_preflight_allows_public_routes_of_public_server() -> None:
    for path in ("/ping", "/status", "/env"):
        answer = await preflight(path, "GET", sent="x-request-id", public_url=PUBLIC)
        assert answer.status_code == 200
        assert answer.headers["Access-Control-Allow-Origin"] == "*"
        assert "POST" not in answer.headers["Access-Control-Allow-Methods"]
        assert (await preflight(path, "POST", public_url=PUBLIC)).status_code == 400
        assert (await preflight(path, "GET", sent="ndif-api-key", public_url=PUBLIC)).is_error
        assert (await preflight(path, "GET")).status_code == 403
    assert (await preflight("/request", "POST", public_url=PUBLIC)).status_code == 403


@on_loop
async def test_page_named_by_operator_may_use_routes_of_users() -> None:
    named: dict[str, Any] = {"cors_origins": "https://A.page:443, http://b.page:8080"}
    for origin in ("https://a.page", "http://b.page:8080"):
        for path, method in (("/request", "POST"), ("/response/id", "GET"), ("/whoami", "GET")):
            asked = "content-type,ndif-api-key,nnsight-version,ndif-session_id"
            before = await preflight(path, method, origin, asked, **named)
            assert before.status_code == 200, before.text
            assert before.headers["Access-Control-Allow-Origin"] == origin
            assert method in before.headers["Access-Control-Allow-Methods"]
            answer = await status("127.0.0.1", origin, path=path, method=method, **named)
            assert answer.status_code == 200
            assert answer.headers["Access-Control-Allow-Origin"] == origin
            assert "Origin" in answer.headers["Vary"]
            assert "X-Request-Id" in answer.headers["Access-Control-Expose-Headers"]
            for response in (before, answer):
                assert "Access-Control-Allow-Credentials" not in response.headers
        assert (await preflight("/request", "POST", origin, "x-other", **named)).is_error
        assert (await preflight("/request", "PATCH", origin, **named)).is_error
        # Pages of other sites cannot use the admin routes.
        for path in ("/admin/status", "/admin/stop"):
            assert (await status("127.0.0.1", origin, path=path, **named)).status_code == 403
            assert (await preflight(path, "POST", origin, **named)).status_code == 403
        # The page's host is not a host name of this server.
        foreign = await status("a.page", origin, **named)
        assert foreign.status_code == 403
    for origin in ("https://c.page", "http://a.page", "https://a.page.evil", "null"):
        answer = await status("127.0.0.1", origin, path="/request", method="POST", **named)
        assert answer.status_code == 403
        assert "Access-Control-Allow-Origin" not in answer.headers
        assert (await preflight("/request", "POST", origin, **named)).status_code == 403


def test_page_named_by_operator_may_open_live_channel(runtimes: Path, tmp_path: Path) -> None:
    with gateway(tmp_path, runtimes, cors_origins="https://a.page") as server:
        for path in ("/subscribe", "/ws/socket.io/?EIO=4&transport=websocket"):
            address = f"{server.url.replace('http', 'ws')}{path}"
            websocket.create_connection(
                address, origin="https://a.page", timeout=PATIENCE_S
            ).close()
            with pytest.raises(websocket.WebSocketBadStatusException, match="403"):
                websocket.create_connection(address, origin="https://b.page", timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("setting", "wrong"),
    [
        ("allowed_hosts", "https://ndif.example.org"),
        ("allowed_hosts", "ndif.example.org:8001"),
        ("allowed_hosts", "a.*.org"),
        ("allowed_hosts", "a..org"),
        ("allowed_hosts", "*.10.0.0.7"),
        ("allowed_hosts", "*."),
        *(
            ("cors_origins", wrong)
            for wrong in (
                *("*", "null", "a.page", "https://*.page", "https://a.page/", "https://a.page/x"),
                *("https://", "ftp://a.page", "https://a.page:0", "https://a.page:x"),
                *("https://key@a.page", "https://a.page?x", "https://a b"),
                *("https://a.page.", "https://[fe80::1%eth0]", "https://a..page"),
            )
        ),
        ("public_url", "ndif.example.org"),
        ("public_url", "https://key@ndif.example.org"),
        ("public_url", "https://ndif.example.org:99999"),
        ("public_url", "https://ndif.example.org:port"),
    ],
)
def test_invalid_host_or_origin_setting_is_rejected(setting: str, wrong: str) -> None:
    with pytest.raises(
        ValidationError, match=r"is not like|is not a host|must not contain|is not the origin"
    ):
        Settings(**{setting: wrong})
