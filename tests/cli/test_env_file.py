"""`ndif --env-file`: variables for a command and its child processes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.commands import NDIF

pytestmark = pytest.mark.process


def ndif(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run([NDIF, *arguments], env=environment, capture_output=True, text=True)


def test_env_file_sets_variables_below_environment(tmp_path: Path) -> None:
    file = tmp_path / "ndif.env"
    file.write_text(
        "# a comment\n"
        'NDIF_RUNNER_POOL=3\nexport NDIF_SCHEDULE="calendar with spaces.ics"\n'
        "NDIF_API_PORT=9001\nNDIF_PUBLIC_URL=\n"
    )
    process = ndif("--env-file", file, "info", "--config", "--json", NDIF_API_PORT="9002")
    assert process.returncode == 0, process.stderr
    settings_by_name: dict[str, Any] = {
        setting["name"]: setting for setting in json.loads(process.stdout)["settings"]
    }
    assert settings_by_name["NDIF_RUNNER_POOL"]["value"] == 3
    assert settings_by_name["NDIF_SCHEDULE"]["value"] == "calendar with spaces.ics"
    assert settings_by_name["NDIF_API_PORT"]["value"] == 9002
    assert settings_by_name["NDIF_PUBLIC_URL"]["source"] == "default"


def test_missing_env_file_is_named(tmp_path: Path) -> None:
    process = ndif("--env-file", tmp_path / "none.env", "version")
    assert process.returncode == 2
    assert "none.env" in process.stderr
