"""Adapters that clients name: fetched by a trusted runner itself, or by the host of a sandboxed one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.harness import Client, LocalServer
from tests.conftest import NAME, Clients, client_environment

pytestmark = pytest.mark.process


@pytest.fixture(params=["server", "sandboxed"])
def reaching(
    request: pytest.FixtureRequest, hub_url: str, tiny_gpt2: Path, tmp_path: Path
) -> Iterator[Client]:
    """A client that reaches the hub, once trusted by its server and once sandboxed."""
    server: LocalServer = request.getfixturevalue(request.param)
    environment = {**client_environment(server, tmp_path, None), "HF_ENDPOINT": hub_url}
    client = Client("scenarios_08", NAME, tiny_gpt2, environment)
    yield client
    client.close()


def test_adapter_is_loaded_from_hub_and_from_cache(reaching: Client) -> None:
    reaching.run("adapted_from_a_hub")
    # The second run uses the cache.
    reaching.run("adapted_from_a_hub")


def test_untrusted_user_cannot_name_forbidden_adapters(untrusted: Clients) -> None:
    untrusted["0.8"].run("adapters_that_untrusted_users_may_not_name")
