"""Hybrid jobs of untrusted users: data sent in each direction, and memory that is freed afterwards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.harness import Client, LocalServer, scenarios
from tests.conftest import NAME, client_environment

pytestmark = pytest.mark.process

LIMITS = {
    "NDIF_MAX_STREAMED_BYTES": "4000000",
    "SOCKETIO_MAX_HTTP_BUFFER_SIZE": "2000000",
    "NDIF_EXECUTION_TIMEOUT_SECONDS": "20",
}
ALLOWANCE = 64 << 20
"""The allowed rise of the server's memory, less than a quarter of the sent bytes."""


@pytest.fixture(scope="module")
def limited(server_environment: dict[str, str]) -> Iterator[LocalServer]:
    """A server for untrusted users, with low limits."""
    started = LocalServer(NAME, "--sandbox", environment={**server_environment, **LIMITS})
    try:
        yield started.ready()
    finally:
        started.stop()


@pytest.fixture(scope="module")
def client(
    limited: LocalServer,
    tiny_gpt2: Path,
    runtimes: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Client]:
    """A client of nnsight 0.7."""
    home = tmp_path_factory.mktemp("client-hybrid")
    environment = client_environment(limited, home, runtimes / "0.7")
    started = Client("scenarios_hybrid", NAME, tiny_gpt2, environment)
    yield started
    started.close()


def peak_memory(server: LocalServer) -> int:
    """Return the peak memory of the server's own process in bytes."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert match
    return int(match[1]) << 10


@pytest.mark.parametrize("scenario", scenarios("scenarios_hybrid"))
def test_hybrid_job_of_untrusted_user_stays_within_memory_limit(
    client: Client, limited: LocalServer, scenario: str
) -> None:
    before = peak_memory(limited)
    client.run(scenario)
    assert peak_memory(limited) - before < ALLOWANCE
