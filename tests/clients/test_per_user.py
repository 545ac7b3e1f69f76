"""Clients with one key, whose requests run one after the other in one sandboxed process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.harness import Client, StartedServer
from tests.clients.table import PER_USER, chosen
from tests.conftest import NAME, client_environment
from tests.waiting import until

pytestmark = pytest.mark.process

KEY = "a-key-of-eight-letters"


@pytest.fixture(scope="module")
def server(
    server_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartedServer]:
    """`ndif start` with keys, which runs all code sandboxed."""
    folder = tmp_path_factory.mktemp("per-user")
    keys = folder / "keys.yaml"
    keys.write_text(f"keys:\n  - {{key: {KEY}}}\n")
    started = StartedServer(
        NAME,
        environment={
            **server_environment,
            "NDIF_SESSION_ROOT": str(folder / "session"),
            "NDIF_API_KEYS": str(keys),
            "NDIF_CALLBACK_NETWORKS": "127.0.0.0/8",
            "NDIF_AUTOSCALE_MAX_REPLICAS": "1",
        },
    )
    try:
        started.ready()
        until(lambda: started.get(f"/hub/api/models/{NAME}")[0] == 200)
        yield started
    finally:
        started.stop()


MODULES = {"0.8": "scenarios_08", "0.7": "scenarios_headers"}


@pytest.fixture(scope="module")
def users(
    server: StartedServer,
    runtimes: Path,
    tiny_gpt2: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Client]]:
    """A client of each generation, with the same key."""
    started = {}
    for generation, module in MODULES.items():
        overlay = None if generation == "0.8" else runtimes / generation
        home = tmp_path_factory.mktemp("client")
        environment = {**client_environment(server, home, overlay), "NDIF_API_KEY": KEY}
        started[generation] = Client(module, NAME, tiny_gpt2, environment)
    yield started
    for client in started.values():
        client.close()


def waiting(server: StartedServer) -> set[int]:
    """Return the runners that are stopped until the next request of their user."""
    pids = set()
    for zygote in server.processes():
        for child in Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split():
            if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                pids.add(int(child))
    return pids


@pytest.mark.parametrize("generation", MODULES)
def test_plain_traces_share_process(
    server: StartedServer, users: dict[str, Client], generation: str
) -> None:
    before = waiting(server)

    def new() -> set[int]:
        pids: set[int] = until(lambda: waiting(server) - before, lambda: "\n".join(server.output))
        return pids

    users[generation].run("scenario_reads_of_layers_and_logits")
    first = new()
    users[generation].run("scenario_reads_of_layers_and_logits")
    assert new() == first


@pytest.mark.parametrize(("generation", "scenario"), chosen(PER_USER, *MODULES))
def test_shared_process_gives_same_results_as_local_run(
    users: dict[str, Client], generation: str, scenario: str
) -> None:
    """Compare with the client's local result, independent of earlier requests."""
    users[generation].run(scenario)
