"""`--replicas`: one queue and several processes, one of them killed."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.harness import Client, LocalServer, model_processes
from tests.conftest import NAME, client_environment
from tests.waiting import until

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def server(server_environment: dict[str, str]) -> Iterator[LocalServer]:
    """Two replicas of one thread each."""
    started = LocalServer(NAME, "--replicas", "2", "--threads", "1", environment=server_environment)
    try:
        yield started.ready()
    finally:
        started.stop()


@pytest.fixture(scope="module")
def client(
    server: LocalServer, tiny_gpt2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """A client of this server."""
    environment = client_environment(server, tmp_path_factory.mktemp("client"), None)
    started = Client("scenarios_replicas", NAME, tiny_gpt2, environment)
    yield started
    started.close()


def replicas(server: LocalServer) -> int:
    """Return the number of replicas that the server reports."""
    entries = json.loads(server.get("/status")[1])["deployments"].values()
    # Clients of 0.8 count entries, one per replica.
    (count,) = {entry["replicas"]["0.8"] for entry in entries}
    assert count == len(entries)
    return int(count)


def running_jobs(server: LocalServer) -> int:
    jobs = json.loads(server.get("/requests")[1])["requests"]
    return [job["status"] for job in jobs].count("RUNNING")


def test_two_replicas_serve_one_queue(server: LocalServer, client: Client) -> None:
    assert replicas(server) == 2
    assert len(model_processes(server.process.pid)) == 2
    client.run("scenario_two_run_side_by_side")
    client.run("scenario_five_go_where_there_is_room")


def test_killed_model_process_loses_no_job(server: LocalServer, client: Client) -> None:
    running = threading.Thread(
        target=client.run, args=("scenario_jobs_while_a_model_process_is_killed",)
    )
    failures: list[threading.ExceptHookArgs] = []
    hook, threading.excepthook = threading.excepthook, failures.append
    try:
        running.start()
        until(lambda: running_jobs(server) == 2)
        os.kill(model_processes(server.process.pid)[0], signal.SIGKILL)
        running.join()
    finally:
        threading.excepthook = hook
    assert not failures, failures[0].exc_value
    # The killed process was running a job.
    assert any("it is tried again" in line for line in server.output), list(server.output)

    def both_serve() -> bool:
        client.run("scenario_a_short_job")
        return replicas(server) == 2

    until(both_serve)
    client.run("scenario_five_go_where_there_is_room")
