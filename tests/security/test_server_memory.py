"""The memory of a server's processes while clients attack it, and after."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from tests.clients.harness import LocalServer
from tests.conftest import NAME
from tests.security.hostile_clients import ATTACKS, MB, Attack, Hostile, memory

CLIENTS = 8
DURING, AFTER = 300 * MB, 50 * MB
_PATIENCE_S = 20
_SAMPLE_S = 0.1


@pytest.fixture(scope="module")
def attacked(server_environment: dict[str, str]) -> Iterator[LocalServer]:
    """A server of everybody, whose clients' addresses are what a proxy on this machine says."""
    started = LocalServer(NAME, "--sandbox", "--no-token", environment=server_environment)
    try:
        yield settled(started.ready())
    finally:
        started.stop()


def settled(server: LocalServer) -> LocalServer:
    """Wait until a server has the processes that wait for requests: it serves before it has all."""
    before, now = 0, memory(server.process.pid)
    while abs(now - before) > MB:
        time.sleep(1)
        before, now = now, memory(server.process.pid)
    return server


def attack(server: LocalServer, kind: Attack) -> tuple[list[Hostile], int]:
    """Attack by eight clients at once; return them connected, and the peak of the server's memory."""
    clients = [Hostile(server.url, f"10.0.0.{number}") for number in range(CLIENTS)]
    threads = [threading.Thread(target=kind, args=(client,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    peak, deadline = 0, time.monotonic() + _PATIENCE_S
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        time.sleep(_SAMPLE_S)
        peak = max(peak, memory(server.process.pid))
    return clients, max(peak, memory(server.process.pid))


@pytest.mark.parametrize("kind", ATTACKS, ids=lambda kind: kind.__name__)
def test_the_memory_of_a_server_is_bounded_and_comes_back(
    attacked: LocalServer, kind: Attack
) -> None:
    before = memory(attacked.process.pid)
    clients, peak = attack(attacked, kind)
    during = peak - before
    assert not any(client.is_unknown for client in clients)
    for client in clients:
        client.close()
    deadline = time.monotonic() + _PATIENCE_S
    while (after := memory(attacked.process.pid) - before) > AFTER and time.monotonic() < deadline:
        time.sleep(0.2)
    print(f"{kind.__name__}: {during / MB:.0f} MB during, {after / MB:.0f} MB after")
    assert during <= DURING
    assert after <= AFTER
    assert attacked.get("/ping") == (200, b'"pong"')
