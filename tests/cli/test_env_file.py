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
    done = ndif("--env-file", file, "info", "--config", "--json", NDIF_API_PORT="9002")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = {each["name"]: each for each in json.loads(done.stdout)["settings"]}
    assert found["NDIF_RUNNER_POOL"]["value"] == 3
    assert found["NDIF_SCHEDULE"]["value"] == "calendar with spaces.ics"
    assert found["NDIF_API_PORT"]["value"] == 9002
    assert found["NDIF_PUBLIC_URL"]["source"] == "default"


def test_missing_env_file_is_named(tmp_path: Path) -> None:
    done = ndif("--env-file", tmp_path / "none.env", "version")
    assert done.returncode == 2
    assert "none.env" in done.stderr
