"""Webhooks and mail of a real server: they survive its death, operators can retry them, logs omit them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from starlette.testclient import TestClient

from ndif.config.settings import Settings
from ndif.control.operations import ListCallbacks, RetryCallbacks
from ndif.schema.callback import Callbacks
from ndif.schema.deployment import OperationError
from ndif.server.embedded import Operator, Owner, Server
from ndif.server.leader import LeaderCandidate
from ndif.server.process_config import ProcessConfig
from ndif.stores.callbacks import CALLBACKS, SqliteCallbacks
from tests.clients.harness import (
    LocalServer,
    StartedServer,
)
from tests.commands import NDIF
from tests.conftest import NAME
from tests.delivery.test_mail import Post, Users, mail_server
from tests.gateway.test_bad_input import send_old
from tests.on_loop import on_loop
from tests.processes import children
from tests.services.process import free_port
from tests.services.redis import RedisServer
from tests.stores.broker.signers import SECRET
from tests.stores.callbacks.test_callbacks import a_callback
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine

PRIVATE = "a-token-of-the-users"


def accepted(server: StartedServer, callback: str) -> str:
    """Submit a job until the leader has published its models and the server accepts; return its id."""
    answers: list[httpx.Response] = []

    def is_taken() -> bool:
        answers.append(send_old(server, ndif_callback=callback))
        return answers[-1].status_code != 503

    until(is_taken, lambda: answers[-1].text)
    assert answers[-1].status_code == 200, answers[-1].text
    job: str = answers[-1].json()["id"]
    return job


def ended(server: LocalServer, job: str) -> bool:
    answer = httpx.get(f"{server.url}/response/{job}").json()
    return answer.get("status") == "ERROR"


@contextmanager
def web_server(port: int, answer: bytes) -> Iterator[list[bytes]]:
    """Run a user's web server at a port, in a thread; yield the received requests."""
    asked: list[bytes] = []
    loop = asyncio.new_event_loop()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", port))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield asked
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)


GOOD, BAD = (f"HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n".encode() for status in (204, 500))


def test_webhook_is_delivered_after_server_was_killed(server_environment: dict[str, str]) -> None:
    arguments = [NAME, "--sandbox", "--port", str(free_port())]
    environment = {**server_environment, "NDIF_CALLBACK_NETWORKS": "127.0.0.0/8"}
    hook = free_port()
    server = LocalServer(*arguments, environment=environment).ready()
    try:
        url = f"http://127.0.0.1:{hook}/done?token={PRIVATE}"
        job = send_old(server, ndif_callback=url).json()["id"]
        until(lambda: ended(server, job))
        # Nothing listens there yet, so the first attempt fails.
        failed = f"request {job}: attempt 1 of its webhook or mail"
        until(lambda: any(failed in line for line in [*server.output]), lambda: str(server.output))
    finally:
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    log = "\n".join(server.output)
    with web_server(hook, GOOD) as asked:
        server = LocalServer(*arguments, "--verbose", environment=environment).ready()
        try:
            until(lambda: asked)
            delivered = f"request {job}: its webhook or mail is delivered"
            until(lambda: any(delivered in line for line in [*server.output]))
        finally:
            server.stop()
    assert asked[0].startswith(f"GET /done?token={PRIVATE}&status=ERROR&id={job} HTTP/1.1".encode())
    assert len(asked) == 1
    log += "\n".join(server.output)
    assert PRIVATE not in log
    assert str(hook) not in log


def test_webhook_is_delivered_after_leader_was_killed(
    server_environment: dict[str, str], redis: RedisServer, tmp_path: Path
) -> None:
    redis.command("flushall")
    environment = {
        **server_environment,
        "NDIF_SESSION_ROOT": str(tmp_path),
        "NDIF_BROKER_URL": redis.url,
        "NDIF_CLUSTER_SECRET": "a secret that the processes share",
        "NDIF_CALLBACK_NETWORKS": "127.0.0.0/8",
    }
    server = StartedServer(NAME, environment=environment)
    hook = free_port()
    log = tmp_path / "current" / "logs" / "dispatcher" / "output.log"
    try:
        server.ready()
        job = accepted(server, f"post+http://127.0.0.1:{hook}/x?token={PRIVATE}")
        until(lambda: f"request {job}: attempt 1 of its webhook or mail" in log.read_text())
        (leader,) = processes_of(server.process.pid, "ndif.server.leader")
        os.kill(leader, signal.SIGKILL)
        with web_server(hook, GOOD) as asked:
            until(lambda: asked)
            until(lambda: f"request {job}: its webhook or mail is delivered" in log.read_text())
        (other,) = processes_of(server.process.pid, "ndif.server.leader")
        assert other != leader
        assert asked[0].startswith(f"POST /x?token={PRIVATE} HTTP/1.1".encode())
        assert (PRIVATE in log.read_text(), str(hook) in log.read_text()) == (False, False)
    finally:
        server.stop()


def processes_of(server: int, module: str) -> list[int]:
    """Return a server's child processes that run a module."""
    return [p for p in children(server) if module in Path(f"/proc/{p}/cmdline").read_text()]


def test_mail_is_sent_without_logging_its_address(server_environment: dict[str, str]) -> None:
    post = Post()
    with mail_server(post, authenticator=Users(), auth_require_tls=False) as port:
        environment = {
            **server_environment,
            "NDIF_SMTP_URL": f"smtp://ndif%40example.org:p%40ss%2Fword@127.0.0.1:{port}",
            "NDIF_MAIL_FROM": "ndif@example.org",
        }
        server = LocalServer(NAME, "--sandbox", "--verbose", environment=environment).ready()
        try:
            job = send_old(server, ndif_callback="ada@lovelace.example").json()["id"]
            until(lambda: post.received)
            delivered = f"request {job}: its webhook or mail is delivered"
            until(lambda: any(delivered in line for line in [*server.output]))
        finally:
            server.stop()
    (envelope,) = post.received
    assert envelope.rcpt_tos == ["ada@lovelace.example"]
    assert f"Your job {job} has ended: ERROR.".encode() in envelope.content
    log = "\n".join(server.output)
    assert not [secret for secret in ("lovelace", "p%40ss", "p@ss") if secret in log]


def test_operator_lists_and_retries_failed_webhook(
    server_environment: dict[str, str], tmp_path: Path
) -> None:
    environment = {
        **server_environment,
        "NDIF_SESSION_ROOT": str(tmp_path),
        "NDIF_CALLBACK_NETWORKS": "127.0.0.0/8",
        "NDIF_CALLBACK_ATTEMPTS": "1",
    }
    server = StartedServer(NAME, environment=environment)
    hook = free_port()

    def ndif(*arguments: str) -> dict[str, Any]:
        command = [NDIF, "callbacks", *arguments, "--json"]
        variables = {**os.environ, **environment}
        process = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
        answer: dict[str, Any] = json.loads(process.stdout)
        return answer

    try:
        server.ready()
        with web_server(hook, BAD) as asked:
            url = f"post+http://127.0.0.1:{hook}/x"
            job = send_old(server, ndif_callback=url).json()["id"]
            until(lambda: ndif("list")["given_up"] == 1)
        (row,) = ndif("list")["callbacks"]
        assert (row["request_id"], row["problem"]) == (job, "it answered 500")
        assert row["to"] == f"post+http://127.0.0.1:{hook}/…"
        with web_server(hook, GOOD) as asked:
            assert ndif("retry", job[:8]) == {"retried": [job]}
            until(lambda: ndif("list")["callbacks"] == [])
        assert asked[0].startswith(b"POST /x HTTP/1.1")
        assert b"webhook-signature: v1," in asked[0]
    finally:
        server.stop()


@on_loop
async def test_callback_operations_handle_missing_entries_and_wrong_arguments(
    tmp_path: Path,
) -> None:
    server = Server(Settings(), [], tmp_path, Operator(), host="127.0.0.1")
    control = server.coordinator.control_plane
    none = Callbacks(waiting=0, given_up=0, callbacks=[])
    assert await ListCallbacks().perform(control) == none
    assert (await RetryCallbacks(all=True).perform(control)).retried == []
    with pytest.raises(
        OperationError, match="No webhook or mail of a request 'abc' waits"
    ) as refused:
        await RetryCallbacks(request_id="abc").perform(control)
    assert refused.value.status == 404
    for wrong in (RetryCallbacks(), RetryCallbacks(request_id="abc", all=True)):
        with pytest.raises(OperationError, match="either one request, or all"):
            await wrong.perform(control)
    file = cast(SqliteCallbacks, server.stores.callbacks)._file
    await file._in_thread(file._connection.close)
    with pytest.raises(OperationError, match="The webhooks and mails cannot be read"):
        await ListCallbacks().perform(control)


@on_loop
async def test_leader_moves_local_callbacks_to_broker(redis: RedisServer, tmp_path: Path) -> None:
    redis.command("flushall")
    left, callbacks = SqliteCallbacks(tmp_path / CALLBACKS), [a_callback(n) for n in range(3)]
    for callback in callbacks:
        await left.add(callback)
    await left.stop()
    config = ProcessConfig(
        listening=0,
        results=tmp_path,
        secret="s",
        token="t",
        host="127.0.0.1",
        deployments=[],
        cluster_secrets=[SECRET],
    )
    leader = LeaderCandidate(Settings(broker_url=redis.url), config)
    await leader.take_callbacks()
    assert await leader.stores.callbacks.due(100.0, 10) == callbacks
    await leader.stores.stop()
    again = SqliteCallbacks(tmp_path / CALLBACKS)
    assert await again.counts() == (0, 0)
    await again.stop()


@pytest.mark.parametrize(
    ("whose", "is_called"),
    [(Owner(trusted=True), True), (Owner(trusted=False), False), (Operator(), False)],
)
def test_only_server_of_trusted_owner_accepts_local_webhook(
    tmp_path: Path, whose: Owner | Operator, is_called: bool
) -> None:
    server = Server(
        Settings(dev_mode=True),
        [],
        tmp_path,
        whose,
        host="127.0.0.1",
        secret="s" * 16,
    )
    client = TestClient(
        server.app, "http://127.0.0.1"
    )  # without its lifespan, nothing is delivered
    headers = {"ndif-callback": "http://127.0.0.1:9/"}
    refused = client.post("/request", headers=headers)
    assert refused.status_code == 400
    # Everything else in the request is invalid.
    assert ("The callback" not in refused.json()["detail"]) is is_called
