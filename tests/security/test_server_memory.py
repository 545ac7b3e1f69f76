"""The memory of a server's processes during and after attacks by clients."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import psutil
import pytest

from tests.clients.harness import LocalServer
from tests.conftest import NAME
from tests.security.hostile_clients import ATTACKS, MB, Attack, Hostile, memory
from tests.waiting import time_passes, until

pytestmark = pytest.mark.process

CLIENTS = 8
DURING, AFTER = 300 * MB, 50 * MB
_SAMPLE_S = 0.1


@pytest.fixture(scope="module")
def attacked(server_environment: dict[str, str]) -> Iterator[LocalServer]:
    """An open server that takes its clients' addresses from a proxy on this machine."""
    started = LocalServer(NAME, "--sandbox", "--no-token", environment=server_environment)
    try:
        yield settled(started.ready())
    finally:
        started.stop()


def settled(server: LocalServer) -> LocalServer:
    """Wait until a server has started all waiting processes; it serves before that."""

    def rests() -> bool:
        memory_before, worked_before = memory(server.process.pid), worked_s(server.process.pid)
        time_passes(1)
        grown = memory(server.process.pid) - memory_before
        return abs(grown) <= MB and worked_s(server.process.pid) - worked_before < 0.1

    until(rests)
    return server


def worked_s(pid: int) -> float:
    """Return the CPU time of a process and its descendants."""
    total = 0.0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def attack(server: LocalServer, kind: Attack) -> tuple[list[Hostile], int]:
    """Attack with eight clients at once; return them, still connected, and the server's peak memory."""
    clients = [Hostile(server.url, f"10.0.0.{number}") for number in range(CLIENTS)]
    threads = [threading.Thread(target=kind, args=(client,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    peak = 0

    def are_done() -> bool:
        nonlocal peak
        time_passes(_SAMPLE_S)
        peak = max(peak, memory(server.process.pid))
        return not any(thread.is_alive() for thread in threads)

    until(are_done)
    return clients, max(peak, memory(server.process.pid))


@pytest.mark.parametrize("kind", ATTACKS, ids=lambda kind: kind.__name__)
def test_server_memory_is_bounded_during_attack_and_freed_afterwards(
    attacked: LocalServer, kind: Attack
) -> None:
    before = memory(attacked.process.pid)
    clients, peak = attack(attacked, kind)
    during = peak - before
    assert not any(client.is_unknown for client in clients)
    for client in clients:
        client.close()

    def after() -> int:
        return memory(attacked.process.pid) - before

    print(f"{kind.__name__}: {during / MB:.0f} MB during")
    assert during <= DURING
    until(lambda: after() <= AFTER, lambda: f"{after() / MB:.0f} MB after")
    assert attacked.get("/ping") == (200, b'"pong"')
