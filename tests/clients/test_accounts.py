"""Real clients with keys of several tiers, on servers with keys in SQLite and in PostgreSQL."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ndif.stores.accounts import tier_with
from ndif.stores.accounts.sql.database import Database
from ndif.stores.accounts.sql.registry import SqlRegistry
from tests.clients.harness import Client, StartedServer, scenarios
from tests.commands import NDIF
from tests.conftest import NAME, client_environment
from tests.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.slow]

TIERS: Mapping[str, Mapping[str, Any]] = {
    "free": {},
    "brisk": {"requests_per_minute": 3},
    "small": {"unfinished_jobs": 2, "request_bytes": 100_000, "result_bytes": 200_000},
    "last": {"queue_depth": 1},
    "store": {"stored_bytes": 300_000},
    "channel": {"channels": 1},
    "spent": {"execution_s_per_day": 1},
}
GENERATIONS = ("0.8", "0.7")


@dataclass(frozen=True)
class Keyed:
    """A server, and the keys of each generation's users by tier."""

    server: StartedServer
    keys: Mapping[str, Mapping[str, str]]
    revoked: Mapping[str, str]
    """The id of the key to revoke, by generation."""


async def filled(url: str) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Create the tiers and keys in a database."""
    registry = SqlRegistry(Database(url))
    keys: dict[str, dict[str, str]] = {generation: {} for generation in GENERATIONS}
    revoked = {}
    try:
        for name, limits in TIERS.items():
            await registry.create_tier(
                tier_with(["priority"] if name == "free" else [], name, limits=limits)
            )
        for generation, tier_keys in keys.items():
            for tier in TIERS:
                user = f"{tier}-{generation}"
                tier_keys[tier] = (await registry.create_key(user, tiers=[tier])).api_key
            # Two keys belong to one user.
            for name in ("revoked", "heir"):
                row = await registry.create_key(f"ada-{generation}", name)
                tier_keys[name] = row.api_key
                revoked.setdefault(generation, row.id)
    finally:
        await registry.close()
    return keys, revoked


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def keyed(
    request: pytest.FixtureRequest,
    server_environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("accounts")
    if request.param == "sqlite":
        url = f"sqlite:///{folder / 'keys.sqlite'}"
    else:
        url = request.getfixturevalue("postgres").database()
    keys, revoked = asyncio.run(filled(url))
    started = StartedServer(
        NAME,
        environment={
            **server_environment,
            "NDIF_SESSION_ROOT": str(folder / "session"),
            "NDIF_DATABASE_URL": url,
            "NDIF_AUTOSCALE_MAX_REPLICAS": "1",
        },
    )
    try:
        started.ready()
        until(lambda: started.get(f"/hub/api/models/{NAME}")[0] == 200)
        yield Keyed(started, keys, revoked)
    finally:
        started.stop()


@pytest.mark.parametrize("generation", GENERATIONS)
def test_clients_hit_every_limit_and_read_its_message(
    keyed: Keyed, runtimes: Path, tiny_gpt2: Path, tmp_path: Path, generation: str
) -> None:
    overlay = None if generation == "0.8" else runtimes / generation
    session = keyed.server.environment["NDIF_SESSION_ROOT"]
    revoke = ["env", f"NDIF_SESSION_ROOT={session}", str(NDIF)]
    environment = {
        **client_environment(keyed.server, tmp_path, overlay),
        "TEST_KEYS": json.dumps(keyed.keys[generation]),
        "TEST_REVOKE": shlex.join([*revoke, "keys", "revoke", keyed.revoked[generation]]),
    }
    client = Client("scenarios_accounts", NAME, tiny_gpt2, environment)
    try:
        for scenario in scenarios("scenarios_accounts"):
            client.run(scenario)
    finally:
        client.close()
    assert not any("Traceback" in line for line in keyed.server.output), [*keyed.server.output]
