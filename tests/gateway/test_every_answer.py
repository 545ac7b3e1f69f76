"""Headers, request id and log line of every answer, made by a route, Starlette or uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import logging
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import websocket
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from ndif.config.settings import Settings
from ndif.gateway.app import create_app, uvicorn_config
from ndif.gateway.header_wire import SocketIoSubscriptions
from ndif.gateway.hf_mirror import HfMirror
from ndif.gateway.incoming import Incoming
from ndif.gateway.open_channels import OpenChannels
from ndif.server.embedded import Operator
from ndif.stores.broker import MemoryBroker
from ndif.telemetry.request_id import LOG_FORMAT, name_requests
from tests.security.serving import Gateway, gateway, get
from tests.serving import serving_on
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.process

UNKNOWN = "01234567-89ab-cdef-0123-456789abcdef"
MADE = re.compile(r"[0-9a-f]{32}")
TOKEN = "opens-it"


@pytest.fixture(scope="module")
def log() -> Iterator[io.StringIO]:
    """The log of a server."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    name_requests([handler])
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    # uvicorn configured its own logging in servers of other tests.
    uvicorns = logging.getLogger("uvicorn")
    propagates, uvicorns.propagate = uvicorns.propagate, True
    yield written
    uvicorns.propagate = propagates
    root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture(scope="module")
def server(runtimes: Path, tmp_path_factory: pytest.TempPathFactory, log: Any) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("results")
    with gateway(folder, runtimes, whose=Operator(TOKEN)) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def failing(log: Any) -> Iterator[str]:
    """The URL of a server with failing routes in the usual application."""

    async def fail(_: Request) -> Response:
        raise ValueError("a secret of the server")

    async def fail_in_the_middle(_: Request) -> Response:
        class Failing(Response):
            async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                raise ValueError("a secret of the server")

        return Failing()

    async def fail_websocket(_: WebSocket) -> None:
        raise ValueError("a secret of the server")

    options = Settings()
    app = create_app(
        [
            Route("/fails", fail),
            Route("/fails/late", fail_in_the_middle),
            WebSocketRoute("/fails/live", fail_websocket),
        ],
        SocketIoSubscriptions(MemoryBroker(), OpenChannels(options), options),
        HfMirror(share_weights=False),
        None,  # type: ignore[arg-type]
        options,
        host="127.0.0.1",
    )
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        serving_on(uvicorn_config(app, Incoming(options), options, listening), listening) as url,
    ):
        yield url


def lines(log: io.StringIO, request_id: str) -> list[str]:
    return [line for line in log.getvalue().splitlines() if f"[{request_id}]" in line]


def raw(url: str, sent: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send bytes, and return status, headers and body of the answer."""
    parts = httpx.URL(url)
    assert parts.port
    with socket.create_connection((parts.host, parts.port), timeout=PATIENCE_S) as connection:
        connection.sendall(sent)
        with connection.makefile("rb") as file:
            answer = file.read()
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *others = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in others)}
    assert len(headers) == len(others), others
    return int(first.split()[1]), headers, body


def check(status: int, headers: Any, body: bytes) -> str:
    """Check the common parts of a rejection and return its sentence."""
    assert status >= 400
    assert headers["content-type"] == "application/json"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["cache-control"] == "no-store"
    assert headers["x-request-id"]
    assert "server" not in headers
    assert "strict-transport-security" not in headers
    document = json.loads(body)
    assert document.keys() == {"detail"}
    assert document["detail"].endswith((".", "?"))
    for shown in ("Traceback", "secret", ".py", "site-packages", "uvicorn", "starlette"):
        assert shown not in document["detail"]
    sentence: str = document["detail"]
    return sentence


# The id


def test_answer_and_log_line_have_request_id_of_client(server: Gateway, log: io.StringIO) -> None:
    answer = get(f"{server.url}/ping", headers={"X-Request-Id": "mine-1"})
    assert answer.headers.get_list("X-Request-Id") == ["mine-1"]
    (line,) = wait_for_lines(log, "mine-1")
    assert re.search(r"INFO ndif\.http \[mine-1\]: 127\.0\.0\.1 GET /ping 200 0\.\d{3}s$", line)


def test_unsafe_request_id_is_replaced(server: Gateway) -> None:
    for forged in ("a]b", "x" * 65, "a b", ""):
        answer = get(f"{server.url}/ping", headers={"X-Request-Id": forged})
        request_id = answer.headers["X-Request-Id"]
        assert MADE.fullmatch(request_id)
    twice = get(f"{server.url}/ping", headers=[("X-Request-Id", "a"), ("X-Request-Id", "b")])
    assert MADE.fullmatch(twice.headers["X-Request-Id"])


def test_request_id_differs_from_job_id(server: Gateway, log: io.StringIO) -> None:
    answer = server.submit(**{"X-Request-Id": "submits"})
    assert answer.status_code == 200
    job, request = answer.json()["id"], answer.headers["X-Request-Id"]
    assert request == "submits" != job
    accepted, http = wait_for_lines(log, "submits", 2)
    assert f"job {job} is accepted" in accepted
    assert "POST /request 200" in http


def test_log_line_omits_query_and_truncates_path(server: Gateway, log: io.StringIO) -> None:
    path = f"/results/{UNKNOWN}?expires=1&signature=hidden"
    get(server.url + path, headers={"X-Request-Id": "result"})
    get(f"{server.url}/{'y' * 5000}", headers={"X-Request-Id": "long"})
    get(f"{server.url}/a%0aINFO%20forged%1b[2J", headers={"X-Request-Id": "forged"})
    (result,), (long,), (forged,) = (
        wait_for_lines(log, request_id) for request_id in ("result", "long", "forged")
    )
    assert f"GET /results/{UNKNOWN} 403" in result
    assert len(long) < 400
    assert r"GET /a\nINFO forged\x1b[2J 404" in forged


def test_live_channel_has_id_and_one_log_line_at_its_end(server: Gateway, log: io.StringIO) -> None:
    for name, path in (
        ("live-08", "/subscribe"),
        ("live-07", "/ws/socket.io/?EIO=4&transport=websocket"),
    ):
        url = f"{server.url.replace('http', 'ws')}{path}"
        channel = websocket.create_connection(
            url, header={"X-Request-Id": name}, timeout=PATIENCE_S
        )
        assert channel.getheaders()["x-request-id"] == name
        assert not lines(log, name)
        channel.close()
        get(f"{server.url}/ping")
        (line,) = wait_for_lines(log, name)
        assert f"127.0.0.1 WebSocket {path.partition('?')[0]} 101" in line


def test_rejected_handshake_has_one_log_line(server: Gateway, log: io.StringIO) -> None:
    url = f"{server.url.replace('http', 'ws')}/no/channel"
    with pytest.raises(websocket.WebSocketBadStatusException, match="404"):
        websocket.create_connection(url, header={"X-Request-Id": "shaken"}, timeout=PATIENCE_S)
    get(f"{server.url}/ping")
    (line,) = wait_for_lines(log, "shaken")
    assert "WebSocket /no/channel 404" in line


def test_server_url_may_end_with_slash(server: Gateway) -> None:
    assert get(f"{server.url}//ping").json() == get(f"{server.url}/ping").json()
    url = f"{server.url.replace('http', 'ws')}//subscribe"
    with contextlib.closing(websocket.create_connection(url, timeout=PATIENCE_S)) as channel:
        assert "session_id" in json.loads(channel.recv())


def wait_for_lines(log: io.StringIO, name: str, count: int = 1) -> list[str]:
    until(lambda: len(lines(log, name)) >= count)
    return lines(log, name)


# The headers


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("PUT", "/ping", 405),
        ("GET", f"/results/{UNKNOWN}", 403),
        ("POST", "/request", 400),
        ("GET", "/admin/status", 401),
        ("GET", "/subscribe", 404),
        ("GET", "/models/no/model", 404),
        ("GET", "/models/", 404),
    ],
)
def test_rejection_by_route_has_usual_form(
    server: Gateway, method: str, path: str, status: int
) -> None:
    answer = httpx.request(method, server.url + path)
    check(answer.status_code, answer.headers, answer.content)
    assert answer.status_code == status


def test_answers_with_user_data_are_not_cached(server: Gateway) -> None:
    with_token = {"Authorization": f"Bearer {TOKEN}"}
    job = server.submit().json()["id"]
    for path in ("/whoami", f"/response/{job}", "/admin/config", "/status", "/ping"):
        answer = get(server.url + path, headers=with_token)
        assert answer.status_code == 200
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "Server" not in answer.headers
    assert server.submit().headers["Cache-Control"] == "no-store"
    # Hub files have an ETag, so clients and proxies may cache them.
    hub = get(f"{server.url}/hub/api/models/no/model")
    assert "Cache-Control" not in hub.headers
    assert hub.headers["X-Content-Type-Options"] == "nosniff"


def test_hsts_header_is_sent_only_with_https_url(runtimes: Path, tmp_path: Path) -> None:
    for public, expected in (
        ("https://ndif.example.org", "max-age=31536000"),
        ("http://ndif.example.org", None),
    ):
        with gateway(tmp_path / public[:5], runtimes, public_url=public) as server:
            for path in ("/ping", "/nothing", "/hub/api/models/a"):
                headers = get(server.url + path).headers
                assert headers.get("Strict-Transport-Security") == expected


# Failures of the server


def test_failure_sends_sentence_and_logs_traceback(failing: str, log: io.StringIO) -> None:
    answer = get(f"{failing}/fails", headers={"X-Request-Id": "fails"})
    assert answer.status_code == 500
    assert answer.headers["X-Request-Id"] == "fails"
    detail = check(answer.status_code, answer.headers, answer.content)
    assert detail == "The server failed at this request; its log says why."
    http, uvicorns = wait_for_lines(log, "fails", 2)
    assert "GET /fails 500" in http
    assert "ERROR uvicorn.error [fails]: Exception in ASGI application" in uvicorns
    assert "ValueError: a secret of the server" in log.getvalue()


def test_failure_during_answer_closes_connection(failing: str) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        get(f"{failing}/fails/late")


def test_failure_before_websocket_opens_shows_no_details(failing: str, log: io.StringIO) -> None:
    with pytest.raises(websocket.WebSocketBadStatusException) as caught:
        websocket.create_connection(
            f"{failing.replace('http', 'ws')}/fails/live",
            header={"X-Request-Id": "fails-live"},
            timeout=PATIENCE_S,
        )
    error = caught.value
    check(error.status_code, error.resp_headers, error.resp_body)
    assert error.status_code == 500
    assert error.resp_headers["x-request-id"] == "fails-live"
    http, uvicorns = wait_for_lines(log, "fails-live", 2)
    assert "WebSocket /fails/live unanswered" in http
    assert "Exception in ASGI application" in uvicorns


def test_request_interrupted_by_stop_is_answered(log: io.StringIO) -> None:
    begun = threading.Event()

    async def hang(_: Request) -> Response:
        begun.set()
        await asyncio.Event().wait()
        return Response()

    options = Settings()
    app = create_app(
        [Route("/hangs", hang)],
        SocketIoSubscriptions(MemoryBroker(), OpenChannels(options), options),
        HfMirror(share_weights=False),
        None,  # type: ignore[arg-type]
        options,
        host="127.0.0.1",
    )
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as threads:
        config = uvicorn_config(app, Incoming(options), options, listening)
        config.timeout_graceful_shutdown = 0
        with serving_on(config, listening) as url:
            asked = threads.submit(get, f"{url}/hangs", headers={"X-Request-Id": "hangs"})
            assert begun.wait(PATIENCE_S)
        answer = asked.result(PATIENCE_S)
    assert answer.status_code == 503
    assert "was stopped" in check(answer.status_code, answer.headers, answer.content)
    assert answer.headers["Retry-After"] == "5"
    assert any("GET /hangs 503" in line for line in lines(log, "hangs"))


# Requests that reach no route

HEAD = b"GET /ping HTTP/1.1\r\nHost: 127.0.0.1\r\n"
UPGRADE = (
    b"GET /subscribe HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


@pytest.mark.parametrize(
    ("sent", "status", "says"),
    [
        (b"GARBAGE\r\n\r\n", 400, "not valid HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "not valid HTTP"),
        (HEAD + b"Content-Length: -5\r\n\r\n", 400, "not valid HTTP"),
        (HEAD + b"a: b\x00c\r\n\r\n", 400, "not valid HTTP"),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414, "too long"),
        (b"GET /?" + b"x" * 70_000, 414, "too long"),
        (HEAD + b"a: b\r\n" * 256 + b"\r\n", 431, "there may be 256"),
        (HEAD + b"a: " + b"x" * 140_000 + b"\r\n\r\n", 431, "there may be 128 KiB"),
        (UPGRADE + b"a: " + b"x" * 9000 + b"\r\n\r\n", 400, "at most 8 KiB"),
        (UPGRADE + b"a: b\r\n" * 130 + b"\r\n", 400, "at most 128 headers"),
        (UPGRADE.replace(b"GET", b"POST") + b"\r\n", 405, "unsupported HTTP method"),
        (UPGRADE.replace(b"Version: 13", b"Version: 7") + b"\r\n", 400, "Sec-WebSocket-Version"),
        (UPGRADE.replace(b"AAAA", b"A") + b"\r\n", 400, "Sec-WebSocket-Key"),
        (UPGRADE.replace(b"127.0.0.1", b"evil.example") + b"\r\n", 403, "evil.example"),
        (
            UPGRADE.replace(b"/subscribe", b"/status") + b"\r\n",
            404,
            "No WebSocket opens at /status",
        ),
        (UPGRADE + b"Origin: https://evil.example\r\n\r\n", 403, "another site"),
    ],
    ids=lambda value: ascii(value)[-30:] if isinstance(value, bytes) else str(value),
)
def test_requests_that_reach_no_route_are_rejected_in_usual_form(
    server: Gateway, sent: bytes, status: int, says: str
) -> None:
    got_status, headers, body = raw(server.url, sent)
    assert got_status == status
    if says:
        assert says in check(got_status, headers, body)
    assert get(f"{server.url}/ping").json() == "pong"


def test_request_with_maximum_number_of_headers_is_answered(server: Gateway) -> None:
    status, headers, _ = raw(server.url, HEAD + b"a: b\r\n" * 254 + b"Connection: close\r\n\r\n")
    assert status == 200
    assert MADE.fullmatch(headers["x-request-id"])


def test_trailer_does_not_count_as_header(server: Gateway) -> None:
    sent = (
        b"GET /admin/config HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
        b"Connection: close\r\nTrailer: Authorization\r\n\r\n0\r\nAuthorization: Bearer "
        + TOKEN.encode()
        + b"\r\n\r\n"
    )
    assert raw(server.url, sent)[0] == 400


def test_rejected_handshake_returns_request_id_of_client(server: Gateway, log: io.StringIO) -> None:
    sent = UPGRADE.replace(b"Version: 13", b"Version: 7") + b"X-Request-Id: shakes\r\n\r\n"
    assert raw(server.url, sent)[1]["x-request-id"] == "shakes"


# Heads of any kind

NAMES = (
    *("Host", "Origin", "Connection", "Upgrade", "Content-Length", "Transfer-Encoding", "Expect"),
    *("Sec-WebSocket-Key", "Sec-WebSocket-Version", "Sec-WebSocket-Protocol", "Authorization"),
    *("Range", "X-Request-Id", "X-Forwarded-For", "Forwarded", "Content-Type", "Cookie", "Trailer"),
    *("Access-Control-Request-Method", "Access-Control-Request-Headers", "If-None-Match"),
    *("ndif-api-key", "nnsight-model-key", "nnsight-version", "ndif-session_id", "python-version"),
)
VALUES = (
    *("127.0.0.1", "evil.example", "https://evil.example", "null", "close", "keep-alive, Upgrade"),
    *("websocket", "h2c", "0", "7", "-1", "99999999999999999999", "chunked", "100-continue", "13"),
    *("AAAAAAAAAAAAAAAAAAAAAA==", f"Bearer {TOKEN}", "Bearer", "bytes=0-", "bytes=9-1,0-0", "mine"),
    *("multipart/form-data; boundary=x", "GET", "*", "", "0.8.1", "0.7.0", "[::1", "a:b:c"),
)
PATHS = (
    *("/request", "/subscribe", "/ws/socket.io/?EIO=4&transport=websocket", "/ping", "/status"),
    *("/admin/config", "/admin/deploy", f"/response/{UNKNOWN}", f"/results/{UNKNOWN}?once"),
    *(
        "/hub/api/models/a/b",
        "/hub/a/resolve/main/%2e%2e",
        "/docs",
        "*",
        "//",
        "http://evil.example/",
    ),
)
LATIN = st.text(st.characters(codec="latin-1", exclude_characters="\r\n"), max_size=40)


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    """Draw a request head with usual and unusual parts."""
    method = draw(st.sampled_from(["GET", "POST", "OPTIONS", "HEAD", "PUT", "CONNECT", "BREW"]))
    path = draw(st.sampled_from(PATHS) | LATIN)
    lines = [f"{method} {path} HTTP/{draw(st.sampled_from(['1.1', '1.1', '1.0', '2.0']))}"]
    header = st.tuples(st.sampled_from(NAMES) | LATIN, st.sampled_from(VALUES) | LATIN)
    headers = draw(st.lists(header, max_size=8))
    if draw(st.booleans()):
        headers = [("Host", "127.0.0.1"), *headers]
    lines += [f"{name}: {value}" for name, value in headers]
    content = bytearray("\r\n".join(lines).encode("latin-1"))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(content) - 1))
        content[at : at + 1] = draw(st.binary(max_size=3))
    return bytes(content) + b"\r\n\r\n"


@pytest.fixture(scope="module")
def hasty(runtimes: Path, tmp_path_factory: pytest.TempPathFactory, log: Any) -> Iterator[Gateway]:
    """A server with a short timeout for incomplete requests."""
    folder = tmp_path_factory.mktemp("results")
    whose = Operator(TOKEN)
    with gateway(folder, runtimes, whose=whose, incoming_idle_s=0.2) as running_server:
        yield running_server


@settings(suppress_health_check=list(HealthCheck))
@given(heads())
def test_any_request_head_has_answer_in_usual_form(hasty: Gateway, head: bytes) -> None:
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=PATIENCE_S) as connection:
        connection.sendall(head)
        answer = http.client.HTTPResponse(connection, method="HEAD" if head[:4] == b"HEAD" else "")
        try:
            answer.begin()
        except http.client.RemoteDisconnected:
            return  # the server waited for the rest of the request
        body = answer.read() if answer.status != 101 else b""
    assert answer.status < 500 or answer.status == 503
    assert re.fullmatch(r"[\w.:-]{1,64}", answer.headers["X-Request-Id"])
    assert answer.headers["X-Content-Type-Options"] == "nosniff" or answer.status == 101
    assert "Server" not in answer.headers
    assert answer.headers.get_content_type() in ("application/json", "text/html", "text/plain")
    if answer.status >= 400 and body and answer.headers.get_content_type() == "application/json":
        refusal = json.loads(body)
        assert len(refusal) == 1
        assert not any(secret in body for secret in (b"Traceback", b"site-packages", b".py"))


def test_random_request_heads_caused_no_failure(hasty: Gateway, log: io.StringIO) -> None:
    meant = log.getvalue().count("\nValueError: a secret of the server")
    assert log.getvalue().count("Traceback") == meant > 0
    assert get(f"{hasty.url}/ping").json() == "pong"
