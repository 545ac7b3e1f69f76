"""Clients of three generations on one server: concurrent, and after one is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.clients.harness import Client, LocalServer
from tests.conftest import NAME, client_environment
from tests.waiting import PATIENCE_S, time_passes

pytestmark = pytest.mark.process

READS = "scenario_reads_of_layers_and_logits"
ROUNDS = 5

SLEEPER = """
import time

import nnsight

Model = getattr(nnsight, "TransformersModel", None) or nnsight.LanguageModel
model = Model({name!r})
with model.trace("Hello", remote=True):
    print("asleep")
    time.sleep({seconds})
    logits = model.lm_head.output.save()
"""


def test_server_serves_three_generations_at_same_time(
    server: LocalServer, client_08: Client, client_07: Client, client_06: Client
) -> None:
    clients = [client_08, client_07, client_06]
    start = threading.Barrier(len(clients))

    def run(client: Client) -> None:
        start.wait()
        for _ in range(ROUNDS):
            client.run(READS)

    with ThreadPoolExecutor(len(clients)) as pool:
        list(pool.map(run, clients))
    status, body = server.get("/status")
    assert status == 200
    [entry] = json.loads(body)["deployments"].values()
    assert entry["runtimes"] == {"0.8": "RUNNING", "0.7": "RUNNING", "0.6": "RUNNING"}
    assert entry["application_state"] == "RUNNING"


@contextmanager
def asleep(
    server: LocalServer, overlay: Path | None, folder: Path
) -> Iterator[subprocess.Popen[str]]:
    """Start a client whose job outlasts every wait."""
    script = folder / "sleeper.py"
    script.write_text(SLEEPER.format(name=NAME, seconds=2 * PATIENCE_S))
    process = subprocess.Popen(
        [sys.executable, script],
        env={**os.environ, **client_environment(server, folder / "hf", overlay)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "asleep" in line:
                break
        else:
            raise AssertionError("".join(lines))
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("generation", ["0.8", "0.7", "0.6"])
def test_killed_client_blocks_no_other_client(
    server: LocalServer,
    runtimes: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    generation: str,
) -> None:
    clients: dict[str, Client] = {
        name: request.getfixturevalue(f"client_{name.replace('.', '')}")
        for name in ("0.8", "0.7", "0.6")
    }
    overlay = None if generation == "0.8" else runtimes / generation
    with asleep(server, overlay, tmp_path) as sleeper, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(clients.pop(generation).run, READS)
        for other in clients.values():
            other.run(READS)
        # Its generation has one queue, with the sleeping job at its head.
        time_passes(0.5)
        assert not waiting.done()
        sleeper.kill()
        waiting.result(PATIENCE_S)
