"""Peers on the command line, and the clients that measure each peer."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from bench.clients.socket_io_user import SocketIoUser
from bench.scenario import CLIENTS, Server, Site
from bench.servers import processes

from tests.clients.harness import LocalServer
from tests.conftest import NAME

pytestmark = pytest.mark.process

URL = "http://127.0.0.1:5001"
SITE = Site(Path("checkpoint"), {}, (Server("one", URL), Server("two", URL, clients=("0.6.1",))))


@pytest.mark.parametrize(
    ("text", "server"),
    [
        (f"one={URL}/", Server("one", URL)),
        (f"one={URL}#a-key", Server("one", URL, "a-key")),
        (f"one={URL}@0.6", Server("one", URL, clients=("0.6",))),
        (f"one={URL}#a@key@0.6.1", Server("one", URL, "a@key", ("0.6.1",))),
        ("one=https://user@host", Server("one", "https://user@host")),
    ],
)
def test_peer_argument_parses_key_and_nnsight_versions(text: str, server: Server) -> None:
    assert Server.parse(text) == server


@pytest.mark.parametrize("text", [URL, "one=ftp://host", f"={URL}", "one="])
def test_malformed_peer_argument_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="is not NAME=URL"):
        Server.parse(text)


def test_peer_is_measured_only_with_clients_it_serves() -> None:
    assert SITE.clients == (*CLIENTS, "0.6.1")
    assert [peer.name for peer in SITE.peers_of("0.8")] == ["one"]
    assert [peer.name for peer in SITE.peers_of("0.6.1")] == ["two"]


def test_light_client_runs_payload_of_older_nnsight(
    server: LocalServer, runtimes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_RUNTIMES", runtimes)
    request = json.loads(processes.client("payload", "0.7", server.url, "tiny", runs=NAME).stdout)
    user = SocketIoUser(urlsplit(server.url).port or 0, request["key"], request["nnsight"])

    async def run() -> None:
        await user.connect()
        await user.run(base64.b64decode(request["payload"]))
        with pytest.raises(RuntimeError, match="could not be read"):
            await user.run(b"no payload")
        user.close()

    asyncio.run(run())
