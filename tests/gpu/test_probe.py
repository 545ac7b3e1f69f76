"""The probe with its stand-in for CUDA; the layers of the confinement are real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ndif.sandbox.confinement.layers import detect_layers, missing_layers
from tests.gpu.probe import RUNNER

needs_every_layer = pytest.mark.skipif(
    bool(missing_layers(detect_layers())),
    reason="this kernel has not every layer of the confinement",
)
pytestmark = [needs_every_layer, pytest.mark.process]

REFUSED = {
    "limits before the start": "File too large",
    "files, without driver libraries": "Permission denied",
    "files, without thread names": "naming a thread: Permission denied",
    "files, without counters": "unable to open file",
}
REFUSED_WITH_EVENTS = {"files, without event files": "Permission denied"}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("probe") / "probe.json"
    subprocess.run(
        [sys.executable, "-m", "tests.gpu.probe", "--pretend", "--json", path],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "GPU-pretended"},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.DEVNULL,
        check=False,  # the probe fails if the runner's row fails
    )
    report: dict[str, Any] = json.loads(path.read_text())
    return report["rows"]


@pytest.mark.parametrize("kind", ["without events", "with events"])
def test_stand_in_fails_only_without_required_grants(rows: dict[str, Any], kind: str) -> None:
    refused = {**REFUSED, **(REFUSED_WITH_EVENTS if kind == "with events" else {})}
    mine = {
        name.removesuffix(f", {kind}"): row for name, row in rows.items() if name.endswith(kind)
    }
    assert len(mine) > len(refused)
    for name, row in mine.items():
        if name in refused:
            assert refused[name] in row, name
        else:
            assert row["ok"], name


def test_cleared_environment_selects_another_gpu(rows: dict[str, Any]) -> None:
    assert rows["nothing, without events"]["same_card"]
    assert not rows["environment cleared, without events"]["same_card"]


def test_runner_confinement_lets_cuda_start(rows: dict[str, Any]) -> None:
    row = rows[RUNNER]
    assert isinstance(row, dict), row
    assert row["ok"]
    assert row["same_card"]
