"""Clients of every generation with results on a real S3 server."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.harness import LocalServer
from tests.conftest import NAME, Clients
from tests.services.swift import ACCESS_KEY, SECRET_KEY, SwiftServer
from tests.waiting import time_passes, until

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STORED = [
    ("0.8", "scenario_a_large_result_is_fetched"),
    ("0.8", "scenario_without_compression"),
    ("0.8", "scenario_non_blocking"),
    # A live client waits until its generation is loaded; a polling client waits less.
    ("0.7", "scenario_reads_of_layers_and_logits"),
    ("0.7", "scenario_non_blocking"),
    ("0.6", "scenario_reads_of_layers_and_logits"),
    ("0.6", "scenario_non_blocking"),
]


@pytest.fixture(scope="module")
def server(s3: SwiftServer, server_environment: dict[str, str]) -> Iterator[LocalServer]:
    """A sandboxed server that sends every result as a URL of the object store."""
    environment = {
        **server_environment,
        "NDIF_OBJECT_STORE_URL": s3.url,
        "NDIF_OBJECT_STORE_PUBLIC_URL": s3.url.replace("127.0.0.1", "localhost"),
        "NDIF_OBJECT_STORE_ACCESS_KEY": ACCESS_KEY,
        "NDIF_OBJECT_STORE_SECRET_KEY": SECRET_KEY,
        "NDIF_MAX_INLINE_RESULT_BYTES": "0",
    }
    started = LocalServer(NAME, "--sandbox", environment=environment)
    try:
        yield started.ready()
    finally:
        started.stop()


@pytest.fixture(scope="module")
def clients(
    server: LocalServer, tiny_gpt2: Path, runtimes: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Clients]:
    """Clients of the server, one of each generation."""
    started = Clients(server, tiny_gpt2, runtimes, tmp_path_factory)
    yield started
    started.close()


@pytest.mark.parametrize(("generation", "scenario"), STORED)
def test_stored_result_matches_local_result(
    clients: Clients, generation: str, scenario: str
) -> None:
    clients[generation].run(scenario)


def test_live_client_waits_while_store_is_unavailable(clients: Clients, s3: SwiftServer) -> None:
    client, failed = clients["0.8"], []

    def run() -> None:
        try:
            client.run("scenario_a_large_result_is_fetched")
        except AssertionError as error:
            failed.append(error)

    running = threading.Thread(target=run)
    with s3.away():
        running.start()
        time_passes(8)  # longer than the store's short retry limit
        assert running.is_alive()
    running.join()
    assert not failed, failed[0]


def test_poll_is_asked_to_retry_while_store_is_unavailable(
    server: LocalServer, s3: SwiftServer
) -> None:
    url = f"{server.url}/response/01234567-89ab-cdef-0123-456789abcdef"
    assert httpx.get(url).json()["status"] == "ERROR"
    with s3.away():
        away = httpx.get(url)
    assert away.status_code == 503
    assert int(away.headers["Retry-After"]) > 0
    assert any(
        re.search("the object store at .* cannot be reached", line) for line in server.output
    )


def test_job_steps_are_readable_while_store_is_silent(
    server: LocalServer, clients: Clients, s3: SwiftServer
) -> None:
    clients["0.8"].run("scenario_non_blocking")

    def traces() -> list[dict[str, Any]]:
        jobs = httpx.get(f"{server.url}/requests").json()["requests"]
        ids = [job["id"] for job in jobs if job["ended"] is not None]
        return [httpx.get(f"{server.url}/requests/{job_id}").json() for job_id in ids]

    trace = until(lambda: next((row for row in traces() if row["stored"]), None))
    url = f"{server.url}/requests/{trace['id']}"
    s3.pause()
    try:
        began = time.monotonic()
        assert httpx.get(url).json() == {**trace, "stored": None}
        assert time.monotonic() - began < 30  # the server waits two seconds
    finally:
        s3.resume()
    assert until(lambda: httpx.get(url).json() == trace)


def test_server_serves_no_results_itself(server: LocalServer) -> None:
    assert server.get("/results/01234567-89ab-cdef-0123-456789abcdef")[0] == 404
