"""`ndif admin password`: accepted passwords, and the printed variable."""

from __future__ import annotations

import json

import pytest
from argon2 import PasswordHasher
from click.testing import CliRunner
from pydantic import ValidationError

from ndif.cli.main import cli
from ndif.config.settings import Settings

NAME = "NDIF_ADMIN_PASSWORD_HASH"


def test_admin_password_prints_hash_variable_that_server_accepts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = CliRunner().invoke(cli, ["admin", "password"], input="three words nobody knows\n")
    assert result.exit_code == 0, result.output
    assert "words" not in result.output
    name, _, value = result.stdout.strip().removeprefix("export ").partition("=")
    assert name == NAME
    assert value[0] == value[-1] == "'"
    digest = value.strip("'")
    assert PasswordHasher().verify(digest, "three words nobody knows")
    monkeypatch.setenv(NAME, digest)
    assert Settings().admin_password_hash.get_secret_value() == digest
    result = CliRunner().invoke(
        cli, ["admin", "password", "--json"], input="four words nobody knows\n"
    )
    assert PasswordHasher().verify(json.loads(result.stdout)[NAME], "four words nobody knows")


@pytest.mark.parametrize("given", ["", "short\n", "x" * 1025 + "\n"])
def test_too_short_or_too_long_password_is_rejected(given: str) -> None:
    result = CliRunner().invoke(cli, ["admin", "password"], input=given)
    assert result.exit_code == 1
    assert "12 to 1024 characters" in result.output


@pytest.mark.parametrize("value", ["three words nobody knows", "$2b$12$abc", "=19=65536"])
def test_invalid_password_hash_is_rejected(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, value)
    with pytest.raises(ValidationError, match="single quotes"):
        Settings()
