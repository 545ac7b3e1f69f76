"""The memory of a server's processes, and an honest user's trace, while eight clients attack it at once."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
from pathlib import Path

from tests.security.hostile_clients import ATTACKS, MB, Attack, Hostile, memory, never_reads

from bench.figures import Figure
from bench.scenario import Site
from bench.servers.processes import NAME, client, server

_CLIENTS = 8
_ATTACK_S = 30.0
_AFTER_S = 60.0
_SAMPLE_S = 0.25


def measure(site: Site) -> list[Figure]:
    """Measure the cost of the attacks of `tests/security` by eight clients for half a minute."""
    with server(site.folder, site.environment, "--sandbox", "--no-token") as (url, pid, _):
        client("honest", "0.8", url)  # do not count the memory of the first traces as an attack's
        with tempfile.NamedTemporaryFile() as file:
            client("honest", "0.8", url, file.name)
            kinds = (never_reads(Path(file.name).read_bytes()), *ATTACKS)
        before = memory(pid)
        alone = _trace_s(url)
        ends, clients = threading.Event(), set[Hostile]()
        attackers = [
            threading.Thread(target=_attack, args=(url, kinds, number, ends, clients), daemon=True)
            for number in range(_CLIENTS)
        ]
        peak = _Peak(pid)
        for attacker in attackers:
            attacker.start()
        beside = _trace_s(url)
        time.sleep(max(0.0, _ATTACK_S - peak.elapsed_s))
        during = peak.stop() - before
        ends.set()
        for connected in list(clients):
            connected.close()
        time.sleep(_AFTER_S)
        after = memory(pid) - before
    return [
        Figure(
            "eight hostile clients: growth", during / MB, 300, "MB", how="peak of all processes"
        ),
        Figure("a minute after eight hostile clients", after / MB, 50, "MB", how="all processes"),
        Figure(
            "a trace beside eight hostile clients",
            beside / alone,
            2,
            "x",
            how=f"{beside * 1e3:.0f} ms beside {alone * 1e3:.0f} ms alone",
        ),
    ]


class _Peak:
    """The largest memory of a server's processes since its start."""

    def __init__(self, pid: int) -> None:
        self._began = time.monotonic()
        self._most = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, args=(pid,), daemon=True)
        self._thread.start()

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._began

    def _sample(self, pid: int) -> None:
        while not self._done.wait(_SAMPLE_S):
            self._most = max(self._most, memory(pid))

    def stop(self) -> int:
        """Stop sampling, and return the bytes."""
        self._done.set()
        self._thread.join()
        return self._most


def _attack(
    url: str, kinds: tuple[Attack, ...], number: int, ends: threading.Event, clients: set[Hostile]
) -> None:
    """Run one attack after another, each held for a second, until `ends` is set."""
    # The attacker stands for another machine: its work should not take a core from the server.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)
    while not ends.is_set():
        kind = kinds[number % len(kinds)]
        number += 1
        try:
            attacker = Hostile(url, f"10.0.0.{number % _CLIENTS}", NAME)
        except OSError:
            continue
        clients.add(attacker)
        with contextlib.suppress(OSError, AssertionError):  # the server did not accept it
            kind(attacker)
            ends.wait(1)
        clients.discard(attacker)
        attacker.close()


def _trace_s(url: str) -> float:
    """Return the median seconds of a small trace."""
    took: float = json.loads(client("honest", "0.8", url).stdout.splitlines()[-1])
    return took
