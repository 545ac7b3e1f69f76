"""Backup and restore of accounts with the commands of docs/accounts.md."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from ndif.stores.accounts import Caller, tier_with
from ndif.stores.accounts.sql.accounts import SqlAccounts
from ndif.stores.accounts.sql.database import Database
from ndif.stores.accounts.sql.registry import SqlRegistry
from tests.on_loop import on_loop
from tests.services.packages import need
from tests.stores.accounts.databases import ENGINES

pytestmark = pytest.mark.process

DOCUMENT = Path(__file__).parents[3] / "docs" / "accounts.md"


def documented(engine: str) -> list[str]:
    """Return the commands to back up and to restore."""
    (row,) = re.findall(rf"^\| {engine} \| (`.*`) \|$", DOCUMENT.read_text(), re.MULTILINE | re.I)
    return re.findall(r"`([^`]+)`", row)


@pytest.mark.parametrize("engine", ENGINES)
@on_loop
async def test_documented_backup_can_be_restored(
    engine: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    backup, restore = documented("SQLite" if engine == "sqlite" else "PostgreSQL")
    path = os.environ["PATH"]
    if engine == "sqlite":
        need("sqlite3", "sqlite3")
        url = f"sqlite:///{tmp_path}/accounts.sqlite"
    else:
        server = request.getfixturevalue("postgres")
        url, path = server.database(), f"{server.programs}:{path}"

    def run(command: str) -> None:
        environment = {**os.environ, "PATH": path, "NDIF_DATABASE_URL": url}
        process = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert process.returncode == 0, process.stderr

    registry = SqlRegistry(Database(url))
    await registry.create_tier(tier_with(["hotswapping"], "fast"))
    row = await registry.create_key("ada", tiers=["fast"])
    key = row.api_key
    run(backup)
    assert key.encode() not in (tmp_path / "accounts.bak").read_bytes()
    await registry.revoke(row.id)
    await registry.create_key("eve")
    await registry.close()
    run(restore)
    accounts = SqlAccounts(Database(url), 5)
    assert (await accounts.account(Caller(key))).hotswapping
    assert [user.name for user in await accounts.registry.users()] == ["ada"]
    await accounts.registry.create_key("bob")
    await accounts.stop()
