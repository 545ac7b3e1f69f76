"""The process of a probe: its environment, and a client that ends, or is killed, without an answer."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from pathlib import Path

import pytest

from ndif.host.runtimes import Runtime
from ndif.probe.outcome import ProbeOutcome
from ndif.probe.probe import Target, probe, variables_of_client
from ndif.schema.states import ProbeKind
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.process

TARGET = Target("org/name", None, "text-generation", "0.8")
HERE, ELSEWHERE = "http://127.0.0.1:8001", "https://ndif.example.org"


def runtime(interpreter: str = sys.executable) -> Runtime:
    return Runtime("0.8", "0.8.1", Path(interpreter), path=())


def test_probe_client_gets_proxy_settings_but_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {"NDIF_CLUSTER_SECRET": "a", "HF_TOKEN": "b", "AWS_SECRET_ACCESS_KEY": "c"}
    way = {"HTTPS_PROXY": "http://proxy:3128", "SSL_CERT_FILE": "/ca.pem"}
    for name, value in {**secrets, **way}.items():
        monkeypatch.setenv(name, value)
    own, elsewhere = (variables_of_client(runtime(), url) for url in (HERE, ELSEWHERE))
    assert not {*secrets} & {*own, *elsewhere}
    assert not {*way} & {*own}
    assert {**own, **way}.items() <= elsewhere.items()


def outcome(interpreter: Path, timeout_s: float = PATIENCE_S) -> ProbeOutcome:
    """Return the outcome of a probe by a program that stands for an interpreter."""
    asked = probe(TARGET, runtime(str(interpreter)), HERE, "key", Path("/none"), timeout_s)
    return asyncio.run(asked)


def program(folder: Path, text: str) -> Path:
    file = folder / "interpreter"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def test_probe_client_that_ends_without_answer_is_error_with_reason(tmp_path: Path) -> None:
    ended = outcome(program(tmp_path, "echo first >&2; echo 'it broke' >&2; exit 1"))
    assert ended == ProbeOutcome(ProbeKind.ERROR, "The client ended without an answer: it broke")
    assert outcome(program(tmp_path, "echo nonsense")).kind is ProbeKind.ERROR
    endless = outcome(program(tmp_path, "cat /dev/zero"))
    assert endless.kind is ProbeKind.ERROR
    assert endless.reason.endswith("its line is longer than 64KiB")


def test_child_processes_of_probe_client_end_with_it(tmp_path: Path) -> None:
    """A child of the client holds a socket, whose other end sees it go."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        child = (
            f"import socket, time; one = socket.create_connection(('127.0.0.1', {port})); "
            "one.send(b'here'); time.sleep(600)"
        )
        heard: list[bytes] = []

        def listen() -> None:
            connection, _ = listening.accept()
            with connection:
                heard.append(connection.recv(10))
                heard.append(connection.recv(10))

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        result = outcome(program(tmp_path, f'{sys.executable} -c "{child}" & wait'), timeout_s=5.0)
        listener.join(PATIENCE_S)
    assert result == ProbeOutcome(ProbeKind.TIMEOUT, "No value came within 5s.")
    assert heard == [b"here", b""]
