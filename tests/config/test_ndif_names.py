"""Variable names of NDIF: its printed reference, and names of newer versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from ndif.cli.main import cli
from ndif.config.ndif_names import FIELDS
from ndif.config.reference import VariableError, name_of, read, unread
from ndif.config.settings import Settings, settings

pytestmark = pytest.mark.unit

AS_PRINTED = """\
NDIF_BROKER_URL=redis://localhost:6379/
NDIF_OBJECT_STORE_URL=http://localhost:27017
NDIF_API_PORT=8001
NDIF_API_WORKERS=1
NDIF_DEV_MODE=false
NDIF_RAY_ADDRESS=ray://localhost:10001
NDIF_RAY_HEAD_PORT=6379
NDIF_RAY_DASHBOARD_PORT=8265
NDIF_RAY_SERVE_PORT=8262
NDIF_RAY_TEMP_DIR=/tmp/ray
NDIF_CONTROLLER_IMPORT_PATH=src.ray.deployments.controller.controller
NDIF_DEPLOYMENTS=""
NDIF_EXECUTION_TIMEOUT_SECONDS=3600
NDIF_MINIMUM_DEPLOYMENT_TIME_SECONDS=3600
NDIF_MODEL_CACHE_PERCENTAGE=0.9
NDIF_CONTROLLER_SYNC_INTERVAL_S=30
COORDINATOR_STATUS_CACHE_FREQ_S=120
COORDINATOR_PROCESSOR_REPLY_FREQ_S=3
POSTGRES_HOST=
POSTGRES_PORT=
POSTGRES_DB=
POSTGRES_USER=
POSTGRES_PASSWORD=
"""
"""The variables of NDIF's configuration reference with their defaults."""

VALUES = {
    "NDIF_HOME": "/tmp/of-ndif",
    "NDIF_REDIS_URL": "redis://10.0.0.1:6379/",
    "NDIF_POSTGRES_URL": "postgresql://ann:secret@10.0.0.1/ndif",
    "NDIF_MIN_NNSIGHT_VERSION": "0.8.0",
    "NDIF_MIN_PYTHON_VERSION": "3.11",
    "NDIF_INFLUX_URL": "http://10.0.0.1:8086",
    "NDIF_INFLUX_TOKEN": "a-token",
    "NDIF_DASHBOARD_PASSWORD_HASH": f"$2b$12${'a' * 53}",
    "NDIF_RAY_HEAD_ADDRESS": "10.0.0.1:6380",
    "NDIF_DEFAULT_PADDING_BIAS": "1GiB",
}
"""Values of variables that are not numbers."""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset every variable of this server."""
    for name in os.environ:
        if name.startswith("NDIF_"):
            monkeypatch.delenv(name)
    settings.cache_clear()


def set_as_printed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    given = dict(line.split("=", 1) for line in AS_PRINTED.splitlines())
    for name, value in given.items():
        monkeypatch.setenv(name, value.strip('"'))
    return given


def test_variables_of_ndif_reference_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    given = set_as_printed(monkeypatch)
    options = read()
    assert options.object_store_access_key == "minioadmin"
    assert options.object_store_secret_key.get_secret_value() == "minioadmin"
    assert (options.postgres_port, options.postgres_db) == (5432, "ndif")
    sentences = unread(given)
    # This server has no counterpart of these variables.
    for name in ("RAY_DASHBOARD_PORT", "RAY_SERVE_PORT", "CONTROLLER_IMPORT_PATH"):
        assert sum(f"NDIF_{name} is not read: " in warning for warning in sentences) == 1
    assert sum("are not set: the server uses MinIO's default keys" in s for s in sentences) == 1
    assert len(sentences) == 4


@pytest.mark.parametrize(
    "more",
    [
        {"NDIF_OBJECT_STORE_URL": "https://s3.example.org"},
        {"NDIF_OBJECT_STORE_ACCESS_KEY": "one-of-two"},
    ],
)
def test_object_store_url_needs_both_keys(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, str]
) -> None:
    set_as_printed(monkeypatch)
    for name, value in more.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(VariableError, match="NDIF_OBJECT_STORE_URL needs"):
        read()


@pytest.mark.parametrize("name", FIELDS)
def test_variable_with_ndif_name_is_read_and_local_name_is_reported(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    value, field = VALUES.get(name, "7"), FIELDS[name]
    variable = name_of(field)
    # NDIF has a separate variable for the bucket.
    monkeypatch.setenv(variable, f"{value}/traces" if name == "NDIF_INFLUX_URL" else value)
    by_its_name_here = getattr(Settings(), field)
    monkeypatch.delenv(variable)
    monkeypatch.setenv("NDIF_INFLUX_BUCKET", "traces")
    monkeypatch.setenv("NDIF_INFLUX_ORG", "lab")
    monkeypatch.setenv(name, value)
    assert (
        getattr(Settings(), field) == by_its_name_here != getattr(Settings.model_construct(), field)
    )
    assert f"The variable {name} is read as {variable}, its name here." in unread(os.environ)


def test_local_variable_name_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NDIF_REDIS_URL", "redis://theirs:6379/")
    monkeypatch.setenv("NDIF_BROKER_URL", "redis://ours:6379/")
    assert Settings().broker_url == "redis://ours:6379/"
    (warning,) = unread(os.environ)
    assert warning.startswith(
        "The variable NDIF_REDIS_URL is not read, because NDIF_BROKER_URL is set"
    )


def test_command_warns_of_foreign_variable_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NDIF_HOME", str(tmp_path))
    result = CliRunner().invoke(cli, ["info", "--config", "--json"])
    assert (
        "Warning: The variable NDIF_HOME is read as NDIF_SESSION_ROOT, its name here."
        in result.stderr
    )
    assert str(tmp_path) in result.stdout
