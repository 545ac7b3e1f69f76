"""Imports of commands: no heavy modules, and no serving modules for help."""

from __future__ import annotations

from pathlib import Path

import pytest

from ndif.cli.main import cli
from tests.test_imports import (
    HEAVY,
    SERVING,
    modules_imported_in_turn,
    modules_of,
    modules_of_commands,
    surplus,
)

pytestmark = pytest.mark.process

COMMANDS = sorted(cli.list_commands(None))  # type: ignore[attr-defined]


def test_help_imports_no_unneeded_modules(tmp_path: Path) -> None:
    imported_by_command = modules_of_commands(
        tmp_path, [(command, "--help") for command in COMMANDS]
    )
    for (command, _), _, printed in imported_by_command:
        assert f"Usage: python -m ndif {command}" in printed
    unneeded = (*HEAVY, *SERVING, "httpx", "rich", "yaml")
    assert (
        surplus([(line[0], imported) for line, imported, _ in imported_by_command], unneeded) == []
    )


def test_launch_modules_import_no_model_plane() -> None:
    imported_by_line = modules_imported_in_turn(
        "ndif.launch.start", "ndif.launch.preflight", "ndif.launch.run_folder"
    )
    assert "ndif" in imported_by_line[0][1]
    # socketio imports redis if redis is installed.
    assert surplus(imported_by_line, {*HEAVY} - {"redis"}) == []


def test_help_names_every_command(tmp_path: Path) -> None:
    _, printed = modules_of(tmp_path, "-m", "ndif", "--help")
    for command in COMMANDS:
        assert f"\n  {command} " in printed
