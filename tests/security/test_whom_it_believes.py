"""False claims to a server: in headers, by unconfigured proxies, and about other users."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import socketio
import websocket
from hypothesis import HealthCheck, given
from hypothesis import settings as how
from hypothesis import strategies as st

from ndif.schema.callback import callback_for
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.server.embedded import Operator
from ndif.stores.broker import MemoryBroker
from ndif.stores.objects.port import result_key
from ndif.stores.responder import Responder
from ndif.tasks import end
from tests.fuzzing import examples
from tests.on_loop import on_loop
from tests.security.serving import (
    OLD,
    PAYLOAD,
    SOMEBODY,
    Gateway,
    gateway,
    get,
    needs_root,
    own_address,
    post,
    user,
)
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.process

ADA = {"ndif-api-key": "the-key-of-ada"}
BOB = {"ndif-api-key": "the-key-of-bob"}
KEYS = "keys:\n- {key: the-key-of-ada, user: ada}\n- {key: the-key-of-bob, user: bob}\n"
KEYS += "- {key: ada-s-other-key, user: ada}\n"


@pytest.fixture(scope="module")
def served(runtimes: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A server for many users without keys, which listens on every address."""
    folder = tmp_path_factory.mktemp("results")
    with gateway(folder, runtimes, host="0.0.0.0", whose=Operator()) as started:
        yield started


@pytest.fixture(scope="module")
def proxied(runtimes: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A server behind a proxy of this machine, with a public name."""
    folder, names = tmp_path_factory.mktemp("results"), "ndif.example.org"
    whose = Operator()
    with gateway(folder, runtimes, whose=whose, allowed_hosts=names) as started:
        yield started


@pytest.fixture(scope="module")
def keyed(runtimes: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A server whose users have keys."""
    folder = tmp_path_factory.mktemp("results")
    keys = folder / "keys.yaml"
    keys.write_text(KEYS)
    with gateway(folder, runtimes, whose=Operator(), api_keys=keys) as started:
        yield started


# Addresses of results


def without_host(
    served: Gateway, address: str, host: str | None, target: str = "/request"
) -> httpx.Response:
    """Send a job as nnsight 0.7 does over a bare connection: HTTP/1.0, and Host only if it is given."""
    headers = {"nnsight-version": "0.7.0", "nnsight-model-key": OLD}
    headers |= {"Content-Length": str(len(PAYLOAD)), **({} if host is None else {"Host": host})}
    lines = [f"POST {target} HTTP/1.0", *(f"{name}: {value}" for name, value in headers.items())]
    head = "\r\n".join([*lines, "", ""]).encode()
    with socket.create_connection((address, served.port), timeout=PATIENCE_S) as connection:
        connection.sendall(head + PAYLOAD)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    return httpx.Response(int(head.split()[1]), content=body)


def base_url(served: Gateway, url: str = "", **headers: str) -> str:
    """Return the base of a job's result addresses."""
    return served.accepted(served.submit(url, **headers)).base_url


def test_result_address_uses_requested_host(served: Gateway) -> None:
    reached = ["127.0.0.1", "127.0.0.9", "localhost", own_address() or "127.0.0.1"]
    for host in reached:
        url = f"http://{host}:{served.port}"
        assert base_url(served, url) == url
    # For example through an SSH tunnel.
    assert base_url(served, Host="localhost:9000") == "http://localhost:9000"
    assert (
        base_url(served, Host=f"{socket.gethostname()}:80") == f"http://{socket.gethostname()}:80"
    )


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8001", "203.0.113.9", "203.0.113.9:8001", "[2001:db8::9]"],
)
@pytest.mark.parametrize("over", ["loopback", "its own address"])
def test_foreign_host_header_is_rejected(served: Gateway, host: str, over: str) -> None:
    address = "127.0.0.1" if over == "loopback" else own_address() or "127.0.0.1"
    refused = served.submit(f"http://{address}:{served.port}", Host=host)
    assert refused.status_code == 403
    assert "NDIF_ALLOWED_HOSTS" in refused.json()["detail"]
    assert repr(host) in refused.json()["detail"]


def test_health_check_accepts_any_host(served: Gateway) -> None:
    assert get(f"{served.url}/ping", headers={"Host": "203.0.113.9"}).status_code == 200


FOREIGN = [
    "evil.example:80",
    "evil.localhost",
    "203.0.113.9",
    "0.0.0.0",
    "[::]",
    "localhost.evil.example",
]


@pytest.mark.parametrize("host", FOREIGN)
@pytest.mark.parametrize("wire", ["0.7", "0.8"])
def test_no_job_is_accepted_under_foreign_host(served: Gateway, host: str, wire: str) -> None:
    before = len(served.server.stores.broker.unfinished)
    submit = served.submit_old if wire == "0.7" else served.submit
    for scheme in ("http", "https"):
        refused = submit(
            Host=host, **{"X-Forwarded-Proto": scheme, "X-Forwarded-Host": "localhost"}
        )
        assert refused.status_code == 403
    assert len(served.server.stores.broker.unfinished) == before


@pytest.mark.parametrize(
    "path", ["/request", "//request", "///request", "/%72equest", "/request?x"]
)
def test_no_spelling_of_path_evades_host_check(served: Gateway, path: str) -> None:
    for host in ("evil.example", "203.0.113.9"):
        assert post(served.url + path, headers={"Host": host}).status_code == 403


def bare_channel(served: Gateway, path: str, host: str) -> websocket.WebSocket:
    """Open a live channel as a program does, without an Origin."""
    address = f"ws://127.0.0.1:{served.port}{path}"
    return websocket.create_connection(address, host=host, suppress_origin=True, timeout=PATIENCE_S)


@pytest.mark.parametrize("host", ["evil.example", "evil.localhost", "0.0.0.0"])
@pytest.mark.parametrize("path", ["/subscribe", "/ws/socket.io/?EIO=4&transport=websocket"])
def test_foreign_host_opens_no_live_channel(served: Gateway, path: str, host: str) -> None:
    bare_channel(served, path, "localhost").close()
    with pytest.raises(websocket.WebSocketBadStatusException, match=r"not answer to|stands for"):
        bare_channel(served, path, host)


def test_host_of_live_channel_does_not_name_results(served: Gateway) -> None:
    with contextlib.closing(bare_channel(served, "/subscribe", "203.0.113.9")) as opened:
        session = json.loads(opened.recv())["session_id"]
        job = served.accepted(served.submit(session=session))
    assert job.base_url == served.url


def test_addresses_of_result_begin_with_checked_host(served: Gateway) -> None:
    """The polled response, the result in it, and the webhook of the job's end."""
    objects = served.server.stores.objects
    for submit in (served.submit, served.submit_old):
        request = served.accepted(submit(Host="LOCALHOST.:9000"))
        assert request.base_url == "http://localhost:9000"
        assert objects.url(result_key(request.id), request.base_url).startswith(
            "http://localhost:9000/results/"
        )
        end = Response(request.id, Status.COMPLETED)
        content = callback_for(replace(request, callback="https://example.org/"), end, 0.0).content
        assert content.url == f"http://localhost:9000/response/{request.id}"


@pytest.mark.parametrize("host", [None, ""])
def test_result_address_without_requested_host_is_that_of_connection(
    served: Gateway, host: str | None
) -> None:
    job = served.accepted(without_host(served, "127.0.0.1", host))
    assert job.base_url == served.url
    if (address := own_address()) is not None:
        job = served.accepted(without_host(served, address, host))
        assert job.base_url == f"http://{address}:{served.port}"


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_result_address_of_ipv6_server_is_url(runtimes: Path, tmp_path: Path, address: str) -> None:
    with gateway(tmp_path, runtimes, host="::", whose=Operator()) as server:
        job = server.accepted(without_host(server, address, None))
    shown = "[::1]" if address == "::1" else address
    assert job.base_url == f"http://{shown}:{server.port}"


@pytest.mark.parametrize(
    "target", ["http://evil.example/request", "http://evil.example:80/request"]
)
def test_absolute_request_target_does_not_name_results(served: Gateway, target: str) -> None:
    job = served.accepted(without_host(served, "127.0.0.1", f"localhost:{served.port}", target))
    assert job.base_url == f"http://localhost:{served.port}"


@pytest.mark.parametrize("host", ["127.0.0.1", "ndif.example.org", "localhost:9", ""])
def test_public_url_names_results_whatever_host_is_requested(
    runtimes: Path, tmp_path: Path, host: str
) -> None:
    public = "https://ndif.example.org/base"
    with gateway(tmp_path, runtimes, whose=Operator(), public_url=public) as server:
        assert base_url(server, Host=host) == public
        assert server.submit(Host="evil.example").status_code == 403


@pytest.mark.parametrize("header", ["X-Forwarded-Host", "Forwarded", "X-Host", "X-Original-Host"])
def test_other_host_headers_are_ignored(served: Gateway, header: str) -> None:
    lie = {header: "host=evil.example" if header == "Forwarded" else "evil.example"}
    assert base_url(served, **lie) == served.url


def test_forwarded_headers_count_only_behind_configured_proxy(
    served: Gateway, proxied: Gateway
) -> None:
    headers = {"X-Forwarded-Proto": "https", "X-Forwarded-For": "198.51.100.7"}
    lied = served.accepted(served.submit(**headers))
    assert (lied.base_url, lied.user) == (served.url, "host 127.0.0.1")
    request = proxied.accepted(proxied.submit(Host="ndif.example.org", **headers))
    assert (request.base_url, request.user) == ("https://ndif.example.org", "host 198.51.100.7")


# Malformed headers


def raw(served: Gateway, *headers: str, path: str = "/ping") -> tuple[int, Mapping[str, Any]]:
    """Send raw header lines; return status and body."""
    text = "\r\n".join([f"GET {path} HTTP/1.1", *headers, "Connection: close", "", ""])
    with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S) as connection:
        connection.sendall(text.encode("latin-1"))
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body) if body.startswith(b"{") else {}


MALFORMED = {
    "Host": [
        *("[", "]", "[::1", "[::1]x", "[1.2.3.4]", "a b", "a/b", "a@localhost", "localhost#", "*"),
        *(
            "localhost:x",
            "localhost:99999",
            "localhost:0",
            "http://localhost",
            "localhost/x",
            "\xe9",
        ),
    ],
    "Origin": ["http://[", "[", "http://a:port", "a b", "https://", "//"],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in MALFORMED.items() for value in values]
)
@pytest.mark.parametrize("path", ["/ping", "/request", "/hub/api/models/a/b", "/ws/socket.io/"])
def test_malformed_host_or_origin_is_rejected_with_400(
    served: Gateway, name: str, value: str, path: str
) -> None:
    host = [] if name == "Host" else ["Host: localhost"]
    status, body = raw(served, *host, f"{name}: {value}", path=path)
    assert status == 400
    assert f"The request's {name}, " in body["detail"]


def test_two_host_headers_are_rejected_with_400(served: Gateway) -> None:
    status, body = raw(served, "Host: localhost", "Host: evil.example")
    assert status == 400
    assert "several Host headers" in body["detail"]


@pytest.mark.parametrize("header", ["host", "origin"])
def test_malformed_host_or_origin_opens_no_websocket(served: Gateway, header: str) -> None:
    options: dict[str, Any] = {header: "http://[" if header == "origin" else "["}
    with pytest.raises(websocket.WebSocketBadStatusException, match="400"):
        websocket.create_connection(
            f"ws://127.0.0.1:{served.port}/subscribe", timeout=PATIENCE_S, **options
        )


_TEXT = st.text(st.characters(codec="latin-1", exclude_characters="\r\n\0"), max_size=30)


@how(max_examples=examples(0.5), suppress_health_check=list(HealthCheck))
@given(
    host=_TEXT | st.from_regex(r"[\[\]:.a-f0-9%@/]{0,20}", fullmatch=True), origin=st.none() | _TEXT
)
def test_no_host_or_origin_causes_server_error(
    served: Gateway, host: str, origin: str | None
) -> None:
    lines = [f"Host: {host}", *([] if origin is None else [f"Origin: {origin}"])]
    status, body = raw(served, *lines)
    assert status in (200, 400, 403), (status, body)


# Webhooks and mail


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1:1/", "https://127.1/", "http://2130706433/", "http://0x7f000001/"),
        *("http://[::ffff:127.0.0.1]/", "http://localhost/", "HTTP://LOCALHOST/", "http://0/"),
        *("http://169.254.169.254/latest/", "http://ada@example.org/", "gopher://127.0.0.1/", "x"),
        *("ada@example.org", "post+http://127.0.0.1:8001/admin/stop"),
    ],
)
@pytest.mark.parametrize("wire", ["0.7", "0.8"])
def test_callback_to_local_or_invalid_address_is_rejected(
    served: Gateway, url: str, wire: str
) -> None:
    submit = served.submit_old if wire == "0.7" else served.submit
    refused = submit(**{"ndif-callback": url})
    assert refused.status_code == 400
    assert refused.json()["detail"].startswith(("The callback", "This server sends no mail"))


@pytest.mark.parametrize("url", ["https://example.org/done?run=7", "post+http://example.org:8080/"])
@pytest.mark.parametrize("wire", ["0.7", "0.8"])
def test_untrusted_users_callback_to_public_address_is_accepted(
    served: Gateway, url: str, wire: str
) -> None:
    submit = served.submit_old if wire == "0.7" else served.submit
    request = served.accepted(submit(**{"ndif-callback": url}))
    assert (request.callback, request.trusted) == (url, False)


def test_each_key_gets_its_own_webhook_secret(keyed: Gateway) -> None:
    answers = [get(f"{keyed.url}/callbacks/secret", headers=headers) for headers in (ADA, ADA, BOB)]
    secrets = [answer.json()["secret"] for answer in answers]
    assert secrets[0] == secrets[1] != secrets[2]
    assert all(secret.startswith("whsec_") for secret in secrets)
    assert {answer.headers["cache-control"] for answer in answers} == {"no-store"}
    assert get(f"{keyed.url}/callbacks/secret").status_code == 401


@on_loop
async def test_stored_callback_to_local_address_is_not_delivered(served: Gateway) -> None:
    queue = served.server.stores.callbacks
    responder = Responder(MemoryBroker(), served.server.stores.objects, queue)
    delivering = asyncio.create_task(served.server.coordinator.control_plane.callbacks.run())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        for trusted in (False, True):
            for host in ("127.0.0.1", socket.gethostname(), "2130706433"):
                request = served.accepted(served.submit_old())
                url = f"http://{host}:{port}/"
                request = replace(request, callback=url, trusted=trusted)
                await responder.respond(request, Response(request.id, Status.ERROR, "It failed."))
        while (await queue.counts())[0]:  # noqa: ASYNC110 - another task changes the file
            await asyncio.sleep(0.05)
        listening.settimeout(0.05)
        with pytest.raises(TimeoutError):
            listening.accept()
    assert all(callback.dead for callback in await queue.all(10))
    await end([delivering])


# Live channels


@contextlib.contextmanager
def channel(served: Gateway, **headers: str) -> Iterator[str]:
    """Open the live channel of a 0.8 client; yield its id."""
    opened = websocket.create_connection(
        f"ws://127.0.0.1:{served.port}/subscribe", header=headers, timeout=PATIENCE_S
    )
    try:
        yield json.loads(opened.recv())["session_id"]
    finally:
        opened.close()


@contextlib.contextmanager
def old_channel(served: Gateway) -> Iterator[str]:
    """Open the live channel of a 0.7 client; yield its id."""
    with socketio.SimpleClient() as client:
        client.connect(served.url, socketio_path="/ws/socket.io", transports=["websocket"])
        yield client.sid


def test_live_channel_accepts_only_its_users_jobs(keyed: Gateway) -> None:
    with channel(keyed, **ADA) as session:
        stranger = keyed.submit(session=session, **BOB)
        assert stranger.status_code == 409
        assert "somebody else opened it" in stranger.json()["detail"]
        assert keyed.submit(session=session).status_code == 401
        for key in (ADA["ndif-api-key"], "ada-s-other-key"):
            assert keyed.submit(session=session, **{"ndif-api-key": key}).status_code == 200


def test_live_channel_of_older_client_accepts_only_its_users_jobs(keyed: Gateway) -> None:
    with old_channel(keyed) as session:
        for _ in range(2):
            assert keyed.submit_old(session=session, **ADA).status_code == 200
            assert keyed.submit_old(session=session, **BOB).status_code == 409


@pytest.mark.parametrize("key", [{}, {"ndif-api-key": "an-invented-key"}])
def test_keyless_client_opens_no_live_channel(keyed: Gateway, key: dict[str, str]) -> None:
    assert keyed.subscribe(key) == 401
    with channel(keyed, **key) as session:
        refused = keyed.submit(session=session, **key)
    assert refused.status_code == 401


@needs_root
def test_live_channel_on_open_server_accepts_only_jobs_of_its_caller(
    served: Gateway,
) -> None:
    with channel(served) as session, old_channel(served) as old_session:
        with user(SOMEBODY):
            assert served.submit(session=session).status_code == 409
            assert served.submit_old(session=old_session).status_code == 409
        if (elsewhere := own_address()) is not None:
            url = f"http://{elsewhere}:{served.port}"
            assert served.submit(url, session=session).status_code == 409
        assert served.submit(session=session, **{"ndif-api-key": "any"}).status_code == 200
        assert served.submit_old(session=old_session).status_code == 200


@pytest.mark.parametrize("guess", ["", "x" * 10_000, "\n", "*"])
def test_guessed_live_channel_id_is_rejected(keyed: Gateway, guess: str) -> None:
    with channel(keyed, **ADA):
        assert keyed.submit(session=guess, **BOB).status_code == (409 if guess else 200)


# Responses


def test_response_of_keyed_job_needs_its_users_key(keyed: Gateway) -> None:
    for submit in (keyed.submit, keyed.submit_old):
        job = submit(**ADA).json()["id"]
        url = f"{keyed.url}/response/{job}"
        assert get(url).status_code == 401
        assert get(url, headers={"ndif-api-key": "an-invented-key"}).status_code == 401
        stranger = get(url, headers=BOB)
        assert stranger.status_code == 403
        assert stranger.json() == {
            "detail": f"The job {job} is another user's: use the key that sent it."
        }
        for key in (ADA["ndif-api-key"], "ada-s-other-key"):
            mine = get(url, headers={"ndif-api-key": key})
            assert mine.status_code == 200
            assert mine.json()["status"] == "RECEIVED"
            assert "user" not in mine.json()


@on_loop
async def test_final_response_needs_its_users_key(keyed: Gateway) -> None:
    request = keyed.accepted(keyed.submit(**ADA))
    await Responder(keyed.server.stores.broker, keyed.server.stores.objects).respond(
        request, Response(request.id, Status.ERROR, "It failed.")
    )
    url = f"{keyed.url}/response/{request.id}"
    async with httpx.AsyncClient() as http:
        assert (await http.get(url, headers=BOB)).status_code == 403
        mine = await http.get(url, headers=ADA)
    assert mine.json() == {"id": request.id, "status": "ERROR", "description": "It failed."}


def test_response_on_open_server_needs_only_job_id(served: Gateway) -> None:
    job = served.submit().json()["id"]
    assert get(f"{served.url}/response/{job}").status_code == 200
