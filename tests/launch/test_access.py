"""Checks of accounts before a start, and migration of their database."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ndif.config.settings import Settings
from ndif.launch.access import prepare_access
from ndif.launch.machine_checks import Check, check_machine
from ndif.launch.preflight import ServerOptions, preflight
from ndif.launch.services.service import without_secrets
from ndif.net import StartError
from ndif.stores.accounts.sql.database import Database
from tests.services.postgres import PASSWORD, PostgresServer
from tests.services.process import free_port
from tests.stores.accounts.databases import FOREIGN, TestDatabase
from tests.stores.accounts.databases import database as database

pytestmark = pytest.mark.engine


def options(root: Path, **settings: Any) -> Settings:
    return Settings(session_root=root, sandbox="off", **settings)


def check(settings: Settings) -> list[Check]:
    return [finding for finding in check_machine(settings) if finding.name == "API keys"]


def problem(settings: Settings) -> str:
    """Return the reason why a start is refused, which `ndif doctor` also shows."""
    with pytest.raises(StartError) as refused:
        preflight(settings, ServerOptions("127.0.0.1", free_port(), (), None))
    (finding,) = check(settings)
    assert finding.state == "problem"
    assert finding.detail in str(refused.value)
    return finding.detail


def started(settings: Settings) -> None:
    listening = preflight(settings, ServerOptions("127.0.0.1", free_port(), (), None)).listening
    assert listening is not None
    listening.close()
    prepare_access(settings, "http://127.0.0.1:8001")


def test_check_leaves_database_empty_and_start_migrates_it(
    database: TestDatabase, tmp_path: Path
) -> None:
    settings = options(tmp_path, database_url=database.url)
    (finding,) = check(settings)
    assert (finding.state, PASSWORD in finding.detail) == ("ok", False)
    # A check changes nothing.
    assert asyncio.run(Database(database.url).check_and_close()) == "empty"
    for _ in range(2):
        started(settings)
        assert asyncio.run(Database(database.url).check_and_close()) == "ours"


def test_foreign_database_is_not_migrated(database: TestDatabase, tmp_path: Path) -> None:
    database.sql(FOREIGN)
    settings = options(tmp_path, database_url=database.url)
    (finding,) = check(settings)
    assert "`ndif keys migrate`" in finding.detail
    started(settings)
    assert asyncio.run(Database(database.url).check_and_close()) == "foreign"


def test_postgres_variables_configure_database(postgres: PostgresServer, tmp_path: Path) -> None:
    name = postgres.database().rpartition("/")[2]
    account_variables: dict[str, Any] = {
        "POSTGRES_HOST": "127.0.0.1",
        "POSTGRES_PORT": postgres.port,
        "POSTGRES_DB": name,
        "POSTGRES_USER": "ndif",
    }
    started(options(tmp_path, **account_variables, POSTGRES_PASSWORD=PASSWORD))
    message = problem(options(tmp_path, **account_variables, POSTGRES_PASSWORD="another"))
    assert "password authentication failed" in message
    assert "another" not in message


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"dev_mode": True, "database_url": "sqlite:////x"}, "NDIF_DEV_MODE and NDIF_DATABASE_URL"),
        ({"database_url": "mysql://x/y"}, "is not like postgresql://"),
        ({"database_url": "postgresql://u:p@127.0.0.1:1/d"}, "127.0.0.1:1/d"),
        ({"api_keys": "/none.yaml"}, "/none.yaml cannot be read"),
    ],
)
def test_invalid_account_settings_prevent_start(
    settings: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    assert expected in problem(options(tmp_path, **settings))


def test_secrets_are_removed_from_environment_of_services_and_ray() -> None:
    variables = {
        "NDIF_DATABASE_URL": "1",
        "POSTGRES_PASSWORD": "2",
        "NDIF_CLUSTER_SECRET": "3",
        "NDIF_INFLUXDB_URL": "4",
        "NDIF_INFLUXDB_TOKEN": "5",
        "PATH": "/bin",
    }
    assert without_secrets(variables) == {"PATH": "/bin"}
