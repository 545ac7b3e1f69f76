"""Malformed revisions on the command line."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from ndif.cli.main import cli


@pytest.mark.parametrize("command", [("deploy",), ("local", "start"), ("model",)])
@pytest.mark.parametrize("revision", ["../../made5", "a b", ""])
def test_malformed_revision_shows_usage(command: tuple[str, ...], revision: str) -> None:
    result = CliRunner().invoke(cli, [*command, "org/a", "--revision", revision])
    assert result.exit_code == 2
    assert f"{revision!r} must be a branch, a tag or a commit" in result.output
