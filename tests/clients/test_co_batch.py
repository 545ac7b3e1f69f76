"""Users of nnsight 0.8 whose jobs may share forward passes: each gets the same results as alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from tests.clients.harness import Client, LocalServer
from tests.clients.table import SHARED_PASSES, chosen
from tests.conftest import NAME, client_environment

pytestmark = pytest.mark.process

USERS = 3
READS = "scenario_reads_of_layers_and_logits"
ROUNDS = 5


@pytest.fixture(scope="module")
def joining(server_environment: dict[str, str]) -> Iterator[LocalServer]:
    """A server whose trusted jobs share passes."""
    started = LocalServer(NAME, environment={**server_environment, "NDIF_CO_BATCH": "8"})
    try:
        yield started.ready()
    finally:
        started.stop()


@pytest.fixture(scope="module")
def users(
    joining: LocalServer, tiny_gpt2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Client]]:
    environments = (
        client_environment(joining, tmp_path_factory.mktemp("client"), None) for _ in range(USERS)
    )
    # A shared pass may sum in another order and round differently.
    started = [
        Client("scenarios_08", NAME, tiny_gpt2, {**variables, "TESTS_ROUND": "1e-5"})
        for variables in environments
    ]
    yield started
    for client in started:
        client.close()


def shared(server: LocalServer) -> int:
    _, text = server.get("/metrics")
    return sum(
        int(float(count))
        for count in re.findall(r"^ndif_jobs_shared_total\{.*\} (\S+)$", text.decode(), re.M)
    )


def at_once(users: list[Client], scenario: str, rounds: int = 1) -> None:
    start = Barrier(len(users))

    def run(client: Client) -> None:
        for _ in range(rounds):
            start.wait()
            client.run(scenario)

    with ThreadPoolExecutor(len(users)) as pool:
        list(pool.map(run, users))


def test_plain_traces_share_passes(joining: LocalServer, users: list[Client]) -> None:
    before = shared(joining)
    at_once(users, READS, ROUNDS)
    assert shared(joining) > before


@pytest.mark.parametrize("scenario", [name for _, name in chosen(SHARED_PASSES, "0.8")])
def test_concurrent_users_find_their_own_results(users: list[Client], scenario: str) -> None:
    at_once(users, scenario)
