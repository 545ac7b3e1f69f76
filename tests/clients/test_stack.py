"""Every scenario of two generations against the server of many processes: Redis, S3, two gateways."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.harness import StartedServer, until
from tests.clients.test_clients import EVERY, OF_THE_TRUSTED
from tests.conftest import NAME, Clients
from tests.services.redis import RedisServer
from tests.services.swift import ACCESS_KEY, SECRET_KEY, SwiftServer


@pytest.fixture(scope="module")
def stack(
    server_environment: dict[str, str],
    redis: RedisServer,
    s3: SwiftServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[StartedServer]:
    """`ndif start` with a broker, an object store, and two processes that answer."""
    redis.command("flushall")
    started = StartedServer(
        NAME,
        environment={
            **server_environment,
            "NDIF_SESSION_ROOT": str(tmp_path_factory.mktemp("session")),
            "NDIF_BROKER_URL": redis.url,
            "NDIF_API_WORKERS": "2",
            "NDIF_HOTSWAPPING": "false",
            "NDIF_OBJECT_STORE_URL": s3.url,
            "NDIF_OBJECT_STORE_ACCESS_KEY": ACCESS_KEY,
            "NDIF_OBJECT_STORE_SECRET_KEY": SECRET_KEY,
        },
    )
    try:
        started.ready()
        until(lambda: b'"RUNNING"' in started.get("/status")[1])
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def users(
    stack: StartedServer,
    hub_url: str,
    tiny_gpt2: Path,
    runtimes: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Clients]:
    """Clients of it; what a model's files say they have from the hub, as on any machine."""
    clients = Clients(stack, tiny_gpt2, runtimes, tmp_path_factory, hub_url)
    yield clients
    clients.close()


@pytest.mark.parametrize(("generation", "scenario"), [e for e in EVERY if e[0] != "0.6"])
def test_each_channel_and_request_may_meet_another_process(
    users: Clients, generation: str, scenario: str
) -> None:
    refusal = OF_THE_TRUSTED.get(scenario)
    if refusal is None:
        users[generation].run(scenario)
    else:
        with pytest.raises(AssertionError, match=refusal):
            users[generation].run(scenario)
