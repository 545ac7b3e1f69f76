"""Imports of commands: nothing heavy, and for their help nothing that serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from ndif.cli.main import cli
from tests.test_imports import HEAVY, SERVING, modules_of

COMMANDS = sorted(cli.list_commands(None))  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_imports_nothing_it_does_not_need(
    tmp_path: Path, command: str
) -> None:
    imported, printed = modules_of(tmp_path, "-m", "ndif", command, "--help")
    assert f"Usage: ndif {command}" in printed or "Usage: python -m ndif" in printed
    assert imported.isdisjoint((*HEAVY, *SERVING, "httpx", "rich", "yaml"))


@pytest.mark.parametrize(
    "module", ["ndif.launch.start", "ndif.launch.preflight", "ndif.launch.run_folder"]
)
def test_what_starts_a_server_imports_no_model_plane(tmp_path: Path, module: str) -> None:
    imported, _ = modules_of(tmp_path, "-c", f"import {module}")
    assert "ndif" in imported
    # socketio takes redis with it wherever that is installed.
    assert imported.isdisjoint({*HEAVY} - {"redis"})


def test_the_help_names_every_command(tmp_path: Path) -> None:
    _, printed = modules_of(tmp_path, "-m", "ndif", "--help")
    for command in COMMANDS:
        assert f"\n  {command} " in printed
