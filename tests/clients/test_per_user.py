"""Clients with a key, whose requests run in one confined process one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.harness import Client, StartedServer, scenarios, until
from tests.conftest import NAME, client_environment

KEY = "a-key-of-eight-letters"


@pytest.fixture(scope="module")
def server(
    server_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartedServer]:
    """`ndif start` with keys, which trusts nobody."""
    folder = tmp_path_factory.mktemp("per-user")
    keys = folder / "keys.yaml"
    keys.write_text(f"keys:\n  - {{key: {KEY}}}\n")
    started = StartedServer(
        NAME,
        environment={
            **server_environment,
            "NDIF_SESSION_ROOT": str(folder / "session"),
            "NDIF_API_KEYS": str(keys),
            "NDIF_RUNNER_SCOPE": "user",
            "NDIF_AUTOSCALE_MAX_REPLICAS": "1",
        },
    )
    yield started.ready()  # type: ignore[misc]
    started.stop()


@pytest.fixture(scope="module", params=["0.8", "0.7"])
def client(
    request: pytest.FixtureRequest,
    server: StartedServer,
    runtimes: Path,
    tiny_gpt2: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Client]:
    """A client of each of two generations."""
    overlay = None if request.param == "0.8" else runtimes / request.param
    home = tmp_path_factory.mktemp("client")
    environment = {**client_environment(server, home, overlay), "NDIF_API_KEY": KEY}
    module = "scenarios_headers" if overlay else "scenarios_08"
    started = Client(module, NAME, tiny_gpt2, environment)
    yield started
    started.close()


def waiting(server: StartedServer) -> set[int]:
    """The runners that are stopped until their user comes again."""
    found = set()
    for zygote in server.processes():
        for child in Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split():
            if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                found.add(int(child))
    return found


def test_plain_traces_share_a_process(server: StartedServer, client: Client) -> None:
    before: set[int] = waiting(server)
    client.run("scenario_trace")
    first = until(lambda: waiting(server) - before)
    client.run("scenario_trace")
    assert until(lambda: waiting(server)) >= first
