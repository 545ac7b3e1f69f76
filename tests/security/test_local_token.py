"""A local server, attacked by other users of its machine and from outside; its owner needs no token."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import socketio

from ndif.gateway.peer import uid_of
from ndif.server.embedded import Owner
from ndif.stores.accounts import Caller, NoSuchKeyError, OwnerAccounts
from tests.clients.harness import Client, LocalServer
from tests.conftest import NAME, client_environment
from tests.on_loop import on_loop
from tests.security.serving import (
    SOMEBODY,
    Gateway,
    gateway,
    get,
    needs_root,
    own_address,
    user,
)
from tests.waiting import time_passes, until

pytestmark = pytest.mark.process

TOKEN = "the-token-of-this-server"
UNKNOWN = "00000000-0000-4000-8000-000000000000"


@pytest.fixture(scope="module")
def local(runtimes: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A local server that listens on every address."""
    whose = Owner(trusted=True, token=TOKEN)
    folder = tmp_path_factory.mktemp("results")
    with gateway(folder, runtimes, host="::", whose=whose) as started:
        yield started


def subscribe(local: Gateway, **headers: str) -> int:
    return local.subscribe(headers)


def poll(local: Gateway, **headers: str) -> int:
    return get(f"{local.url}/response/{UNKNOWN}", headers=headers).status_code


ROUTES: dict[str, tuple[Callable[..., int], int]] = {
    "a job of 0.8": (lambda local, **headers: local.submit(**headers).status_code, 200),
    "a job of 0.7": (lambda local, **headers: local.submit_old(**headers).status_code, 200),
    "the live channel of 0.8": (subscribe, 101),
    "somebody's response": (poll, 200),
}
"""Requests of a client, and the answer to an admitted client."""

ATTACKS: dict[str, dict[str, str]] = {
    "without a key": {},
    "with a key for another server": {"ndif-api-key": "0123456789abcdef"},
    "with the token's beginning": {"ndif-api-key": TOKEN[:-1]},
    "with an empty key": {"ndif-api-key": ""},
    "with the token where an operator's is": {"authorization": f"Bearer {TOKEN}"},
    "as if a proxy passed on what the owner sends": {"x-forwarded-for": "127.0.0.1"},
}


@needs_root
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("route", ROUTES)
def test_another_local_user_without_token_is_rejected(
    local: Gateway, route: str, attack: str
) -> None:
    ask, _ = ROUTES[route]
    with user(SOMEBODY):
        assert ask(local, **ATTACKS[attack]) == 401


@needs_root
def test_non_text_key_is_rejected(local: Gateway) -> None:
    lines = f"GET /response/{UNKNOWN} HTTP/1.1\r\nHost: localhost\r\nndif-api-key: ".encode()
    with user(SOMEBODY), socket.create_connection(("127.0.0.1", local.port)) as client:
        client.sendall(lines + b"\xe9\xff\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("headers", [{}, {"ndif-api-key": "a-key-of-the-public-server"}])
def test_owner_needs_no_token(local: Gateway, route: str, headers: dict[str, str]) -> None:
    ask, right = ROUTES[route]
    assert ask(local, **headers) == right


@needs_root
@pytest.mark.parametrize("route", ROUTES)
def test_another_local_user_with_token_is_admitted(local: Gateway, route: str) -> None:
    ask, right = ROUTES[route]
    with user(SOMEBODY):
        assert ask(local, **{"ndif-api-key": TOKEN}) == right


def test_rejection_names_line_that_exports_token(local: Gateway) -> None:
    with user(SOMEBODY) if os.geteuid() == 0 else contextlib.nullcontext():
        answer = local.submit(**{"x-real-ip": "10.0.0.1"})
    assert answer.status_code == 401
    assert "`export NDIF_API_KEY=…` that `ndif local start` printed" in answer.json()["detail"]
    assert TOKEN not in answer.text


@pytest.mark.parametrize(
    "header",
    ["X-Forwarded-For", "x-forwarded-proto", "X-Forwarded-Host", "Forwarded", "X-Real-IP", "Via"],
)
def test_request_through_owners_proxy_needs_token(local: Gateway, header: str) -> None:
    assert local.submit(**{header: "127.0.0.1"}).status_code == 401
    assert local.submit(**{header: "127.0.0.1", "ndif-api-key": TOKEN}).status_code == 200


def test_forwarded_address_cannot_claim_owners_connection(runtimes: Path, tmp_path: Path) -> None:
    """A trusted proxy's header names the port of one of the owner's open connections."""
    whose = Owner(trusted=True, token=TOKEN)
    with (
        gateway(tmp_path, runtimes, whose=whose, public_url="http://a.example") as local,
        socket.create_connection(("127.0.0.1", local.port)) as owners,
    ):
        borrowed = f"127.0.0.1:{owners.getsockname()[1]}"
        assert local.submit(**{"X-Forwarded-For": borrowed}).status_code == 401


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "[::1]", "localhost"])
def test_every_loopback_address_identifies_owner(local: Gateway, host: str) -> None:
    assert local.submit(f"http://{host}:{local.port}").status_code == 200
    if os.geteuid() == 0:
        with user(SOMEBODY):
            assert local.submit(f"http://{host}:{local.port}").status_code == 401


@pytest.mark.skipif(own_address() is None, reason="this machine has no other address")
def test_owner_needs_token_on_non_loopback_address(local: Gateway) -> None:
    url = f"http://{own_address()}:{local.port}"
    assert local.submit(url).status_code == 401
    assert local.submit(url, **{"ndif-api-key": TOKEN}).status_code == 200


@needs_root
def test_socket_io_channel_without_token_accepts_no_job(local: Gateway) -> None:
    """Clients of 0.7 and 0.6 send no key when they open a channel."""
    with user(SOMEBODY), socketio.SimpleClient() as channel:
        channel.connect(local.url, socketio_path="/ws/socket.io", transports=["websocket"])
        assert local.submit_old(session=channel.sid).status_code == 401
        key = {"ndif-api-key": TOKEN}
        assert local.submit_old(session=channel.sid, **key).status_code == 200


def test_public_routes_need_no_token(local: Gateway) -> None:
    """nnsight.status() and huggingface_hub send no key."""
    headers = {"x-forwarded-for": "10.0.0.1"}
    for path in ("ping", "status", "env", "hub/api/models/no/such"):
        assert get(f"{local.url}/{path}", headers=headers).status_code in (200, 404)


# The user of a connection


@needs_root
@pytest.mark.parametrize(
    "family", [socket.AF_INET, socket.AF_INET6], ids=["to an IPv4 address", "to a mapped address"]
)
def test_connection_belongs_to_user_who_opened_it(family: socket.AddressFamily) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for uid in (0, SOMEBODY):
            with user(uid):
                client = socket.socket(family)
                client.connect(
                    ("127.0.0.1" if family is socket.AF_INET else "::ffff:127.0.0.1", port)
                )
            accepted, address = server.accept()
            with client, accepted:
                assert uid_of(address, accepted.getsockname()) == uid
                client.shutdown(socket.SHUT_WR)  # the client has sent everything, and still reads
                assert uid_of(address, accepted.getsockname()) == uid


@needs_root
def test_connection_closed_by_its_process_has_no_user() -> None:
    """The kernel reports root for such a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, user(SOMEBODY):
        client = socket.create_connection(server.getsockname())
        accepted, address = server.accept()
        with accepted:
            client.close()
            assert uid_of(address, accepted.getsockname()) is None
        client = socket.create_connection(server.getsockname())
        accepted, address = server.accept()
        with accepted:
            client.shutdown(socket.SHUT_WR)
            client.close()
            assert uid_of(address, accepted.getsockname()) is None


@needs_root
def test_listening_port_of_owner_is_not_owners_connection() -> None:
    with (
        socket.create_server(("0.0.0.0", 0)) as owners,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        address = ("127.0.0.3", owners.getsockname()[1])
        assert uid_of(address, server.getsockname()) is None


@needs_root
def test_kernels_overflow_user_is_unknown() -> None:
    """In a container, this user stands for every user without a number there."""
    uid = int(Path("/proc/sys/kernel/overflowuid").read_text())
    with socket.create_server(("127.0.0.1", 0)) as server:
        with user(uid):
            client = socket.create_connection(server.getsockname())
        accepted, address = server.accept()
        with client, accepted:
            assert uid_of(address, accepted.getsockname()) is None


@needs_root
def test_kernels_list_gives_same_users_without_sock_diag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ndif.gateway.peer._SOCK_DIAG", 31)  # a nonexistent protocol
    test_connection_closed_by_its_process_has_no_user()
    test_listening_port_of_owner_is_not_owners_connection()
    for family in (socket.AF_INET, socket.AF_INET6):
        test_connection_belongs_to_user_who_opened_it(family)


def test_uid_lookup_is_cheap_among_many_sockets() -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1024))
        for _ in range(800):
            stack.enter_context(socket.create_connection(server.getsockname()))
            accepted, address = server.accept()
            stack.enter_context(accepted)
        took, took_all = [], []
        for _ in range(21):
            begun = time.perf_counter()
            assert uid_of(address, accepted.getsockname()) == os.geteuid()
            took.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            Path("/proc/net/tcp").read_bytes()
            took_all.append(time.perf_counter() - begun)
        assert sorted(took)[10] < sorted(took_all)[10] / 10, "it reads the list of them all"


@on_loop
async def test_server_of_non_root_user_admits_that_user_and_root() -> None:
    accounts = OwnerAccounts(SOMEBODY, TOKEN, trusted=True)
    for uid in (SOMEBODY, 0):
        assert (await accounts.account(Caller(uid=uid))).trusted
    for uid in (SOMEBODY - 1, None):
        with pytest.raises(NoSuchKeyError):
            await accounts.account(Caller(uid=uid, address="127.0.0.1"))


# A real server and real clients


def token_of(server: LocalServer) -> str:
    """Return the token in the lines that a server printed."""

    def find_token() -> str | None:
        lines = (re.search(r"export NDIF_API_KEY=(\w+)  ", line) for line in [*server.output])
        return next((line[1] for line in lines if line), None)

    token: str = until(find_token)
    return token


@needs_root
def test_client_gone_before_identification_gets_no_job(server: LocalServer) -> None:
    """The kernel reports root for the connection by then."""
    body = (
        "POST /request HTTP/1.1\r\nHost: 127.0.0.1\r\nnnsight-version: 0.7.0\r\n"
        "nnsight-model-key: nnsight.modeling.language.LanguageModel:"
        f"{json.dumps({'repo_id': NAME, 'revision': None})}\r\nnnsight-compress: False\r\n"
        "Content-Length: 7\r\n\r\ngarbage"
    )
    port = httpx.URL(server.url).port
    folder = Path(server.environment["NDIF_SESSION_ROOT"], "local", str(port), "responses")
    before = set(folder.glob("*"))
    for uid, jobs in ((0, 1), (SOMEBODY, 0)):
        server.process.send_signal(signal.SIGSTOP)
        try:
            with user(uid):
                client = socket.create_connection(("127.0.0.1", port))
                client.sendall(body.encode())
                if uid:
                    client.close()
        finally:
            server.process.send_signal(signal.SIGCONT)
        assert server.get("/ping")[0] == 200
        if jobs:
            until(lambda before=before: set(folder.glob("*")) - before)
        else:
            time_passes(0.3)
        assert len(set(folder.glob("*")) - before) == jobs
        before = set(folder.glob("*"))
        client.close()


@needs_root
@pytest.mark.parametrize("generation", ["0.8", "0.7"])
def test_real_client_of_another_user_needs_printed_token(
    server: LocalServer,
    tiny_gpt2: Path,
    runtimes: Path,
    tmp_path: Path,
    generation: str,
) -> None:
    overlay = None if generation == "0.8" else runtimes / generation
    environment = client_environment(server, tmp_path, overlay)
    environment["TEST_TOKEN"] = token_of(server)
    environment["TEST_USER"] = str(SOMEBODY)
    client = Client("scenarios_other_user", NAME, tiny_gpt2, environment)
    try:
        client.run("scenario_the_token_lets_in")
    finally:
        client.close()
