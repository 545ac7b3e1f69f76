"""The origin check: web pages of other sites cannot reach a server that trusts its user."""

from __future__ import annotations

import httpx
import pytest
import websocket

from tests.clients.harness import LocalServer


def ask(server: LocalServer, headers: dict[str, str]) -> httpx.Response:
    return httpx.post(f"{server.url}/request", headers=headers, content=b"x")


def test_a_foreign_page_cannot_submit(server: LocalServer) -> None:
    answer = ask(server, {"Origin": "https://evil.example"})
    assert answer.status_code == 403
    assert "web page of another site" in answer.json()["detail"]


def test_a_site_whose_name_resolves_to_loopback_is_refused(server: LocalServer) -> None:
    port = httpx.URL(server.url).port
    host = f"evil.example:{port}"
    assert ask(server, {"Host": host}).status_code == 403
    assert ask(server, {"Host": host, "Origin": f"http://{host}"}).status_code == 403


def test_programs_on_this_machine_are_allowed(server: LocalServer) -> None:
    port = httpx.URL(server.url).port
    for headers in ({}, {"Origin": server.url}, {"Host": f"localhost:{port}"}):
        assert ask(server, headers).status_code == 400


def test_a_foreign_page_cannot_open_a_websocket(server: LocalServer) -> None:
    address = server.url.replace("http", "ws") + "/subscribe"
    websocket.create_connection(address, timeout=10).close()
    with pytest.raises(websocket.WebSocketBadStatusException, match="403"):
        websocket.create_connection(address, origin="https://evil.example", timeout=10)


def test_a_foreign_page_cannot_open_socket_io(server: LocalServer) -> None:
    address = f"{server.url}/ws/socket.io/?EIO=4&transport=polling"
    assert httpx.get(address).status_code == 200
    assert httpx.get(address, headers={"Origin": "https://evil.example"}).status_code == 403
