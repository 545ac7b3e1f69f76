"""Fuzzed requests to the gateway: each is refused with a message, or accepted without being unpickled."""

from __future__ import annotations

import json
import pickle
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from ndif.config.settings import Settings
from ndif.schema.deployment import DeploymentConfig
from ndif.server.embedded import Owner, Server

NAME = "test-org/tiny-gpt2"
NEW = "nnsight.modeling.transformers.TransformersModel"
OLD = "nnsight.modeling.language.LanguageModel"
KEY = json.dumps({"repo_id": NAME, "revision": None, "task": "text-generation"})
MAX_REQUEST = 20_000
SERVER_PATHS = ("Traceback", "site-packages", str(Path(__file__).parents[3] / "src"))

unpickled: list[str] = []
"""A mark for each payload that was unpickled."""


def record() -> None:
    """Record that a payload was unpickled."""
    unpickled.append("unpickled")


class RecordingPayload:
    """A payload that records its unpickling."""

    def __reduce__(self) -> Any:
        return record, ()


PAYLOAD = zstandard.compress(pickle.dumps(RecordingPayload()))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    """The whole gateway in this process; accepted requests are not run."""
    server = Server(
        Settings(
            max_request_bytes=MAX_REQUEST, runtimes_dir=tmp_path_factory.mktemp("no-runtimes")
        ),
        [DeploymentConfig(repo_id=NAME, checkpoint=NAME, task="text-generation", dedicated=True)],
        tmp_path_factory.mktemp("results"),
        Owner(trusted=False),
        host="127.0.0.1",
    )
    return TestClient(server.app, base_url="http://127.0.0.1", raise_server_exceptions=False)


def check_answer(answer: Any) -> None:
    """Check for a refusal that clients can show, or a request that waits unread."""
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
    assert not any(path in answer.text for path in SERVER_PATHS), answer.text
    if answer.content:
        assert answer.headers["Content-Type"] == "application/json"
        body = answer.json()
        if answer.status_code == 200:
            assert body["status"] == "RECEIVED"
        else:
            assert list(body) == ["detail"]
            assert isinstance(body["detail"], str)
            assert body["detail"]
    assert not unpickled


TEXT = st.text(max_size=80)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
KEYS = st.one_of(
    st.just(f"{NEW}:{KEY}"),
    st.builds(lambda path, rest: f"{path}:{rest}", st.sampled_from([NEW, OLD, ""]), TEXT),
    st.builds(
        lambda fields: f"{NEW}:{json.dumps(fields)}",
        st.fixed_dictionaries({}, optional={"repo_id": VALUES, "revision": VALUES, "task": VALUES}),
    ),
)
ENVELOPES = st.one_of(
    st.fixed_dictionaries(
        {"model_key": KEYS | VALUES},
        optional={
            "session_id": VALUES,
            "compress": VALUES,
            "env": st.dictionaries(TEXT, VALUES, max_size=3) | VALUES,
            "more": VALUES,
        },
    ).map(json.dumps),
    VALUES.map(json.dumps),
    st.integers(1, 9000).map(lambda depth: "[" * depth),
    TEXT,
)
BLOBS = st.one_of(
    st.just(PAYLOAD),
    st.binary(max_size=300),
    st.integers(0, len(PAYLOAD)).map(lambda size: PAYLOAD[:size]),
    st.binary(max_size=100).map(lambda rest: PAYLOAD[:4] + rest),
)
SETTINGS = settings(suppress_health_check=list(HealthCheck))


@SETTINGS
@given(ENVELOPES, BLOBS, st.sampled_from([version("nnsight"), "", "0.7.0", "9.9", "x"]))
def test_any_envelope_is_refused_or_accepted_unread(
    gateway: TestClient, envelope: str, blob: bytes, nnsight: str
) -> None:
    parts = {
        "data": (None, envelope.encode(errors="surrogatepass")),
        "blob": ("request", blob),
    }
    check_answer(gateway.post("/request", files=parts, headers={"nnsight-version": nnsight}))


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Return a valid multipart body with bytes changed, removed or inserted."""
    envelope = json.dumps({"model_key": f"{NEW}:{KEY}", "compress": True, "env": {}})
    content = bytearray(
        b'--limit\r\nContent-Disposition: form-data; name="data"\r\n\r\n'
        + envelope.encode()
        + b'\r\n--limit\r\nContent-Disposition: form-data; name="blob"; filename="request"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n" + PAYLOAD + b"\r\n--limit--\r\n"
    )
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, max(len(content) - 1, 0)))
        match draw(st.integers(0, 3)):
            case 0:
                content[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case 1:
                del content[at : at + draw(st.integers(1, 100))]
            case 2:
                content[at:at] = draw(st.binary(max_size=40))
            case _:
                content[at:at] = content[: draw(st.integers(0, 300))]
    return bytes(content)


TYPES = st.one_of(
    st.just("multipart/form-data; boundary=limit"),
    st.text(st.characters(codec="latin-1", exclude_characters="\r\n\0"), max_size=40).map(
        lambda text: f"multipart/form-data; boundary={text}"
    ),
    st.sampled_from(["multipart/form-data", "multipart/form-data; boundary=", "text/plain", ""]),
)


@SETTINGS
@given(bodies(), TYPES)
def test_any_multipart_body_is_refused_or_accepted_unread(
    gateway: TestClient, body: bytes, content_type: str
) -> None:
    headers = {"Content-Type": content_type.encode("latin-1")}
    check_answer(gateway.post("/request", content=body, headers=headers))


LATIN = st.text(st.characters(codec="latin-1", exclude_characters="\r\n\0"), max_size=60)


@SETTINGS
@given(
    st.fixed_dictionaries(
        {"nnsight-model-key": KEYS.map(lambda key: key.encode(errors="replace")) | LATIN},
        optional={
            "nnsight-version": LATIN | st.sampled_from(["0.7.0", "0.6.3", "0.8.1"]),
            "nnsight-compress": LATIN | st.sampled_from(["True", "False"]),
            "ndif-session_id": LATIN,
            "ndif-callback": LATIN | st.just("http://127.0.0.1:1/"),
            "content-length": st.sampled_from(["-1", "x", "99999999999"]),
        },
    ),
    BLOBS,
)
def test_any_headers_are_refused_or_accepted_unread(
    gateway: TestClient, headers: dict[str, str | bytes], blob: bytes
) -> None:
    sent = {
        name: value.replace(b"\n", b"").replace(b"\r", b"").replace(b"\0", b"")
        if isinstance(value, bytes)
        else value.encode("latin-1")
        for name, value in headers.items()
    }
    check_answer(gateway.post("/request", content=blob, headers=sent))


def test_too_large_request_is_refused(gateway: TestClient) -> None:
    parts = {"data": (None, "{}"), "blob": ("request", bytes(MAX_REQUEST))}
    answer = gateway.post("/request", files=parts)
    assert answer.status_code == 413
    check_answer(answer)


def test_unpickling_would_be_recorded() -> None:
    """Without this, none of these tests could fail."""
    pickle.loads(zstandard.decompress(PAYLOAD))
    assert unpickled == ["unpickled"]
    unpickled.clear()
