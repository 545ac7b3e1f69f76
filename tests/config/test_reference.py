"""The list of variables: `ndif info`, the example file, and the source of each value."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import Field, SecretStr

from ndif.cli.main import cli
from ndif.config import reference as variables
from ndif.config.reference import VariableError, changed, example, read, unread, without_secrets
from ndif.config.settings import Settings
from ndif.config.units import parse_gpus

EXAMPLE = Path(__file__).parents[2] / ".env.example"


def variables_by_name(options: Settings) -> dict[str, variables.Variable]:
    return {variable.name: variable for variable in variables.variables(options)}


def test_env_example_is_up_to_date() -> None:
    assert EXAMPLE.read_text() == example(), "run `ndif info --env-example > .env.example`"


def test_env_example_has_every_variable_once_with_default() -> None:
    lines = re.findall(r"^# ([A-Z_]+)=(.*)$", example(), re.MULTILINE)
    assert len(lines) == len(Settings.model_fields)
    values = dict(lines)
    assert len(values) == len(lines)
    assert values["NDIF_SESSION_ROOT"] == "~/.ndif"
    assert values["NDIF_API_PORT"] == "8001"
    assert values["NDIF_MINIMUM_DEPLOYMENT_TIME_SECONDS"] == "1h"
    assert values["NDIF_MAX_REQUEST_BYTES"] == "1GiB"
    assert values["NDIF_MODEL_CACHE_PERCENTAGE"] == "0.9"
    assert values["COORDINATOR_PROCESSOR_REPLY_FREQ_S"] == "3s"
    assert values["NDIF_RUNTIMES_DIR"] == ""


def test_env_example_changes_nothing_even_uncommented(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not [line for line in example().splitlines() if line and not line.startswith("#")]
    for name, value in re.findall(r"^# ([A-Z_]+)=(.+)$", example(), re.MULTILINE):
        monkeypatch.setenv(name, value)
    assert changed(Settings()) == {}


def test_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, _ in re.findall(r"^# ([A-Z_]+)=(.*)$", example(), re.MULTILINE):
        monkeypatch.setenv(name, "")
    options = read()
    assert changed(options) == {}
    assert {variable.source for variable in variables.variables(options)} == {"default"}


def test_every_variable_has_description() -> None:
    for variable in variables_by_name(Settings()).values():
        assert variable.meaning.endswith("."), variable.name


def test_variable_reports_source_of_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NDIF_RUNNER_POOL", "7")
    monkeypatch.setenv("COORDINATOR_PROCESSOR_REPLY_FREQ_S", "1.5")
    monkeypatch.delenv("NDIF_MAX_ATTEMPTS", raising=False)
    values = variables_by_name(Settings())
    assert (values["NDIF_RUNNER_POOL"].value, values["NDIF_RUNNER_POOL"].default) == (7, 2)
    assert values["NDIF_RUNNER_POOL"].source == "environment"
    assert values["COORDINATOR_PROCESSOR_REPLY_FREQ_S"].value == 1.5
    assert values["COORDINATOR_PROCESSOR_REPLY_FREQ_S"].source == "environment"
    assert values["NDIF_MAX_ATTEMPTS"].source == "default"
    names = changed(Settings())
    assert names["NDIF_RUNNER_POOL"] == 7
    assert "NDIF_MAX_ATTEMPTS" not in names


def test_variables_accept_sizes_and_durations_with_units(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in ("2GiB", "2 GiB", str(2 * 1024**3)):
        monkeypatch.setenv("NDIF_MAX_REQUEST_BYTES", size)
        assert Settings().max_request_bytes == 2 * 1024**3
        monkeypatch.setenv("NDIF_NODE_CPU_MEMORY", size)
        monkeypatch.setenv("NDIF_NODE_GPUS", f"3x{size}")
        assert parse_gpus(Settings().node_gpus) == (2 * 1024**3,) * 3
    for duration in ("15m", "900", "900.0", "9e2"):
        monkeypatch.setenv("NDIF_RESULT_TTL_S", duration)
        assert Settings().result_ttl_s == 900
    shown = CliRunner().invoke(cli, ["info", "--config"]).output
    assert re.search(r"NDIF_MAX_REQUEST_BYTES +. 2GiB +. environment . 1GiB", shown), shown


def test_secrets_are_hidden_in_shown_and_saved_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    class More(Settings):
        password: SecretStr = Field(default=SecretStr(""), description="A secret.")
        broker_url: str = Field(default="", description="An address.")

    monkeypatch.setattr(variables, "Settings", More)
    monkeypatch.setenv("NDIF_PASSWORD", "hunter2")
    monkeypatch.setenv("NDIF_BROKER_URL", "redis://ann:hunter2@broker:6379/0")
    monkeypatch.setenv(
        "NDIF_SCHEDULE", "https://calendar.org/ical/private-hunter2/basic.ics?t=hunter2"
    )
    values = variables_by_name(More())
    assert "hunter2" not in repr(values)
    assert values["NDIF_PASSWORD"].value == "(hidden)"
    assert values["NDIF_BROKER_URL"].value == "redis://(hidden)@broker:6379/0"
    assert without_secrets("redis://:p@ss:w@broker/0") == "redis://(hidden)@broker/0"
    assert values["NDIF_SCHEDULE"].value == "https://calendar.org/ical/(hidden)/basic.ics?(hidden)"
    assert "hunter2" not in repr(changed(More()))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        (
            "NDIF_RUNNER_POOL",
            "many",
            "The variable NDIF_RUNNER_POOL is not valid: must be a whole number",
        ),
        (
            "COORDINATOR_PROCESSOR_REPLY_FREQ_S",
            "0",
            "COORDINATOR_PROCESSOR_REPLY_FREQ_S is not valid",
        ),
        ("NDIF_MAX_LOG_BYTES", "8 megs", "must be a size, like \"12GiB\", .*, not '8 megs'"),
        ("MIN_NNSIGHT_VERSION", "newest", "MIN_NNSIGHT_VERSION is not valid: must be a version"),
        ("NDIF_DRAIN_TIMEOUT_S", "soon", "must be a duration, like \"90s\", .*, not 'soon'"),
        ("NDIF_AUTOSCALE_COOLDOWN_S", "1e6", "contradict each other: NDIF_AUTOSCALE_COOLDOWN_S"),
    ],
)
def test_invalid_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any, says: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(VariableError, match=says):
        read()


def test_all_invalid_variables_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NDIF_RUNNER_POOL", "many")
    monkeypatch.setenv("NDIF_CLUSTER_SECRET", "sh0rt-secret")
    monkeypatch.setenv("MIN_NNSIGHT_VERSION", "newest")
    with pytest.raises(VariableError) as caught:
        read()
    lines = str(caught.value).splitlines()
    named = ("MIN_NNSIGHT_VERSION", "NDIF_CLUSTER_SECRET", "NDIF_RUNNER_POOL")
    assert len(lines) == len(named)
    for name in named:
        assert sum(line.startswith(f"The variable {name} is not valid: ") for line in lines) == 1
    assert "sh0rt" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "NDIF_RUNER_POOL",
            "The variable NDIF_RUNER_POOL is not read: did you mean NDIF_RUNNER_POOL?",
        ),
        ("ndif_sanbox", "The variable ndif_sanbox is not read: did you mean NDIF_SANDBOX?"),
        ("NDIF_RAY_DASHBOARD_PORT", "a Ray head that this server starts has no dashboard."),
        ("NDIF_CONTROLLER_IMPORT_PATH", "is not read: there is one controller."),
        ("NDIF_WALLPAPER", "is not read: `ndif info --config` lists all variables."),
    ],
)
def test_unknown_variable_is_reported(name: str, says: str) -> None:
    (warning,) = unread({name: "1"})
    assert warning.endswith(says)


def test_known_variables_are_not_reported() -> None:
    names = [
        *variables_by_name(Settings()),
        "NDIF_HOST",
        "NDIF_API_KEY",
        "ndif_sandbox",
        "_NDIF_COMPLETE",
    ]
    assert unread(dict.fromkeys(names, "1")) == []


def test_commands_warn_of_unknown_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NDIF_SANBOX", "off")
    monkeypatch.setenv("NDIF_SESSION_ROOT", str(tmp_path))
    for command in (
        ["info", "--config", "--json"],
        ["start", "--deployment-config", str(tmp_path / "none")],
        ["local", "start", str(tmp_path / "none")],
    ):
        result = CliRunner().invoke(cli, command)
        assert "NDIF_SANBOX is not read: did you mean NDIF_SANDBOX?" in result.stderr, result
        assert "NDIF_SANBOX" not in result.stdout


def test_secret_file_is_read_unless_variable_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NDIF_SECRETS_DIR", str(tmp_path))
    (tmp_path / "ndif_cluster_secret").write_text("sixteen letters and more\n")
    (tmp_path / "POSTGRES_PASSWORD").write_text("of the file")
    monkeypatch.setenv("POSTGRES_PASSWORD", "of the environment")
    options = Settings()
    assert options.cluster_secret.get_secret_value() == "sixteen letters and more"
    assert options.postgres_password.get_secret_value() == "of the environment"


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_unreadable_secrets_folder_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    folder = tmp_path / "secrets"
    if content is not None:
        folder.mkdir()
        (folder / "ndif_cluster_secret").write_bytes(content)
    monkeypatch.setenv("NDIF_SECRETS_DIR", str(folder))
    with pytest.raises(VariableError, match="NDIF_SECRETS_DIR"):
        read()


def test_invalid_secret_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NDIF_CLUSTER_SECRET", "sh0rt-secret")
    with pytest.raises(VariableError, match=r"must have at least 16 characters\.$") as caught:
        read()
    assert "sh0rt" not in str(caught.value)
