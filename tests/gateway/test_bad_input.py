"""Invalid requests of every kind, sent to a real server."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import pickle
import random
import re
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
import socketio
import torch
import websocket
import zstandard

import ndif
from tests.clients.harness import Client, LocalServer, scenarios
from tests.conftest import NAME, client_environment
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.process

NEW = "nnsight.modeling.transformers.TransformersModel"
OLD = "nnsight.modeling.language.LanguageModel"
VERSION = version("nnsight")
UNKNOWN = "01234567-89ab-cdef-0123-456789abcdef"

TTL_S = 4
MIB = 1 << 20
GIB = 1 << 30

OF_THE_SERVER = (
    "Traceback",
    "site-packages",
    str(Path(ndif.__file__).parent),
    str(Path(os.__file__).parent),
)


@pytest.fixture(scope="module")
def strict(
    server_environment: dict[str, str],
    runtimes: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LocalServer]:
    """A server with low limits that does not serve nnsight 0.6."""
    folder = tmp_path_factory.mktemp("runtimes")
    (folder / "0.7").symlink_to(runtimes / "0.7")
    environment = {
        **server_environment,
        "NDIF_RUNTIMES_DIR": str(folder),
        "NDIF_MAX_REQUEST_BYTES": "1000000",
        "NDIF_MAX_RESULT_BYTES": "2000000",
        "NDIF_MAX_INLINE_RESULT_BYTES": "100000",
        "NDIF_RESULT_TTL_S": str(TTL_S),
        "NDIF_RESPONSE_TTL_S": str(TTL_S),
    }
    started = LocalServer(NAME, environment=environment)
    try:
        yield started.ready()
    finally:
        started.stop()


@pytest.fixture(scope="module")
def bare(
    server_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of a server with no additional runtime, before its model is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **server_environment,
        "NDIF_RUNTIMES_DIR": str(tmp_path_factory.mktemp("no-runtimes")),
    }
    started = LocalServer(NAME, "--port", str(port), environment=environment)

    def answers() -> bool:
        with contextlib.suppress(httpx.ConnectError):
            assert httpx.get(f"http://127.0.0.1:{port}/ping").json() == "pong"
            return True
        return False

    try:
        until(answers)
        yield f"http://127.0.0.1:{port}"
    finally:
        started.stop()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the payloads that the client records."""
    return tmp_path_factory.mktemp("recorded")


@pytest.fixture(scope="module")
def limited_client(
    strict: LocalServer,
    tiny_gpt2: Path,
    recorded: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Client]:
    """A client of the strict server."""
    home = tmp_path_factory.mktemp("client-limits")
    environment = {**client_environment(strict, home, None), "RECORDED": str(recorded)}
    client = Client("scenarios_limits", NAME, tiny_gpt2, environment)
    yield client
    client.close()


@pytest.fixture(scope="module")
def payload(limited_client: Client, recorded: Path) -> bytes:
    """A trace as a client sends it; its result has some 400 kB."""
    limited_client.run("scenario_payloads_are_recorded")
    return (recorded / "ends").read_bytes()


# Requests


def key(
    repo_id: object = NAME,
    *,
    path: str = NEW,
    revision: object = None,
    task: object = "text-generation",
) -> str:
    return f"{path}:{json.dumps({'repo_id': repo_id, 'revision': revision, 'task': task})}"


def zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


def envelope(**fields: object) -> str:
    return json.dumps({"model_key": key(), "session_id": "", "compress": True, "env": {}, **fields})


def send(
    server: LocalServer,
    data: str | bytes | None = None,
    blob: bytes | None = b"",
    nnsight: str | None = VERSION,
) -> httpx.Response:
    """Send a request in the form of nnsight 0.8."""
    parts: dict[str, tuple[str | None, bytes | str]] = {}
    parts["data"] = (None, envelope() if data is None else data)
    if blob is not None:
        parts["blob"] = ("request", blob or zstd(b"garbage"))
    headers = {} if nnsight is None else {"nnsight-version": nnsight}
    return httpx.post(f"{server.url}/request", files=parts, headers=headers, timeout=PATIENCE_S)


def send_old(
    server: LocalServer | str,
    content: Any = None,
    **headers: str | bytes | None,
) -> httpx.Response:
    """Send a request in the form of nnsight 0.7; a header that is None is left out."""
    given: dict[str, str | bytes | None] = {
        "nnsight_model_key": key(path=OLD, task=None),
        "nnsight_compress": "True",
        "nnsight_version": "0.7.0",
        "ndif_callback": "",
        "content_type": "application/octet-stream",
        **headers,
    }
    url = server if isinstance(server, str) else server.url
    return httpx.post(
        f"{url}/request",
        content=zstd(b"garbage") if content is None else content,
        headers={
            name.replace("_", "-").replace("session-id", "session_id"): value
            for name, value in given.items()
            if value is not None
        },
        timeout=PATIENCE_S,
    )


def raw(server: LocalServer, sent: bytes) -> bytes:
    """Send bytes and nothing more, and return the answer."""
    with socket.create_connection(address(server), timeout=PATIENCE_S) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as answer:
            return answer.read()


def get_raw(server: LocalServer, target: str) -> tuple[int, dict[str, Any]]:
    """GET a target that no client normalises first."""
    connection = http.client.HTTPConnection(*address(server), timeout=PATIENCE_S)
    try:
        connection.request("GET", target)
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    assert not any(secret in text for secret in OF_THE_SERVER), text
    assert answer.headers["Content-Type"] == "application/json", text
    return answer.status, json.loads(text)


def address(server: LocalServer) -> tuple[str, int]:
    url = httpx.URL(server.url)
    assert url.port is not None
    return url.host, url.port


# Answers


def sentence(text: object) -> str:
    """Check that a text is a sentence for a user and shows nothing of the server's code."""
    assert isinstance(text, str)
    assert re.match(r"[A-Za-z'\"0-9]", text), text
    assert text.endswith((".", "?")), text
    assert not any(secret in text for secret in OF_THE_SERVER), text
    return text


def refused(answer: httpx.Response, status: int = 400) -> str:
    """Return the sentence of a refusal, and check its status and form."""
    assert answer.status_code == status, (answer.status_code, answer.text)
    assert answer.headers["Content-Type"] == "application/json", answer.text
    body = answer.json()
    assert list(body) == ["detail"], body
    return sentence(body["detail"])


def ended(server: LocalServer, accepted: httpx.Response) -> dict[str, Any]:
    """Poll until an accepted job ends and return its last response."""
    assert accepted.status_code == 200, accepted.text
    assert accepted.json()["status"] == "RECEIVED"
    response: dict[str, Any] = {}

    def has_ended() -> bool:
        nonlocal response
        answer = httpx.get(f"{server.url}/response/{accepted.json()['id']}")
        assert answer.status_code == 200, answer.text
        response = answer.json()
        return response["status"] in ("COMPLETED", "ERROR")

    until(has_ended, lambda: f"still {response}")
    return response


def unless_ok(answer: httpx.Response) -> httpx.Response | None:
    """Return an answer, or None if its status is 200."""
    return None if answer.status_code == 200 else answer


def failed(server: LocalServer, accepted: httpx.Response) -> str:
    """Return the sentence with which an accepted job ends as an ERROR."""
    response = ended(server, accepted)
    assert response["status"] == "ERROR", response
    return sentence(response["description"])


def peak_memory(server: LocalServer) -> int:
    """Return the peak memory of the server's own process in bytes."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert match
    return int(match[1]) << 10


# The model


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("", "is not a model key"),
        ("gpt2", "is not a model key"),
        (f"{NEW}:", "is not a model key"),
        (f"{NEW}:[]", "is not a model key"),
        (f"{NEW}:{{", "is not a model key"),
        (f"{NEW}:{'[' * 100_000}", "is not a model key"),
        (f"{NEW}:{'9' * 5000}", "is not a model key"),
        (f"{NEW}:{{}}", "names no repo_id"),
        (key(None), "names no repo_id"),
        (key(["a"]), "names no repo_id"),
        (key(revision=1), "must be text"),
        (key(task={}), "must be text"),
        (key("test-org/other"), f"serves '{NAME}', not 'test-org/other'"),
        (key("a\ud800b"), "not 'a\\ud800b'"),
        (key("<script>"), "not '<script>'"),
        (key(revision="../../made5"), "must be a branch, a tag or a commit"),
        (key(revision="v2"), "at revision 'main', not 'v2'"),
        (key(task="fill-mask"), "for the task 'text-generation', not 'fill-mask'"),
        (key(path="os.system"), "not with 'os.system'"),
        (key(path="nnsight.modeling.vllm.vllm.VLLM"), "with nnsight's TransformersModel or"),
        (key(path=OLD), "with nnsight's TransformersModel or LanguageModel, not with"),
    ],
    ids=lambda value: ascii(value)[-40:],
)
def test_wrong_model_key_is_rejected(server: LocalServer, wrong: str, expected: str) -> None:
    assert expected in refused(send(server, envelope(model_key=wrong)))


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("", "is not a model key"),
        (b"\xff\xfe", "is not a model key"),
        (f"{OLD}:{{'repo_id': 'a'}}", "is not a model key"),
        (f"{OLD}:{'[' * 30_000}", "is not a model key"),
        (key("test-org/other", path=OLD), f"serves '{NAME}', not 'test-org/other'"),
        (key(path=OLD, revision="v2"), "at revision 'main', not 'v2'"),
        (key(path="os.system"), "not with 'os.system'"),
        (key(), "with nnsight's LanguageModel, not with"),
    ],
    ids=lambda value: ascii(value)[-40:],
)
def test_wrong_model_key_of_older_client_is_rejected(
    server: LocalServer, wrong: str | bytes, expected: str
) -> None:
    assert expected in refused(send_old(server, nnsight_model_key=wrong))


# Routes


@pytest.mark.parametrize(
    ("method", "path", "status", "expected"),
    [
        ("GET", "/nothing", 404, "There is nothing at /nothing."),
        ("GET", "/requestz", 404, "nnsight uses /request,"),
        ("POST", "/v1/completions", 404, "There is nothing at /v1/completions."),
        ("GET", "/response", 404, "There is nothing at"),
        ("GET", "/response/a/b", 404, "There is nothing at"),
        ("GET", "/" + "x" * 5000, 404, "There is nothing at"),
        ("GET", "/request", 405, "GET is not possible at /request."),
        ("PUT", "/request", 405, "PUT is not possible"),
        ("DELETE", f"/results/{UNKNOWN}", 405, "DELETE is not possible"),
        ("POST", "/status", 405, "POST is not possible"),
        ("REPORT", "/status", 405, "REPORT is not possible"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_wrong_route_or_method_is_rejected(
    server: LocalServer, method: str, path: str, status: int, expected: str
) -> None:
    text = refused(httpx.request(method, server.url + path), status)
    assert expected in text
    assert len(text) < 1000


def test_post_in_unknown_form_is_rejected(server: LocalServer) -> None:
    for content_type in ("application/json", "application/x-www-form-urlencoded", "", "garbage"):
        answer = httpx.post(
            f"{server.url}/request", content=b"{}", headers={"Content-Type": content_type}
        )
        assert "neither a request of nnsight 0.8" in refused(answer)


def test_bytes_that_are_not_http_do_not_affect_other_clients(server: LocalServer) -> None:
    for sent in (
        b"GARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(200),
        b"GET /\xff\xfe HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"POST /request HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /request HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: \xb2\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
        b"",
    ):
        answer = raw(server, sent)
        assert not any(secret.encode() in answer for secret in OF_THE_SERVER)
        assert b" 500 " not in answer
    assert server.get("/ping") == (200, b'"pong"')


# Versions


@pytest.mark.parametrize("wrong", ["0.5", "0.5.3", "0.9.0", "1.2.3", "0.10.0"])
@pytest.mark.parametrize("post", [send, send_old])
def test_unsupported_version_is_rejected_with_install_command(
    server: LocalServer, post: Callable[..., httpx.Response], wrong: str
) -> None:
    answer = (
        send(server, nnsight=wrong) if post is send else send_old(server, nnsight_version=wrong)
    )
    text = refused(answer)
    assert f"yours is {wrong}" in text
    assert VERSION in text
    assert re.search(r"\b0\.7\.\d", text)
    assert re.search(r"\b0\.6\.\d", text)
    assert "`pip install 'nnsight>=0.8,<0.9'`" in text
    assert "runtime add" not in text


@pytest.mark.parametrize("wrong", ["garbage", "0", "0.x", "../0.7", "0." + "9" * 5000, "0.8;rm"])
def test_text_that_is_not_a_version_is_rejected(server: LocalServer, wrong: str) -> None:
    for answer in (send(server, nnsight=wrong), send_old(server, nnsight_version=wrong)):
        text = refused(answer)
        assert "is not a version" in text
        assert VERSION in text
        assert len(text) < 1000


def test_non_ascii_version_is_rejected(server: LocalServer) -> None:
    assert "is not a version" in refused(send_old(server, nnsight_version=b"\xff\xfe"))


def test_older_client_without_version_is_rejected(server: LocalServer) -> None:
    for missing in (None, ""):
        text = refused(send_old(server, nnsight_version=missing))
        assert "nnsight-version" in text
        assert VERSION in text


def test_newer_client_may_omit_version(server: LocalServer, payload: bytes) -> None:
    for missing in (None, ""):
        assert ended(server, send(server, blob=payload, nnsight=missing))["status"] == "COMPLETED"


def test_version_on_wrong_wire_is_rejected(server: LocalServer) -> None:
    for answer in (send(server, nnsight="0.7.0"), send_old(server, nnsight_version=VERSION)):
        assert "does not send requests of this form" in refused(answer)


@pytest.mark.parametrize("generation", ["0.7", "0.6"])
def test_uninstalled_version_is_rejected_with_both_remedies(bare: str, generation: str) -> None:
    text = refused(send_old(bare, nnsight_version=f"{generation}.3"))
    assert f"serves nnsight {VERSION}; yours is {generation}.3" in text
    assert "`pip install 'nnsight>=0.8,<0.9'`" in text
    assert f"`ndif runtime add {generation}`" in text


def test_rejection_names_only_installed_versions(strict: LocalServer) -> None:
    text = refused(send_old(strict, nnsight_version="0.6.3"))
    assert re.search(r"serves nnsight 0\.7\.\d, 0\.8\.\d; yours is 0\.6\.3\.", text)
    assert "`ndif runtime add 0.6`" in text


# The multipart body


BOUNDARY = "0123456789abcdef"


def part(name: str, content: bytes, extra: bytes = b"") -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n'.encode()
    return head + extra + b"\r\n" + content + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()
WHOLE = part("data", envelope().encode()) + part("blob", zstd(b"garbage" * 1000)) + END


def post_multipart(
    server: LocalServer, body: Any, content_type: str | None = None
) -> httpx.Response:
    content_type = content_type or f"multipart/form-data; boundary={BOUNDARY}"
    headers = {"Content-Type": content_type, "nnsight-version": VERSION}
    return httpx.post(f"{server.url}/request", content=body, headers=headers, timeout=PATIENCE_S)


def test_undamaged_multipart_body_is_accepted(server: LocalServer) -> None:
    assert "trace" in failed(server, post_multipart(server, WHOLE))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (part("blob", b"1") + END, "lacks the part 'data'"),
        (part("data", envelope().encode()) + END, "lacks the part 'blob'"),
        (part("DATA", b"{}") + part("file", b"1") + END, "lacks the part 'data'"),
        (WHOLE[: len(WHOLE) // 2], "ends before its last boundary"),
        (WHOLE[:-8], "ends before its last boundary"),
        (WHOLE[:20], "cannot be read"),
        (b"", "cannot be read"),
        (b"garbage", "cannot be read"),
        (random.Random(1).randbytes(100_000), "cannot be read"),
        (WHOLE.replace(BOUNDARY.encode(), b"another"), "cannot be read"),
        (part("data", b"{}", b"X: " + b"y" * 20_000 + b"\r\n") + END, "cannot be read"),
        (part("data", b"{}", b"X: y\r\n" * 50) + END, "cannot be read"),
        (part("data", b"{}", b"\xff\xfe: y\r\n") + END, "cannot be read"),
        (b"".join(part(f"part-{n}", b"") for n in range(1000)) + END, "cannot be read"),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_damaged_multipart_body_is_rejected(
    server: LocalServer, body: bytes, expected: str
) -> None:
    text = refused(post_multipart(server, body))
    assert expected in text
    assert len(text) < 1000


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data",
        "multipart/form-data;",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary=""',
        f"multipart/form-data; boundary={'x' * 300}",
        f"multipart/form-data; border={BOUNDARY}",
        "multipart/form-data; boundary*=utf-8''%ff%fe",
    ],
    ids=lambda value: value[19:50],
)
def test_multipart_body_without_usable_boundary_is_rejected(
    server: LocalServer, content_type: str
) -> None:
    assert "multipart body cannot be read" in refused(post_multipart(server, WHOLE, content_type))


def test_body_may_arrive_byte_by_byte(server: LocalServer) -> None:
    def pieces() -> Iterator[bytes]:
        for at in range(len(WHOLE)):
            yield WHOLE[at : at + 1]

    assert "trace" in failed(server, post_multipart(server, pieces()))


def test_client_that_leaves_during_body_does_not_affect_others(server: LocalServer) -> None:
    head = (
        "POST /request HTTP/1.1\r\nHost: 127.0.0.1\r\nnnsight-version: "
        f"{VERSION}\r\nContent-Length: {len(WHOLE) * 2}\r\n"
        f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n\r\n"
    ).encode()
    for sent in (head, head + WHOLE[:50], head + WHOLE):
        assert b" 200 " not in raw(server, sent)
    assert server.get("/ping") == (200, b'"pong"')


# The envelope


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (b"", "data"),
        (b"garbage", "data"),
        (b"\xff\xfe\x00", "data"),
        (b"[]", "data"),
        (b"null", "data"),
        (b'"text"', "data"),
        (b"[" * 100_000, "data"),
        (b'{"a":' * 100_000, "data"),
        (b"{}", "model_key"),
        (envelope(model_key=None), "model_key"),
        (envelope(model_key=7), "model_key"),
        (envelope(session_id=7), "session_id"),
        (envelope(session_id=["a"]), "session_id"),
        (envelope(compress="yes"), "compress"),
        (envelope(compress=1), "compress"),
        (envelope(env=[]), "env"),
        (envelope(env="peft"), "env"),
    ],
    ids=lambda value: ascii(value)[-40:],
)
def test_wrong_envelope_is_rejected(server: LocalServer, data: str | bytes, where: str) -> None:
    text = refused(send(server, data))
    assert f"envelope is not valid: {where}: " in text
    assert len(text) < 1000


def test_env_that_cannot_be_applied_fails_job(server: LocalServer, payload: bytes) -> None:
    for env in ({"peft": 7}, {"peft": ["a"]}, {"peft": "no-such-org/adapter"}):
        response = ended(server, send(server, envelope(env=env), payload))
        assert response["status"] == "ERROR", env
        # The rest is a library's message, which need not be a sentence.
        text = response["description"]
        assert text.startswith("The model could not be prepared as the request asks (")
        assert repr(env)[1:-1] in text
        assert not any(secret in text for secret in OF_THE_SERVER), text
    # The next request is not affected.
    assert ended(server, send(server, blob=payload))["status"] == "COMPLETED"


# Subscriptions


@pytest.mark.parametrize("session", ["nobody", UNKNOWN, "0" * 32, "\0", "x" * 5000, "é"])
def test_closed_subscription_is_rejected(server: LocalServer, session: str) -> None:
    assert "blocking=False" in refused(send(server, envelope(session_id=session)), 409)


@pytest.mark.parametrize("session", ["nobody", UNKNOWN, b"\xff\xfe"])
def test_unknown_subscription_of_older_client_is_rejected(
    server: LocalServer, session: str | bytes
) -> None:
    assert "is not open" in refused(send_old(server, ndif_session_id=session), 409)


def test_subscription_ends_with_its_websocket(server: LocalServer) -> None:
    channel = websocket.create_connection(f"ws{server.url[4:]}/subscribe", timeout=PATIENCE_S)
    session = json.loads(channel.recv())["session_id"]
    assert send(server, envelope(session_id=session)).status_code == 200
    channel.close()
    refused(until(lambda: unless_ok(send(server, envelope(session_id=session)))), 409)


def test_unexpected_websocket_messages_are_ignored(server: LocalServer) -> None:
    channel = websocket.create_connection(f"ws{server.url[4:]}/subscribe", timeout=PATIENCE_S)
    session = json.loads(channel.recv())["session_id"]
    for text in ("", "garbage", "[" * 10_000, '{"session_id": "another"}'):
        channel.send(text)
    channel.send_binary(os.urandom(100_000))
    channel.ping(b"are you there")
    assert send(server, envelope(session_id=session)).status_code == 200
    statuses = [""]
    while statuses[-1] != "ERROR":
        response = json.loads(channel.recv())
        statuses.append(response["status"])
    assert "nnsight 0.8 trace" in sentence(response["description"])
    channel.close()


def test_too_long_message_closes_only_its_own_websocket(server: LocalServer) -> None:
    url = f"ws{server.url[4:]}/subscribe"
    loud, quiet = (websocket.create_connection(url, timeout=PATIENCE_S) for _ in range(2))
    sessions = [json.loads(channel.recv())["session_id"] for channel in (loud, quiet)]
    with pytest.raises((websocket.WebSocketException, OSError)):  # noqa: PT012
        loud.send_binary(bytes(8 * MIB))
        while loud.recv():
            pass
        raise websocket.WebSocketConnectionClosedException
    refused(send(server, envelope(session_id=sessions[0])), 409)
    assert send(server, envelope(session_id=sessions[1])).status_code == 200
    while json.loads(quiet.recv())["status"] != "ERROR":  # the job has no trace
        pass
    quiet.close()


def test_no_other_path_accepts_a_websocket(server: LocalServer) -> None:
    for path in ("/", "/subscribe/x", "/request", "/ping"):
        with pytest.raises(websocket.WebSocketBadStatusException) as caught:
            websocket.create_connection(f"ws{server.url[4:]}{path}", timeout=PATIENCE_S)
        assert caught.value.status_code == 404
        assert f"No WebSocket opens at {path}." in str(caught.value)
    assert server.get("/subscribe")[0] == 404


def test_unexpected_socket_io_events_are_ignored(server: LocalServer) -> None:
    with socketio.SimpleClient() as channel:
        channel.connect(
            server.url,
            socketio_path="/ws/socket.io",
            transports=["websocket"],
            wait_timeout=PATIENCE_S,
        )
        for upload in (None, 7, ["a"], (b"content", None), (b"content", UNKNOWN), (UNKNOWN, b"")):
            channel.emit("stream_upload", upload)
        channel.emit("no_such_event", {"a": [1, 2]})
        assert send_old(server, ndif_session_id=channel.sid).status_code == 200
        status = ""
        while status != "ERROR":
            event, content = channel.receive(timeout=PATIENCE_S)
            assert event == "blocking_response"
            response = torch.load(io.BytesIO(content), weights_only=False)
            status = response["status"]
        assert "nnsight 0.7 trace" in sentence(response["description"])


# The headers of older clients


@pytest.mark.parametrize("wrong", ["", "true", "1", "yes", "False ,True", b"\xff"])
def test_wrong_compress_flag_is_rejected(server: LocalServer, wrong: str | bytes) -> None:
    assert "must be True or False" in refused(send_old(server, nnsight_compress=wrong))


@pytest.mark.parametrize(
    "wrong", ["garbage", "ftp://host/", "file:///etc/passwd", "javascript:alert(1)"]
)
def test_callback_that_is_not_http_url_is_rejected(server: LocalServer, wrong: str) -> None:
    assert "must be an http or https URL" in refused(send_old(server, ndif_callback=wrong))


def test_non_ascii_callback_is_rejected(server: LocalServer) -> None:
    assert "beyond ASCII" in refused(send_old(server, ndif_callback=b"\xff\xfe"))


@pytest.mark.parametrize("wrong", ["http://", "http://[", "https://no such host/", "http://\\"])
def test_malformed_callback_url_is_rejected(server: LocalServer, wrong: str) -> None:
    assert "is not a URL like" in refused(send_old(server, ndif_callback=wrong))


def test_mail_callback_is_rejected_without_mail_settings(server: LocalServer) -> None:
    assert "This server sends no mail" in refused(send_old(server, ndif_callback="ada@example.org"))


@pytest.mark.parametrize("wrong", ["http://127.0.0.1:1/", "https://nobody.invalid/"])
def test_failing_callback_does_not_affect_job(server: LocalServer, wrong: str) -> None:
    assert "nnsight 0.7 trace" in failed(server, send_old(server, ndif_callback=wrong))


# The payload


def test_empty_payload_is_rejected(server: LocalServer) -> None:
    body = part("data", envelope().encode()) + part("blob", b"") + END
    assert "no payload" in refused(post_multipart(server, body))
    assert "no payload" in refused(send_old(server, b""))


@pytest.mark.parametrize("content", [b"\x28", b"garbage", b"\x80\x04N.", b"\x1f\x8b\x08\x00gzip"])
def test_payload_not_compressed_as_declared_is_rejected(
    server: LocalServer, content: bytes
) -> None:
    assert "not zstd data" in refused(send(server, blob=content))
    assert "not zstd data" in refused(send_old(server, content))


def frame(*blocks: bytes, says: int | None) -> bytes:
    """Return a zstd frame made by hand that declares the size `says`."""
    if says is None:
        return b"\x28\xb5\x2f\xfd\x00\x58" + b"".join(blocks)
    return b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", says) + b"".join(blocks)


def zeros(count: int) -> bytes:
    """Return `count` blocks of 128 KiB of zeros, four bytes of the frame each."""
    block = [((128 * 1024) << 3 | 1 << 1 | int(last)).to_bytes(3, "little") for last in (0, 1)]
    return (block[0] + b"\0") * (count - 1) + block[1] + b"\0"


def test_handmade_frames_are_valid_zstd() -> None:
    decompressor = zstandard.ZstdDecompressor()
    assert decompressor.decompress(frame(zeros(8), says=MIB)) == bytes(MIB)
    assert decompressor.decompressobj().decompress(frame(zeros(8), says=None)) == bytes(MIB)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"garbage", "could not be read as an nnsight"),
        (b"\0", "could not be read as an nnsight"),
        (b".", "could not be read as an nnsight"),
        (b"\x80", "could not be read as an nnsight"),
        (pickle.dumps(7), "could not be read as an nnsight"),
        (pickle.dumps((1, 2, 3)), "could not be read as an nnsight"),
        (pickle.dumps({"a": [None]}), "could not be read as an nnsight"),
        (b"cno_such_module\nf\n.", "uses the module 'no_such_module'"),
        (b"cos\nno_such_name\n.", "could not be read as an nnsight"),
        (b"(" * 200_000, "could not be read as an nnsight"),
        (b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f", "could not be read as an nnsight"),
        (b"", "could not be read as an nnsight"),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_garbage_payload_fails_job_with_sentence(
    server: LocalServer, content: bytes, expected: str
) -> None:
    assert expected in failed(server, send(server, blob=zstd(content)))
    assert expected in failed(server, send_old(server, zstd(content)))


def test_whole_payload_runs(server: LocalServer, payload: bytes) -> None:
    response = ended(server, send(server, blob=payload))
    assert response["status"] == "COMPLETED"
    content = zstandard.ZstdDecompressor().decompress(httpx.get(response["data"]).content)
    values = torch.load(io.BytesIO(content), weights_only=False)
    assert torch.equal(values["large"], torch.arange(100_000.0))


def test_uncompressed_garbage_payload_fails_job(server: LocalServer) -> None:
    data = envelope(compress=False)
    assert "could not be read" in failed(server, send(server, data, b"garbage"))
    assert "could not be read" in failed(
        server, send_old(server, b"garbage", nnsight_compress="False")
    )


def test_truncated_payload_fails_job(server: LocalServer, payload: bytes) -> None:
    for size in (5, 20, len(payload) // 2, len(payload) - 1):
        text = failed(server, send(server, blob=payload[:size]))
        assert "truncated or damaged" in text


def test_truncated_pickle_fails_job(server: LocalServer, payload: bytes) -> None:
    whole = zstandard.ZstdDecompressor().decompress(payload)
    for size in range(1, len(whole), len(whole) // 8):
        text = failed(server, send(server, blob=zstd(whole[:size])))
        assert "truncated or damaged" in text


@pytest.mark.parametrize(
    ("bomb", "expected"),
    [
        (frame(zeros(1), says=50 * GIB), "50GiB when decompressed"),
        (frame(zeros(16), says=1 << 63), "iB when decompressed"),
        (frame(zeros(24_000), says=24_000 * 128 * 1024), "iB when decompressed"),
        (frame(zeros(24_000), says=100), "not whole zstd data"),
        (frame(zeros(24_000), says=None), "zstd"),
    ],
    ids=["says 50 GiB", "says 8 EiB", "is 3 GiB", "is 3 GiB, says 100 B", "is 3 GiB, says nothing"],
)
def test_decompression_bomb_fails_job(
    server: LocalServer, payload: bytes, bomb: bytes, expected: str
) -> None:
    assert len(bomb) < 100_000
    usual = ended(server, send(server, blob=payload))["meta"]["peak_memory"]
    response = ended(server, send(server, blob=bomb))
    assert response["status"] == "ERROR"
    text = sentence(response["description"])
    assert expected in text
    # zstd's number for an unknown size.
    assert "18,446,744,073,709,551,615" not in text
    assert response["meta"]["peak_memory"] < usual + 256 * MIB
    assert expected in failed(server, send_old(server, bomb))


# Sizes


BODY = 64 * MIB


def chunked(head: bytes = b"") -> Iterator[bytes]:
    yield head
    for _ in range(BODY // MIB):
        yield bytes(MIB)


@pytest.mark.parametrize(
    "post",
    [
        lambda strict: send(strict, blob=bytes(BODY)),
        lambda strict: send_old(strict, bytes(BODY)),
        lambda strict: send_old(strict, chunked()),
        lambda strict: post_multipart(strict, chunked(WHOLE[:-100])),
    ],
    ids=["0.8", "0.7", "0.7 chunked", "0.8 chunked"],
)
def test_request_over_limit_is_rejected_while_it_arrives(
    strict: LocalServer, post: Callable[[LocalServer], httpx.Response]
) -> None:
    before = peak_memory(strict)
    for _ in range(5):
        text = refused(post(strict), 413)
        assert "larger than 1MB" in text
        assert "NDIF_MAX_REQUEST_BYTES" in text
    assert peak_memory(strict) - before < BODY // 4
    assert strict.get("/ping") == (200, b'"pong"')


def test_declared_length_over_limit_is_rejected_at_once(strict: LocalServer) -> None:
    head = (
        "POST /request HTTP/1.1\r\nHost: 127.0.0.1\r\nnnsight-version: 0.8.1\r\n"
        f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\nContent-Length: {1 << 60}\r\n\r\n"
    )
    assert raw(strict, head.encode()).startswith(b"HTTP/1.1 413 ")


def test_rejected_large_body_is_not_kept_in_memory(strict: LocalServer) -> None:
    before = peak_memory(strict)
    for _ in range(3):
        garbage = post_multipart(strict, chunked(b"garbage"))
        assert "multipart body cannot be read" in refused(garbage)
        assert "yours is 0.6.3" in refused(send_old(strict, chunked(), nnsight_version="0.6.3"))
        refused(httpx.post(f"{strict.url}/no/such/route", content=chunked()), 404)
    assert peak_memory(strict) - before < BODY // 4


def test_request_at_limit_is_accepted(strict: LocalServer) -> None:
    for size, status in ((1_000_000, 200), (1_000_001, 413)):
        assert send_old(strict, bytes(size), nnsight_compress="False").status_code == status
        head = part("data", envelope(compress=False).encode())
        blob = bytes(size - len(head + part("blob", b"") + END))
        assert post_multipart(strict, head + part("blob", blob) + END).status_code == status


@pytest.mark.parametrize("scenario", scenarios("scenarios_limits"))
def test_real_client_respects_limits_of_strict_server(
    limited_client: Client, scenario: str
) -> None:
    limited_client.run(scenario)


# Results and responses by URL


PATHS = [
    "..",
    "../../etc/passwd",
    "%2e%2e",
    "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "..%5c..%5c",
    "%2fetc%2fpasswd",
    "//etc/passwd",
    "%00",
    f"{UNKNOWN}%00",
    f"{UNKNOWN}%0a",
    f"{UNKNOWN}.pt",
    f"{UNKNOWN}/..",
    f"%20{UNKNOWN}",
    UNKNOWN.upper(),
    UNKNOWN.replace("-", ""),
    "%ff%fe",
    "%",
    "x" * 20_000,
    "%d9%a0" * 32,
]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path[:30])
@pytest.mark.parametrize("route", ["results", "response"])
def test_no_path_leads_out_of_object_store(server: LocalServer, route: str, path: str) -> None:
    for query in ("", "?expires=9999999999&signature=0"):
        status, body = get_raw(server, f"/{route}/{path}{query}")
        if status == 200:  # a client of 0.8 would ask again and again after 404
            assert (route, body["status"]) == ("response", "ERROR")
            assert "is not the id of a job" in body["description"]
            continue
        assert status == 404
        assert list(body) == ["detail"]
        assert len(sentence(body["detail"])) < 1000


def test_unknown_job_is_answered_as_error(server: LocalServer) -> None:
    answer = httpx.get(f"{server.url}/response/{UNKNOWN}")
    assert (answer.status_code, answer.json()["status"]) == (200, "ERROR")
    text = sentence(answer.json()["description"])
    assert f"No job {UNKNOWN} is known here" in text
    assert "blocking=False" in text


@pytest.mark.parametrize(
    "query",
    [
        "",
        "?expires=9999999999",
        "?signature=0",
        "?expires=&signature=",
        "?expires=9999999999&signature=" + "0" * 64,
        "?expires=-1&signature=0",
        "?expires=inf&signature=0",
        "?expires=" + "9" * 5000 + "&signature=0",
        "?expires=%d9%a9&signature=0",
        "?expires=9999999999&signature=%ff%fe",
        "?expires=9999999999&expires=1&signature=0&signature=",
        "?" + "&" * 10_000,
    ],
    ids=lambda query: query[:40],
)
def test_unsigned_result_url_is_rejected(server: LocalServer, query: str) -> None:
    text = refused(httpx.get(f"{server.url}/results/{UNKNOWN}{query}"), 403)
    assert "not signed by this server" in text


def test_result_url_is_valid_only_for_its_result_until_expiry(
    strict: LocalServer, payload: bytes
) -> None:
    answers = [ended(strict, send(strict, blob=payload)) for _ in range(2)]
    # The URL of the later job, which has not expired yet.
    other, url = (httpx.URL(answer["data"]) for answer in answers)
    expires, signature = (url.params[name] for name in ("expires", "signature"))
    assert httpx.get(url).status_code == 200
    flipped = ("0" if signature[0] != "0" else "1") + signature[1:]
    for wrong in (
        other.copy_with(query=url.query),
        url.copy_set_param("signature", flipped),
        url.copy_set_param("signature", signature.upper()),
        url.copy_set_param("signature", signature[:-1]),
        url.copy_set_param("expires", str(int(expires) + 1)),
        url.copy_set_param("expires", f"{expires} "),
    ):
        refused(httpx.get(wrong), 403)
    assert f"within {TTL_S}s." in refused(until(lambda: unless_ok(httpx.get(url))), 403)
    # The stored response expires as well: first the result, then the whole job.
    poll = f"{strict.url}/response/{answers[1]['id']}"
    until(lambda: "is known here" in httpx.get(poll).json()["description"])


def test_result_supports_range_requests(server: LocalServer, payload: bytes) -> None:
    url = ended(server, send(server, blob=payload))["data"]
    whole = httpx.get(url).content
    part_of_it = httpx.get(url, headers={"Range": "bytes=5-9"})
    assert (part_of_it.status_code, part_of_it.content) == (206, whole[5:10])
    for wrong in ("bytes=9999999999-", "bytes=9-5", "bytes=" + "0-1," * 5000, "lines=1-2", "x"):
        answer = httpx.get(url, headers={"Range": wrong})
        assert answer.status_code < 500, wrong
        assert not any(secret.encode() in answer.content for secret in OF_THE_SERVER)


# Afterwards


def test_concurrent_requests_are_each_answered(server: LocalServer) -> None:
    def trouble(number: int) -> int:
        return send(server, blob=zstd(b"garbage") if number % 2 else b"garbage").status_code

    with ThreadPoolExecutor(20) as threads:
        assert list(threads.map(trouble, range(40))) == [400, 200] * 20


def test_normal_trace_still_works(server: LocalServer, client_08: Client) -> None:
    client_08.run("scenario_reads_of_layers_and_logits")
    assert server.get("/connected") == (200, b"true")


def test_every_model_process_still_runs(server: LocalServer) -> None:
    (deployment,) = json.loads(server.get("/status")[1])["deployments"].values()
    assert deployment["runtimes"]["0.8"] == "RUNNING"
    assert deployment["runtimes"]["0.7"] == "RUNNING"


def test_strict_server_still_works(strict: LocalServer, payload: bytes) -> None:
    assert ended(strict, send(strict, blob=payload))["status"] == "COMPLETED"
    assert not any("Traceback" in line for line in strict.output), "\n".join(strict.output)


def test_server_logged_no_traceback(server: LocalServer) -> None:
    assert not any("Traceback" in line for line in server.output), "\n".join(server.output)
