"""Ambiguous HTTP, which proxies and servers read in different ways, is refused on both ports."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from ndif.config.settings import Settings
from ndif.server.embedded import Operator, Server
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.process

HOST = b"Host: 127.0.0.1\r\n"
GET = b"GET /ping HTTP/1.1\r\n"
POST = b"POST /ping HTTP/1.1\r\n" + HOST
CHUNKED = b"Transfer-Encoding: chunked\r\n"
HEAD = POST + CHUNKED + b"\r\n"
"""Head of a request whose body comes in chunks."""
NEXT = b"GET /ping HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
"""A request that some readers find in the body of the one before."""

REFUSED = {
    "folded header": GET + HOST + b"X-A: b\r\n c\r\n\r\n",
    "folded with a tab": GET + HOST + b"X-A: b\r\n\tc\r\n\r\n",
    "folded first header": GET + b" X-A: b\r\n" + HOST + b"\r\n",
    "folded empty header": GET + HOST + b"X-A:\r\n b\r\n\r\n",
    "folded Transfer-Encoding": POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "folded Content-Length": POST + b"Content-Length:\r\n 3\r\n\r\nabc",
    "folded blank line": GET + HOST + b"X-A: b\r\n \r\n\r\n",
    "folded trailer": HEAD + b"0\r\nX-A: b\r\n c\r\n\r\n",
    "line feeds alone": b"GET /ping HTTP/1.1\nHost: 127.0.0.1\n\n",
    "line feed after request line": b"GET /ping HTTP/1.1\n" + HOST + b"\r\n",
    "line feed after header": GET + b"Host: 127.0.0.1\nX-A: b\r\n\r\n",
    "line feed after empty header": GET + HOST + b"X-A:\nX-B: c\r\n\r\n",
    "line feed after head": GET + HOST + b"\n",
    "line feed after size of chunk": HEAD + b"3\nabc\r\n0\r\n\r\n",
    "line feed after chunk": HEAD + b"3\r\nabc\n0\r\n\r\n",
    "line feed after extension": HEAD + b"3;a\nabc\r\n0\r\n\r\n",
    "line feed after last chunk": HEAD + b"0\r\n\n",
    "carriage return in header": GET + HOST + b"X-A: b\rX-B: c\r\n\r\n",
    "two lengths, different": POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
    "two lengths, equal": POST + b"Content-Length: 3\r\ncontent-length: 3\r\n\r\nabc",
    "list of lengths": POST + b"Content-Length: 3, 3\r\n\r\nabc",
    "signed length": POST + b"Content-Length: +3\r\n\r\nabc",
    "hexadecimal length": POST + b"Content-Length: 0x3\r\n\r\nabc",
    "empty length": POST + b"Content-Length:\r\n\r\n",
    "length, then encoding": POST + b"Content-Length: 3\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
    "encoding, then length": POST + CHUNKED + b"Content-Length: 3\r\n\r\n0\r\n\r\n",
    "length in trailer": HEAD + b"0\r\nContent-Length: 3\r\n\r\nabc",
    "identity": POST + b"Transfer-Encoding: identity\r\n\r\n",
    "chunked, identity": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "identity and chunked": POST + b"Transfer-Encoding: identity\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
    "chunked twice": POST + CHUNKED + CHUNKED + b"\r\n0\r\n\r\n",
    "gzip, chunked": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "xchunked": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "encoding in HTTP/1.0": HEAD.replace(b"1.1", b"1.0") + b"0\r\n\r\n",
    "hexadecimal size of chunk": HEAD + b"0x3\r\nabc\r\n0\r\n\r\n",
    "two hosts, different": GET + HOST + b"Host: localhost\r\n\r\n",
    "two hosts, equal": GET + HOST + b"host: 127.0.0.1\r\n\r\n",
    "two hosts of a handshake": GET.replace(b"/ping", b"/subscribe")
    + HOST
    + HOST
    + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    + b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
    "space before colon": GET + HOST + b"X-A : b\r\n\r\n",
    "tab before colon": GET + HOST + b"X-A\t: b\r\n\r\n",
    "space before colon of length": POST + b"Content-Length : 3\r\n\r\nabc",
    "space before colon of encoding": POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "space before colon of host": GET + b"Host : 127.0.0.1\r\n\r\n",
    "host in trailer": HEAD + b"0\r\nHost: localhost\r\n\r\n",
    "key in trailer": HEAD + b"0\r\nndif-api-key: a\r\n\r\n",
    "token in trailer": HEAD + b"0\r\nAuthorization: Bearer a\r\n\r\n",
    "cookie in trailer": HEAD + b"0\r\nCookie: a=b\r\n\r\n",
    "address in trailer": HEAD + b"0\r\nX-Forwarded-For: 10.0.0.1\r\n\r\n",
    "encoding in trailer": HEAD + b"0\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
    "upgrade in trailer": HEAD + b"0\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
}
ACCEPTED = {
    "length": (POST + b"Content-Length: 3\r\n\r\nabc", 405),
    "chunks": (HEAD + b"3\r\nabc\r\n0\r\n\r\n", 405),
    "encoding in other letters": (HEAD.replace(b"chunked", b"Chunked") + b"0\r\n\r\n", 405),
    "space around encoding": (HEAD.replace(b"chunked", b" chunked ") + b"0\r\n\r\n", 405),
    "extension of chunk": (HEAD + b"3;a=b\r\nabc\r\n0\r\n\r\n", 405),
    "checksum in trailer": (HEAD + b"0\r\nContent-Digest: a\r\n\r\n", 405),
    "space after colon and value": (GET + HOST + b"X-A:  b \r\n\r\n", 200),
}


@pytest.fixture(scope="module")
def ports(runtimes: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """The ports of one server, for users and for operators."""
    settings = Settings(runtimes_dir=runtimes, dev_mode=True)
    with (
        socket.create_server(("127.0.0.1", 0)) as users,
        socket.create_server(("127.0.0.1", 0)) as operators,
    ):
        whose = Operator("a token", admin=operators)
        folder = tmp_path_factory.mktemp("results")
        config = Server(settings, [], folder, whose, host="127.0.0.1").uvicorn_config(users)
        config.lifespan = "off"
        http = uvicorn.Server(config)
        thread = threading.Thread(target=http.run, args=([users, operators],), daemon=True)
        thread.start()
        until(lambda: http.started)
        yield {"users": users.getsockname()[1], "operators": operators.getsockname()[1]}
        http.should_exit = True
        thread.join(PATIENCE_S)


def statuses(port: int, *parts: bytes) -> list[int]:
    """Send parts, each after an answer to the part before; return the statuses until the server closes."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection,
        connection.makefile("rb") as received,
    ):
        *begun, last = parts
        answers = b""
        for part in begun:
            connection.sendall(part)
            answers += received.readline()
        connection.sendall(last)
        answers += received.read()
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answers)]


@pytest.mark.parametrize("port", ["users", "operators"])
@pytest.mark.parametrize("request_", REFUSED.values(), ids=REFUSED.keys())
def test_ambiguous_request_is_refused_and_connection_closed(
    ports: dict[str, int], port: str, request_: bytes
) -> None:
    assert statuses(ports[port], request_ + NEXT) == [400]


@pytest.mark.parametrize("port", ["users", "operators"])
@pytest.mark.parametrize(("request_", "status"), ACCEPTED.values(), ids=ACCEPTED.keys())
def test_clear_request_is_answered_and_connection_kept(
    ports: dict[str, int], port: str, request_: bytes, status: int
) -> None:
    assert statuses(ports[port], request_ + NEXT) == [status, 200]


def test_request_that_turns_ambiguous_after_its_answer_gets_no_second_answer(
    ports: dict[str, int],
) -> None:
    for rest in (b"0\r\nHost: localhost\r\n\r\n", b"3\nabc", b"0\r\nA: b\r\n c\r\n\r\n"):
        assert statuses(ports["users"], HEAD, rest + NEXT) == [405]
